"""Workers that die, stop, hang, or whose environment misbehaves: replaced, counted, named."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Live, Outcome, family, finish, start, train, until

import slipstream as ss
from slipstream.counters import Counter, Phase
from slipstream.launch import Launcher
from slipstream.store import Word

ENDLESS = 10**9
BAD: dict[str, Any] = {"env": "bad_envs:Bad-v0", "workers": 1, "copies": 2, "algo.rollout_steps": 5}


def assert_counts_agree(outcome: Outcome, kills: int, rollout: int = 5 * 2) -> None:
    """Checkpoint, record and the workers' own rows tell the same numbers of steps and updates."""
    from slipstream.record import Kind, read

    entries = read(outcome.directory / "schedule.bin")
    state, summary = outcome.state, outcome.summary
    assert len(entries) == state["entries"]
    assert int((entries["kind"] == Kind.APPLIED).sum()) >= state["version"] == summary["updates"]
    assert int(entries["version"][-1]) == state["version"]
    assert int(entries["steps"][-1]) == state["steps"] == summary["steps"]
    # a worker killed between publishing and booking has not booked its last rollout
    assert 0 <= state["steps"] - sum(summary["worker_steps"]) <= kills * rollout
    rollouts = [(int(e["worker"]), int(e["incarnation"]), int(e["rollout"])) for e in entries]
    assert len(set(rollouts)) == len(rollouts)  # none applied twice
    for worker in {w for w, _, _ in rollouts}:
        for incarnation in {i for w, i, _ in rollouts if w == worker}:
            mine = [r for w, i, r in rollouts if (w, i) == (worker, incarnation)]
            assert mine == list(range(len(mine)))  # and none lost on the way


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """While this file exists, the environment is slow: a run of seconds has few updates to replay."""
    file = tmp_path / "slow"
    file.touch()
    return file


def train_slowly(slow: Path, launcher: Launcher, script: Any, rule: str, **settings: Any) -> Outcome:
    """A run of two workers that lasts until its script ends; its replay is identical."""
    run = train(
        slow.with_name("r"), launcher, script, **{**BAD, "workers": 2}, update=rule, total_steps=ENDLESS,
        env_kwargs={"slow": str(slow)}, **settings,
    )  # fmt: skip
    slow.unlink()
    assert isinstance(run.error, ss.Interrupted)
    assert ss.replay(run.directory).identical
    return run


@pytest.mark.parametrize("rule", ["lock", "sync"])
def test_killed_worker_is_replaced_and_nothing_is_lost(rule: str, slow: Path, warm: Launcher) -> None:
    times: list[float] = []

    def script(live: Live) -> bool:
        live.steps_reach(200)
        before = live.rate()
        for kill in range(4):
            index = kill % 2
            incarnation = live.counter(index, Counter.INCARNATION)
            pid = live.worker(index)
            time.sleep(0.1 * np.random.default_rng().random())
            begun = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            live.worker(index, but=pid)
            times.append(time.monotonic() - begun)
            assert live.counter(index, Counter.INCARNATION) == incarnation + 1
            first = live.counter(index, Counter.STEPS)
            until(lambda i=index, n=first: live.counter(i, Counter.STEPS) > n, 5, what="steps of the new worker")
        until(lambda: live.rate(0.5) > 0.95 * before, 10, what=f"{before} steps/s again")
        return True

    run = train_slowly(slow, warm, script, rule)
    assert max(times) < 2.0
    assert run.summary["restarts"] == 4
    assert len(run.log("killed by SIGKILL")) == 4
    assert_counts_agree(run, kills=4)


def stop_where(live: Live, pid: int, there: Any, what: str) -> None:
    """Stop a process at random moments until it has been stopped where `there()` says."""

    def stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.002)
        if there():
            return True
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.002 * np.random.default_rng().random())
        return False

    until(stopped, 60, every=0, what=what)


@pytest.mark.parametrize("rule", ["lock", "sync"])
def test_worker_stopped_holding_the_lock_is_replaced(rule: str, slow: Path, warm: Launcher) -> None:
    def script(live: Live) -> bool:
        live.steps_reach(50)
        pid = live.worker(0)
        holds = lambda: live.holder() == 1 and live.counter(0, Counter.PHASE) == Phase.APPLY  # noqa: E731
        stop_where(live, pid, holds, "worker 0 stopped with the lock")
        begun = time.monotonic()
        live.worker(0, but=pid)
        assert 0.5 < time.monotonic() - begun < 5
        live.steps_reach(live.steps + 100, 20)
        return True

    run = train_slowly(
        slow, warm, script, rule, net={"hidden": (512, 256)}, limits={"lock_seconds": 1.0, "hang_seconds": 60.0}
    )
    assert run.log("held the lock for 1.")
    assert run.summary["restarts"] == 1


@pytest.mark.parametrize(
    ("rule", "phase"), [("lock", Phase.COLLECT), ("lock", Phase.WAIT), ("sync", Phase.COLLECT), ("sync", Phase.WAIT)]
)
def test_stopped_worker_is_replaced(rule: str, phase: Phase, slow: Path, warm: Launcher) -> None:
    def script(live: Live) -> bool:
        live.steps_reach(50)
        pid = live.worker(0)
        if (rule, phase) == ("lock", Phase.WAIT):
            # too short to be met by chance: it has got the lock and has not said so yet
            holds = lambda: live.holder() == 1 and live.counter(0, Counter.PHASE) == Phase.APPLY  # noqa: E731
            stop_where(live, pid, holds, "worker 0 stopped with the lock")
            live.store.control[Word.HOLDER] = 0
            live.store.rows[0, Counter.PHASE] = Phase.WAIT
        else:
            stop_where(live, pid, lambda: live.counter(0, Counter.PHASE) == phase, f"worker 0 stopped in {phase!r}")
        live.worker(0, but=pid)
        live.steps_reach(live.steps + 100, 20)
        return True

    run = train_slowly(slow, warm, script, rule, limits={"lock_seconds": 60.0, "hang_seconds": 2.0})
    assert run.log("gave no heartbeat for 2.")
    assert run.summary["restarts"] >= 1


def test_whole_run_stopped_and_continued_loses_no_worker(slow: Path) -> None:
    """Ctrl-Z and fg: the time in between is nobody's fault."""
    process = start(
        "train", "bad_envs:Bad-v0", "--env-kwargs", f"{{slow: {slow}}}", "--workers", 2, "--total-steps", ENDLESS,
        "--run", slow.with_name("r"), "--limits.hang-seconds", 1.5, "--limits.lock-seconds", 0.5, "--json",
    )  # fmt: skip
    live = Live(process.pid, slow.with_name("r"))
    live.steps_reach(100)
    for _ in range(3):
        for order in (signal.SIGSTOP, signal.SIGCONT):
            for pid in [process.pid, *family(process.pid)]:
                os.kill(pid, order)
            time.sleep(2.0 if order == signal.SIGSTOP else 0.3)
    live.steps_reach(live.steps + 100)
    os.kill(process.pid, signal.SIGTERM)
    done = finish(process)
    assert done.code == 143
    assert json.loads((slow.with_name("r") / "summary.json").read_text())["restarts"] == 0


# -- environments that hang, raise or end the process ------------------------------------------------


def test_hanging_environment(tmp_path: Path, warm: Launcher) -> None:
    run = train(
        tmp_path / "r", warm, **BAD, env_kwargs={"fault": "hang"}, total_steps=10_000,
        limits={"hang_seconds": 2.0, "max_restarts": 1},
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed)
    text = str(run.error)
    assert "worker 0 ended 2 times" in text
    assert "limits.max_restarts" in text
    assert "no heartbeat" in text
    assert "bad_envs.py" in text  # where it hung
    dump = [line for line in run.log("bad_envs.py") if line.get("printed")]
    assert len(dump) == 2
    assert len(run.log("replaced")) == 1


def test_hanging_construction(tmp_path: Path, warm: Launcher) -> None:
    run = train(
        tmp_path / "r", warm, **BAD, env_kwargs={"fault": "hang in construction"}, total_steps=10_000,
        limits={"hang_seconds": 2.0},
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed)
    assert "bad_envs.py" in str(run.error)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise in construction", ["boom in construction", "bad_envs.py", "Traceback"]),
        ("raise in reset", ["boom in reset", "worker 0", "copy 0", "bad_envs.py", "Traceback"]),
        ("raise", ["boom at step 7", "worker 0", "copy 0", "step 7", "bad_envs.py", "Traceback"]),
        ("exit", ["worker 0", "exit code 3"]),
        ("exit well", ["worker 0", "exit code 0"]),
        ("segfault", ["worker 0", "SIGSEGV", "bad_envs.py"]),
    ],
)
def test_failure_is_named(fault: str, words: list[str], tmp_path: Path, warm: Launcher) -> None:
    run = train(
        tmp_path / "r", warm, **BAD, env_kwargs={"fault": fault}, total_steps=10_000,
        limits={"max_restarts": 1, "max_env_failures": 3},
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed), run
    for word in words:
        assert word in str(run.error)


def test_environment_that_raises_once_is_made_anew(tmp_path: Path, warm: Launcher) -> None:
    kwargs = {"fault": "raise", "marker": str(tmp_path / "once")}
    run = train(tmp_path / "r", warm, **BAD, env_kwargs=kwargs, total_steps=400)
    assert run.error is None
    assert run.summary["environment_failures"] == 1
    assert run.summary["restarts"] == 0
    (line,) = run.log("environment failed")
    assert line["worker"] == 0
    assert "copy 0, episode step 7" in line["message"]
    assert "boom at step 7" in line["message"]


# -- numbers that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan reward", "inf reward", "nan observation"])
def test_not_finite_once(fault: str, tmp_path: Path, warm: Launcher) -> None:
    kwargs = {"fault": fault, "at": 20, "marker": str(tmp_path / "once")}  # at the end of an episode
    run = train(tmp_path / "r", warm, **BAD, env_kwargs=kwargs, total_steps=2000, normalize_rewards=True)
    assert run.error is None
    assert run.summary["nonfinite_gradients"] == 1
    assert np.isfinite(run.summary["mean_return"])
    assert run.summary["steps"] >= 2000
    (file,) = (run.directory / "bad").iterdir()
    with np.load(file) as saved:
        assert not all(np.isfinite(saved[name]).all() for name in ("reward", "obs"))
        assert np.isfinite(saved["weights"]).all()
    assert np.isfinite(ss.load(run.directory).act(np.zeros(2, np.float32)))
    from safetensors.numpy import load_file

    (weights,) = run.directory.glob("checkpoints/*/store.safetensors")
    assert all(np.isfinite(a).all() for a in load_file(weights).values())


def test_not_finite_for_ever(tmp_path: Path, warm: Launcher) -> None:
    run = train(
        tmp_path / "r", warm, **{**BAD, "workers": 2}, env_kwargs={"fault": "nan reward", "at": 1},
        total_steps=10_000, limits={"max_nonfinite": 5},
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed)
    assert run.error.exit_code == 1
    text = str(run.error)
    assert "6 gradients in a row" in text
    for word in ("worker ", "reward", "environment copy 0", "update 0"):
        assert word in text
    assert len(list((run.directory / "bad").iterdir())) >= 5
