"""Workers that die, stop, hang, or whose environment misbehaves: replaced, counted, named."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Live, Outcome, command, family, finish, slack, start, train, until

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


def kill(live: Live, index: int, times: list[float]) -> None:
    """Kill -9 a worker at a random moment; the next incarnation works within 2 s."""
    incarnation = live.counter(index, Counter.INCARNATION)
    pid = live.worker(index)
    time.sleep(0.1 * np.random.default_rng().random())
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    live.worker(index, but=pid)
    times.append(time.monotonic() - begun)
    assert live.counter(index, Counter.INCARNATION) == incarnation + 1
    first = live.counter(index, Counter.STEPS)
    until(lambda: live.counter(index, Counter.STEPS) > first, 5, what="steps of the new worker")


def stop_where(live: Live, pid: int, there: Callable[[], bool], what: str) -> None:
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
def test_killed_and_stopped_workers_are_replaced_and_nothing_is_lost(rule: str, slow: Path, warm: Launcher) -> None:
    times: list[float] = []

    def script(live: Live) -> bool:
        live.steps_reach(200)
        before = live.rate()
        for n in range(4):
            kill(live, n % 2, times)
        until(lambda: live.rate(0.5) > 0.95 * before, 10, what=f"{before} steps/s again")

        in_phase = lambda phase: live.counter(0, Counter.PHASE) == phase  # noqa: E731
        holds = lambda: live.holder() == 1 and in_phase(Phase.APPLY)  # noqa: E731
        for where in ("with the lock", "collecting", "waiting"):
            pid = live.worker(0)
            if where == "with the lock":
                stop_where(live, pid, holds, where)
            elif where == "collecting":
                stop_where(live, pid, lambda: in_phase(Phase.COLLECT), where)
            elif rule == "sync":
                stop_where(live, pid, lambda: in_phase(Phase.WAIT), where)
            else:  # too short to be met by chance: it has got the lock and has not said so yet
                stop_where(live, pid, holds, where)
                live.store.control[Word.HOLDER] = 0
                live.store.rows[0, Counter.PHASE] = Phase.WAIT
            live.worker(0, but=pid)
            live.steps_reach(live.steps + 100, 20)
        return True

    run = train_slowly(
        slow, warm, script, rule, net={"hidden": (512, 256)},
        limits={"lock_seconds": 1.0, "hang_seconds": 2.5, "max_restarts": 20},
    )  # fmt: skip
    assert max(times) < 2.0 * slack()
    assert len(run.log("held the lock for")) == 2  # killed, and ended because of it
    assert len(run.log("gave no heartbeat for")) >= 4
    assert len(run.log("killed by SIGKILL")) == run.summary["restarts"] >= 7
    assert_counts_agree(run, kills=run.summary["restarts"])


def test_whole_run_stopped_and_continued_loses_no_worker(slow: Path) -> None:
    """Ctrl-Z and fg: the time in between is nobody's fault."""
    process = start(
        "train", "bad_envs:Bad-v0", "--env-kwargs", f"{{slow: {slow}}}", "--workers", 2, "--total-steps", ENDLESS,
        "--run", slow.with_name("r"), "--limits.hang-seconds", 1.5, "--limits.lock-seconds", 0.5, "--json",
    )  # fmt: skip
    live = Live(process.pid, slow.with_name("r"))
    live.steps_reach(100)
    for _ in range(3):
        workers = family(process.pid)
        for pid in [process.pid, *workers]:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.1)  # it looks before they go on
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
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
    assert "because it gave no heartbeat for 2." in text
    assert "bad_envs.py" in text  # where it hung
    dump = [line for line in run.log("bad_envs.py") if line.get("printed") and "in _fail" in line["message"]]
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
        ("raise", ["boom at step 7", "worker 0", "copy ", "step 7", "bad_envs.py", "Traceback"]),
    ],
)
def test_exception_is_named(fault: str, words: list[str], tmp_path: Path) -> None:
    run = train(
        tmp_path / "r", **BAD, env_kwargs={"fault": fault}, total_steps=10_000, backend="thread",
        limits={"max_restarts": 1, "max_env_failures": 3},
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed), run
    for word in words:
        assert word in str(run.error)


def test_exception_reaches_the_terminal(tmp_path: Path) -> None:
    done = command(
        "train", "bad_envs:Bad-v0", "--env-kwargs", "{fault: raise}", "--limits.max-env-failures", 2, "--workers", 2,
        "--run", tmp_path / "r", "--json",
    )  # fmt: skip
    assert done.code == 1
    assert done.out == ""
    for word in ("worker ", "copy ", "step 7", "boom at step 7", "bad_envs.py"):
        assert word in done.err
    assert done.err.count("Traceback") == 1  # that of the environment, none of ours
    assert ss.load(tmp_path / "r").checkpoint.exists()


def test_ends_of_the_process_are_named(tmp_path: Path, warm: Launcher) -> None:
    """A library calls exit(3), then exit(0), then crashes: each is an end that was not asked for."""
    run = train(
        tmp_path / "r", warm, **BAD, env_kwargs={"fault": "exit, exit well, segfault", "marker": str(tmp_path / "m")},
        total_steps=10_000, limits={"max_restarts": 2},
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed), run
    messages = [line["message"] for line in run.log("worker 0 ended")]
    assert "exit code 3" in messages[0]
    assert "exit code 0" in messages[1]
    assert "killed by SIGSEGV" in messages[2]
    text = str(run.error)
    for word in ("worker 0 ended 3 times", "killed by SIGSEGV", "bad_envs.py"):  # where it crashed
        assert word in text


def test_environment_that_raises_once_is_made_anew(tmp_path: Path) -> None:
    kwargs = {"fault": "raise", "marker": str(tmp_path / "once")}
    run = train(tmp_path / "r", **BAD, env_kwargs=kwargs, total_steps=400, backend="thread")
    assert run.error is None
    assert run.summary["environment_failures"] == 1
    assert run.summary["restarts"] == 0
    (line,) = run.log("environment failed")
    assert line["worker"] == 0
    assert "copy 0, episode step 7" in line["message"]
    assert "boom at step 7" in line["message"]


# -- numbers that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan reward", "inf reward", "nan observation"])
def test_not_finite_once(fault: str, tmp_path: Path) -> None:
    kwargs = {"fault": fault, "at": 20, "marker": str(tmp_path / "once")}  # at the end of an episode
    run = train(tmp_path / "r", **BAD, env_kwargs=kwargs, total_steps=2000, normalize_rewards=True, backend="thread")
    assert run.error is None
    assert run.summary["nonfinite_gradients"] == 1
    assert np.isfinite(run.summary["mean_return"])
    assert run.summary["steps"] >= 2000
    (file,) = (run.directory / "bad").iterdir()
    with np.load(file) as saved:
        assert not all(np.isfinite(saved[name]).all() for name in ("raw_reward", "obs"))
        assert np.isfinite(saved["weights"]).all()
    assert np.isfinite(ss.load(run.directory).act(np.zeros(2, np.float32)))
    from safetensors.numpy import load_file

    (weights,) = run.directory.glob("checkpoints/*/store.safetensors")
    assert all(np.isfinite(a).all() for a in load_file(weights).values())


def test_not_finite_for_ever(tmp_path: Path) -> None:
    run = train(
        tmp_path / "r", **{**BAD, "workers": 2}, env_kwargs={"fault": "nan reward", "at": 1},
        total_steps=10_000, limits={"max_nonfinite": 5}, backend="thread",
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed)
    assert run.error.exit_code == 1
    text = str(run.error)
    assert "6 gradients in a row" in text
    for word in ("worker ", "reward", "environment copy 0", "update 0"):
        assert word in text
    assert len(list((run.directory / "bad").iterdir())) >= 5
