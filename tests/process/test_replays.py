"""Recorded asynchronous runs execute again bit for bit; what differs is found and named."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Launchers, Live, Outcome, command, train

import slipstream as ss
from slipstream.record import ENTRY, HEADER, read

SMALL: dict[str, Any] = {
    "copies": 4, "total_steps": 6000, "target_return": None, "net": {"hidden": (32, 32)}, "algo.rollout_steps": 8,
    "watch": {"tensorboard": False},
}  # fmt: skip
MEMORY: dict[str, Any] = {
    "net": {"hidden": (32,), "core": "lstm", "core_size": 16}, "normalize_observations": True,
    "normalize_rewards": True, "algo.optimizer": "rmsprop",
}  # fmt: skip


def assert_identical(run: Outcome) -> ss.Replay:
    replayed = ss.replay(run.directory)
    state = run.state
    assert replayed.compared_with_checkpoint
    assert replayed.final_checksum == state["weights_checksum"]
    assert (replayed.updates, replayed.steps) == (state["version"], state["steps"])
    assert replayed.contributions == state["entries"]
    assert replayed.checksums >= replayed.updates // 100
    return replayed


def staleness(run: Outcome) -> int:
    """Largest number of versions between a pull and its apply: above 0 the run was asynchronous."""
    entries = read(run.directory / "schedule.bin")
    return int((entries["tick"] - 1 - entries["pulled"]).max())


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("rule", ["lock", "sync"])
@pytest.mark.parametrize(("env", "settings"), [("CartPole-v1", {}), ("bad_envs:Bad-v0", MEMORY)], ids=["plain", "lstm"])
def test_threads(env: str, settings: dict[str, Any], rule: str, workers: int, tmp_path: Path) -> None:
    run = train(
        tmp_path / "r", env=env, **{**SMALL, **settings}, update=rule, workers=workers, backend="thread", seed=workers
    )
    assert run.error is None
    assert assert_identical(run).workers == workers
    assert staleness(run) == 0 if rule == "sync" else staleness(run) > 0


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("rule", ["lock", "sync"])
def test_processes_with_workers_killed(rule: str, workers: int, tmp_path: Path, launchers: Launchers) -> None:
    slow = tmp_path / "slow"
    slow.touch()

    def kill(live: Live) -> bool:
        live.steps_reach(300)
        os.kill(live.worker(workers - 1), signal.SIGKILL)
        live.steps_reach(900)
        pid = live.worker(0)
        os.kill(pid, signal.SIGKILL)
        live.worker(0, but=pid)
        slow.unlink()  # now quickly
        return False

    run = train(
        tmp_path / "r", launchers.take(), kill, env="bad_envs:Bad-v0", env_kwargs={"slow": str(slow)},
        **SMALL, update=rule, workers=workers,
    )  # fmt: skip
    assert run.error is None
    assert run.summary["restarts"] == 2
    entries = read(run.directory / "schedule.bin")
    assert {(int(e["worker"]), int(e["incarnation"])) for e in entries} >= {(0, 1), (workers - 1, 1)}
    assert_identical(run)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, launchers: Launchers) -> Outcome:
    """A run of two processes under `lock`."""
    run = train(tmp_path_factory.mktemp("recorded") / "r", launchers.take(), **SMALL, update="lock", workers=2)
    assert run.error is None
    return run


@pytest.fixture
def copied(recorded: Outcome, tmp_path: Path) -> Outcome:
    """A copy to spoil."""
    shutil.copytree(recorded.directory, tmp_path / "copy")
    return Outcome(tmp_path / "copy")


def test_processes_sync(tmp_path: Path, launchers: Launchers) -> None:
    run = train(tmp_path / "r", launchers.take(), **SMALL, update="sync", workers=2)
    assert_identical(run)


def test_command(recorded: Outcome) -> None:
    assert staleness(recorded) > 0
    done = command("replay", recorded.directory, "--json")
    assert done.code == 0, done
    assert done.json["identical"] is True
    assert done.json["final_checksum"] == recorded.state["weights_checksum"]
    assert assert_identical(recorded).workers == 2


def test_until_update(recorded: Outcome) -> None:
    whole = read(recorded.directory / "schedule.bin")
    replayed = ss.replay(recorded.directory, until_update=100)
    assert replayed.updates == 100
    assert replayed.contributions == 100
    assert replayed.final_checksum == int(whole["checksum"][99])
    assert not replayed.compared_with_checkpoint
    assert ss.replay(recorded.directory, until_update=3).updates == 3


def spoil(run: Outcome, index: int, field: str, value: Any) -> Any:
    """Change one field of one entry of the record; returns the entry as it was."""
    file = run.directory / "schedule.bin"
    raw = bytearray(file.read_bytes())
    entries = np.frombuffer(raw, ENTRY, -1, HEADER)
    was = entries[index].copy()
    entries[index][field] = value
    file.write_bytes(raw)
    return was


def test_changed_loss_is_named(copied: Outcome) -> None:
    loss = float(read(copied.directory / "schedule.bin")[120]["loss"])
    was = spoil(copied, 120, "loss", np.nextafter(loss, 9.0))
    with pytest.raises(ss.RunFailed, match="differs first in loss") as caught:
        ss.replay(copied.directory)
    text = str(caught.value)
    assert f"worker {was['worker']} " in text
    assert f"its rollout {was['rollout']}" in text
    assert f"update {was['version']}" in text
    assert repr(loss) in text


def test_changed_checksum_is_named(copied: Outcome) -> None:
    entries = read(copied.directory / "schedule.bin")
    index = int(np.flatnonzero(entries["checksum"])[0])
    was = spoil(copied, index, "checksum", int(entries["checksum"][index]) ^ 2)
    done = command("replay", copied.directory)
    assert done.code == 1
    assert done.out == ""
    assert f"differs in the weights at update {was['version']}, applied by worker {was['worker']}" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("field", ["version", "steps", "rollout", "kind"])
def test_other_changes_are_named(field: str, copied: Outcome) -> None:
    entry = read(copied.directory / "schedule.bin")[50]
    spoil(copied, 50, field, int(entry[field]) + 1)
    with pytest.raises(ss.RunFailed, match="differs") as caught:
        ss.replay(copied.directory)
    assert f"worker {entry['worker']}" in str(caught.value)


def test_spoiled_record_is_an_error_that_names_it(copied: Outcome) -> None:
    """Order turned round, or a tick that never was: no traceback of ours."""
    file = copied.directory / "schedule.bin"
    raw = file.read_bytes()
    for field, value in (("pulled", 10**6), ("worker", 7), ("tick", 4)):
        file.write_bytes(raw)
        spoil(copied, 60, field, value)
        with pytest.raises(ss.SlipstreamError):
            ss.replay(copied.directory)
    file.write_bytes(raw[: HEADER + 70 * ENTRY.itemsize + 11])  # cut off
    with pytest.raises(ss.SlipstreamError):
        ss.replay(copied.directory)
    file.write_bytes(b"no record")
    with pytest.raises(ss.ConfigError, match="not a schedule record"):
        ss.replay(copied.directory)
    file.unlink()
    with pytest.raises(ss.ConfigError, match="not recorded"):
        ss.replay(copied.directory)


def test_environment_that_is_not_deterministic(tmp_path: Path) -> None:
    kwargs = {"fault": "unlike", "at": 13}
    run = train(tmp_path / "r", env="bad_envs:Bad-v0", env_kwargs=kwargs, **SMALL, workers=1, backend="thread")
    assert run.error is None
    with pytest.raises(ss.RunFailed, match="not deterministic given its seed") as caught:
        ss.replay(run.directory)
    # 8 steps a rollout: step 13 of the first episode is in rollout 1
    assert "differs first in loss of worker 0 (start 0), its rollout 1, computed from tick 1" in str(caught.value)


def test_hogwild_says_why_not(tmp_path: Path) -> None:
    run = train(tmp_path / "r", **{**SMALL, "total_steps": 1000}, update="hogwild", workers=2, backend="thread")
    assert run.error is None
    with pytest.raises(ss.ConfigError, match="hogwild cannot be replayed: its workers write the weights at the same"):
        ss.replay(run.directory)


def test_not_recorded(tmp_path: Path) -> None:
    run = train(tmp_path / "r", **{**SMALL, "total_steps": 500}, record=False, workers=1, backend="thread")
    assert run.error is None
    with pytest.raises(ss.ConfigError, match="not recorded"):
        ss.replay(run.directory)
    with pytest.raises(ss.ConfigError, match="not a run directory"):
        ss.replay(tmp_path)


def test_nan_on_the_way_is_replayed(tmp_path: Path) -> None:
    """A dropped gradient is part of the record."""
    kwargs = {"fault": "nan reward", "at": 13}
    settings = {**SMALL, "total_steps": 1500, "limits": {"max_nonfinite": 10**6}}
    run = train(tmp_path / "r", env="bad_envs:Bad-v0", env_kwargs=kwargs, **settings, workers=2, backend="thread")
    assert run.error is None
    assert run.summary["nonfinite_gradients"] > 5
    assert run.state["version"] + run.summary["nonfinite_gradients"] == run.state["entries"]
    assert assert_identical(run).updates < run.state["entries"]


def test_callable_is_asked_for(tmp_path: Path) -> None:
    import bad_envs

    make = lambda: bad_envs.Bad()  # noqa: E731
    run = train(tmp_path / "r", env=make, **{**SMALL, "total_steps": 500}, workers=1, backend="thread")
    assert run.error is None
    assert json.loads((run.directory / "parts.json").read_text())[0]["callables"] == ["env"]
    with pytest.raises(ss.ConfigError, match="give it as env="):
        ss.replay(run.directory)
    assert ss.replay(run.directory, env=make).identical
