"""Rule `server` with real processes: the server and workers killed and stopped; resume and replay."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Live, Outcome, finish, resume, slack, start, train
from test_worker_faults import BAD, assert_counts_agree, slow, train_slowly  # noqa: F401  (slow is a fixture)

import slipstream as ss
from slipstream import checkpoint
from slipstream.counters import Counter, Phase
from slipstream.launch import Launcher

SERVER = 2  # its seat, after two workers


def assert_acknowledged(outcome: Outcome) -> None:
    """What every worker was told is in the weights is there, once."""
    assert_counts_agree(outcome, kills=outcome.summary["restarts"])


def test_a_killed_and_a_stopped_server_is_replaced_and_nothing_is_lost(slow: Path, warm: Launcher) -> None:  # noqa: F811
    times: list[float] = []

    def script(live: Live) -> bool:
        live.steps_reach(200)
        for n in range(8):
            pid = live.worker(SERVER)
            time.sleep(0.05 * np.random.default_rng(n).random())
            begun, steps = time.monotonic(), live.steps
            os.kill(pid, signal.SIGKILL)
            live.steps_reach(steps + 50, 20)
            times.append(time.monotonic() - begun)
            assert live.worker(SERVER, but=pid) != pid
        pid = live.worker(SERVER)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.2)  # what was under way is done
        live.steps_reach(live.steps + 100, 20)
        pid = live.worker(0)  # and a worker, which may be in the middle of sending
        os.kill(pid, signal.SIGKILL)
        live.worker(0, but=pid)
        live.steps_reach(live.steps + 100, 20)
        return True

    run = train_slowly(
        slow, warm, script, "server", net={"hidden": (256, 128)}, compress="topk:0.1",
        limits={"lock_seconds": 1.0, "max_restarts": 20},
    )  # fmt: skip
    assert max(times) < 5.0 * slack()
    assert run.summary["restarts"] >= 10
    assert_acknowledged(run)


def test_a_server_that_always_dies_ends_the_run_and_keeps_it(tmp_path: Path, warm: Launcher) -> None:
    def script(live: Live) -> None:
        live.steps_reach(200)
        pid = None
        for _ in range(3):
            pid = live.worker(SERVER, but=pid)
            os.kill(pid, signal.SIGKILL)

    run = train(
        tmp_path / "r", warm, script, **{**BAD, "workers": 2}, update="server", total_steps=10**9,
        limits={"max_restarts": 2},
    )  # fmt: skip
    assert isinstance(run.error, ss.RunFailed)
    assert "server" in str(run.error)
    assert "max_restarts" in str(run.error)
    assert run.state["steps"] >= 200
    assert ss.load(run.directory) is not None


def test_the_parent_is_killed_and_the_server_goes_too(tmp_path: Path) -> None:
    from harness import assert_nothing_left

    process = start(
        "train", "CartPole-v1", "--update", "server", "--workers", 2, "--total-steps", 10**9, "--run", tmp_path / "r",
        "--target-return", 1e9,
    )  # fmt: skip
    live = Live(process.pid, tmp_path / "r")
    live.steps_reach(1000)
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    assert_nothing_left(process.pid, 6.0)


WAYS: list[dict[str, Any]] = [
    {"compress": "topk:0.05,qsgd:8"},
    {"compress": "int8", "rule": {"quorum": 2, "max_staleness": 2}},
    {"rule": {"pipeline": 2, "delay_compensation": "adaptive"}},
    {"algorithm": "ppo", "algo": {"rollout_steps": 32, "epochs": 2, "minibatches": 2}},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda w: "-".join(f"{v}" for v in w.values())[:40])
def test_replay_and_resume(way: dict[str, Any], tmp_path: Path, warm: Launcher) -> None:
    """Two workers, resumed once: the replay of both stretches is bit-identical."""
    settings: dict[str, Any] = {"update": "server", "workers": 2, "target_return": None, **way}
    run = train(tmp_path / "r", warm, total_steps=6_000, **settings)
    assert run.error is None
    assert ss.replay(run.directory).identical
    more = resume(tmp_path / "r", None, total_steps=10_000)
    assert more.error is None
    assert more.state["steps"] >= 10_000
    assert ss.replay(run.directory).identical


@pytest.mark.parametrize("way", [{}, {"compress": "topk:0.05"}, WAYS[3]], ids=["plain", "topk", "ppo"])
def test_with_one_worker_resuming_is_not_having_stopped(way: dict[str, Any], tmp_path: Path, warm: Launcher) -> None:
    """Weights bit for bit, the residual of the compressor and half-used minibatches included."""
    settings: dict[str, Any] = {"update": "server", "workers": 1, "target_return": None, **way}
    whole = train(tmp_path / "whole", warm, total_steps=8_000, **settings)
    train(tmp_path / "parts", None, total_steps=4_000, **settings)
    parts = resume(tmp_path / "parts", None, total_steps=8_000)
    assert whole.state["version"] == parts.state["version"]
    a, b = (checkpoint.newest(o.directory).arrays for o in (whole, parts))
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


def test_a_worker_at_a_loss_for_a_server_is_seen_to_live(slow: Path, warm: Launcher) -> None:  # noqa: F811
    """Workers that wait for a stopped server are not taken for hung."""

    def script(live: Live) -> bool:
        live.steps_reach(100)
        pid = live.worker(SERVER)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)
        assert [live.counter(w, Counter.PHASE) for w in (0, 1)] == [Phase.WAIT, Phase.WAIT]
        os.kill(pid, signal.SIGCONT)
        live.steps_reach(live.steps + 100, 20)
        return True

    run = train_slowly(slow, warm, script, "server", limits={"lock_seconds": 30.0, "hang_seconds": 1.0})
    assert run.summary["restarts"] == 0
