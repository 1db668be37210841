"""A resumed run is the run it would have been."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Launchers, Live, Outcome, command, finish, resume, start, train, until

import slipstream as ss
from slipstream.record import read

STEPS = 4000
SMALL: dict[str, Any] = {
    "workers": 1, "copies": 4, "total_steps": STEPS, "target_return": None, "net": {"hidden": (32, 32)},
    "algo.rollout_steps": 8, "watch": {"every": 0.1, "histograms_every": 0.2},
}  # fmt: skip


def lines(run: Outcome) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run.directory / "metrics.jsonl").read_text().splitlines()]


def points(directory: Path) -> dict[str, list[int]]:
    """Steps of every curve as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory / "tensorboard"))
    shown.Reload()
    tags = shown.Tags()
    curves = {tag: [e.step for e in shown.Scalars(tag)] for tag in tags["scalars"]}
    return curves | {tag: [e.step for e in shown.Histograms(tag)] for tag in tags["histograms"]}


NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}


@pytest.mark.parametrize(
    ("rule", "env", "settings", "backends"),
    [
        ("lock", "CartPole-v1", {}, ("process", "process")),
        ("sync", "CartPole-v1", {}, ("thread", "thread")),
        ("lock", "Acrobot-v1", {"algo.optimizer": "rmsprop"}, ("thread", "thread")),
        ("sync", "Acrobot-v1", {"algo.optimizer": "rmsprop"}, ("process", "process")),
        ("lock", "CartPole-v1", {"net.core": "lstm", "net.core_size": 16}, ("process", "thread")),
        ("sync", "CartPole-v1", {"net.core": "lstm", "net.core_size": 16}, ("thread", "thread")),
        ("lock", "bad_envs:Bad-v0", NORMALIZED, ("thread", "thread")),
        ("sync", "bad_envs:Bad-v0", NORMALIZED, ("thread", "process")),
    ],
)
def test_equals_not_having_stopped(
    rule: str, env: str, settings: dict[str, Any], backends: tuple[str, str], tmp_path: Path, launchers: Launchers
) -> None:
    """The first run is of threads, so besides a thread and a process compute the same numbers."""
    settings = {**SMALL, **settings, "update": rule, "seed": 3}
    launcher = lambda backend: launchers.take() if backend == "process" else None  # noqa: E731
    straight = train(tmp_path / "straight", env=env, **settings, backend="thread")
    assert straight.error is None

    def interrupt(live: Live) -> bool:
        live.steps_reach(STEPS // 8)
        return True

    for attempt in range(5):  # on a busy machine it may be over before it is stopped
        place = tmp_path / str(attempt)
        stopped = train(place, launcher(backends[0]), interrupt, env=env, **settings, backend=backends[0])
        if isinstance(stopped.error, ss.Interrupted) and stopped.state["steps"] < STEPS:
            break
    assert 0 < stopped.state["steps"] < STEPS
    resumed = resume(stopped.directory, launcher(backends[1]), backend=backends[1])
    assert resumed.error is None
    same = ("weights_checksum", "version", "steps", "entries", "episodes", "returns")
    assert {k: resumed.state[k] for k in same} == {k: straight.state[k] for k in same}
    assert resumed.summary["episodes"] == straight.summary["episodes"]
    assert resumed.summary["mean_return"] == straight.summary["mean_return"]
    assert not resumed.log("begin anew")
    replayed = ss.replay(resumed.directory)
    assert replayed.compared_with_checkpoint
    assert replayed.final_checksum == straight.state["weights_checksum"]


def test_changed_settings_are_shown_and_used(tmp_path: Path) -> None:
    """The learning rate and the end change; the schedule goes on over global steps; replay knows both parts."""
    run = tmp_path / "r"
    settings = {**SMALL, "total_steps": 2000, "algo.schedule_steps": 20000, "algo.learning_rate": 1e-3}
    first = train(run, **settings, backend="thread")
    assert first.error is None
    second = command("resume", run, "--algo.learning-rate", 1e-4, "--total-steps", 4000, "--show", "plain")
    assert second.code == 0, second
    assert "changed: algo.learning_rate: 0.001 -> 0.0001" in second.out
    assert "changed: total_steps: 2000 -> 4000" in second.out
    assert second.out.count("changed:") == 2
    outcome = Outcome(run)
    assert len(outcome.log("changed: ")) == 2
    reached = int(outcome.log("resuming at step")[0]["message"].split()[-1])
    assert f"resuming at step {reached:,}" in second.out
    for line in lines(outcome):
        initial = 1e-3 if line["steps"] <= reached else 1e-4
        assert line["learning_rate"] == pytest.approx(initial * (1 - line["steps"] / 20000))
    assert any(line["steps"] > reached for line in lines(outcome))
    replayed = ss.replay(run)
    assert replayed.compared_with_checkpoint
    assert replayed.steps == outcome.state["steps"]

    third = command("resume", run)
    assert third.code == 2  # nothing is left to do
    assert "give a larger --total-steps" in third.err
    for wrong in ({"net.hidden": (8, 8)}, {"seed": 4}, {"algo.optimizer": "sgd"}, {"env": "Acrobot-v1"}):
        with pytest.raises(ss.ConfigError, match=next(iter(wrong)).split(".hidden")[0]):
            ss.resume(run, total_steps=10_000, **wrong)


def test_killed_outright(tmp_path: Path) -> None:
    """kill -9 of the whole run: it goes on from its last checkpoint, and record and curves are cut back to that."""
    run = tmp_path / "r"
    process = start(
        "train", "CartPole-v1", "--workers", 2, "--copies", 4, "--total-steps", 10**9, "--run", run,
        "--target-return", "None", "--watch.checkpoint-every", 0.4, "--watch.every", 0.05,
        "--watch.histograms-every", 0.1, "--show", "none",
    )  # fmt: skip
    live = Live(process.pid, run)
    room = run / "checkpoints"
    until(lambda: len(list(room.glob("[0-9]*"))) >= 2, what="two checkpoints")
    reached = live.steps
    live.steps_reach(reached + 1000)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    killed = Outcome(run)
    at = killed.state["steps"]
    last = lines(killed)[-1]["steps"]
    assert 0 < at < last

    watch = {"every": 0.05, "checkpoint_every": 0.0}
    resumed = resume(run, total_steps=at + 1000, watch=watch, backend="thread")
    assert resumed.error is None
    assert resumed.state["steps"] >= at + 1000
    assert len(read(run / "schedule.bin")) == resumed.state["entries"]
    assert resumed.summary["episodes"] >= killed.state["episodes"]
    steps = [line["steps"] for line in lines(resumed)]
    assert steps == sorted(set(steps))
    for tag, seen in points(run).items():
        assert seen == sorted(set(seen)), tag
        assert not [s for s in seen if s > resumed.state["steps"]], tag
    assert points(run)["loss/total"][-1] == resumed.state["steps"]
    replayed = ss.replay(run)
    assert replayed.compared_with_checkpoint
    assert replayed.steps == resumed.state["steps"]


@pytest.mark.parametrize("damage", ["weights", "state", "worker", "cut"])
def test_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole, run)
    older, newest = sorted((run / "checkpoints").glob("[0-9]*"))[-2:]
    if damage == "state":
        (newest / "state.json").write_text((newest / "state.json").read_text()[:100])
    elif damage == "cut":
        (newest / "store.safetensors").unlink()
    else:
        file = newest / ("store.safetensors" if damage == "weights" else "0.state")
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(raw)
    assert ss.load(run).checkpoint == older
    goal = int(newest.name) + 500
    resumed = resume(run, total_steps=goal, watch={"keep_checkpoints": 1}, backend="thread")
    assert resumed.error is None
    assert resumed.log(f"resuming at step {int(older.name)}")
    (warning,) = resumed.log("damaged")
    assert warning["level"] == "warning"
    assert newest.name in warning["message"]
    assert resumed.state["steps"] >= goal
    assert ss.load(run).steps == resumed.state["steps"]
    assert ss.replay(run).identical


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with several checkpoints."""
    directory = tmp_path_factory.mktemp("whole") / "r"
    slow = directory.with_name("slow")
    slow.touch()

    def wait(live: Live) -> bool:
        until(lambda: len(list((directory / "checkpoints").glob("[0-9]*"))) >= 2, what="two checkpoints")
        return True

    run = train(
        directory, script=wait, env="bad_envs:Bad-v0", env_kwargs={"slow": str(slow)}, backend="thread",
        **{**SMALL, "total_steps": 10**9, "watch": {"checkpoint_every": 0.2}},
    )  # fmt: skip
    assert isinstance(run.error, ss.Interrupted)
    slow.unlink()
    return directory


def test_every_checkpoint_damaged(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(whole, run)
    for file in run.glob("checkpoints/*/state.json"):
        file.write_text("{}")
    with pytest.raises(ss.ConfigError, match="no whole checkpoint"):
        ss.resume(run)


def test_no_such_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "cartpole").mkdir(parents=True)
    (tmp_path / "runs" / "cartpole" / "config.yaml").write_text("env: CartPole-v1\n")
    done = command("resume", "runs/cartpol", cwd=tmp_path)
    assert done.code == 2
    assert "Did you mean runs/cartpole?" in done.err
    done = command("resume", "runs/cartpole", cwd=tmp_path)
    assert done.code == 2
    assert "no whole checkpoint" in done.err


def test_run_in_use(tmp_path: Path) -> None:
    """Two processes never train in one directory."""
    run = tmp_path / "r"
    process = start(
        "train", "CartPole-v1", "--workers", 1, "--total-steps", 10**9, "--run", run, "--target-return", "None",
        "--watch.checkpoint-every", 0.2, "--show", "none",
    )  # fmt: skip
    until(lambda: list((run / "checkpoints").glob("[0-9]*")), what="a checkpoint")
    done = command("resume", run)
    assert done.code == 2, done
    assert f"process {process.pid}" in done.err
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process).code == 143
