"""What must not grow over a long run: memory, descriptors, threads."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from harness import Live, descriptors, finish, start, status, train, until

import slipstream as ss
from slipstream.launch import Launcher

MIB = 1024  # KiB


def test_memory_is_flat(tmp_path: Path) -> None:
    """Thousands of updates and episodes, with everything written that can be written."""
    process = start(
        "train", "CartPole-v1", "--workers", 1, "--copies", 1, "--algo.rollout-steps", 5, "--total-steps", 10**9,
        "--target-return", "None", "--run", tmp_path / "r", "--watch.every", 0.05, "--watch.histograms-every", 0.2,
        "--watch.checkpoint-every", 1, "--normalize-observations", "--normalize-rewards", "--show", "plain",
    )  # fmt: skip
    live = Live(process.pid, tmp_path / "r")
    worker = live.worker(0)
    updates = lambda: live.store.progress()[0]  # noqa: E731
    until(lambda: updates() >= 1500, 60, what="1500 updates")
    time.sleep(1.0)
    pids = (process.pid, worker)
    before, first = [status(pid, "VmRSS") for pid in pids], updates()
    open_before = [descriptors(pid) for pid in pids]
    until(lambda: updates() >= first + 3000, 120, what="3000 more updates")
    grown = [status(pid, "VmRSS") - b for pid, b in zip(pids, before, strict=True)]
    assert max(grown) < 20 * MIB, grown
    assert [descriptors(pid) for pid in pids] == open_before
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process).code == 143
    done = ss.load(tmp_path / "r")
    assert done.steps >= 20_000


def test_threads_and_descriptors(tmp_path: Path, warm: Launcher) -> None:
    """Four workers have one thread for computing each; a worker replaced costs nothing in the processes that stay."""
    slow = tmp_path / "slow"
    slow.touch()

    def script(live: Live) -> bool:
        live.steps_reach(200)
        for index in range(4):
            assert status(live.worker(index), "Threads") < 10
        counts: list[Any] = []
        for _ in range(6):
            pid = live.worker(1)
            os.kill(pid, signal.SIGKILL)
            live.worker(1, but=pid)
            live.steps_reach(live.steps + 100)
            counts.append(
                (descriptors(warm.process.pid), descriptors(live.worker(2)), status(warm.process.pid, "Threads"))
            )
        assert len(set(counts)) == 1, counts
        return True

    run = train(
        tmp_path / "r", warm, script, env="bad_envs:Bad-v0", env_kwargs={"slow": str(slow), "fault": "report"},
        workers=4, copies=2, total_steps=10**9, limits={"max_restarts": 10}, **{"algo.rollout_steps": 5},
    )  # fmt: skip
    assert isinstance(run.error, ss.Interrupted)
    assert run.summary["restarts"] == 6
    reports = run.log("torch threads: ")
    assert {line["subject"] for line in reports} == {0, 1, 2, 3}
    assert {line["message"] for line in reports} == {"torch threads: 1"}
