"""Ctrl-C, SIGTERM and kill -9: quick, quiet, with a checkpoint, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Done, Live, assert_nothing_left, at_once, family, finish, slack, start, until

import slipstream as ss

ENDLESS = 10**9
CODE = {signal.SIGINT: 130, signal.SIGTERM: 143}
BAD = ("bad_envs:Bad-v0", "--copies", 2, "--algo.rollout-steps", 5)
LIMIT = 10.0  # seconds a stop may take


def begin(directory: Path, *options: object, env: tuple[Any, ...] = ("CartPole-v1",)) -> subprocess.Popen[str]:
    return start(
        "train", *env, "--run", directory, "--total-steps", ENDLESS, "--target-return", "None", "--workers", 2,
        "--show", "plain", *options,
    )  # fmt: skip


def stop(process: subprocess.Popen[str], number: signal.Signals, times: int = 1, group: bool = True) -> Done:
    """Signal a run and check that it ends as it should."""
    for n in range(times):
        if n:
            time.sleep(0.05)
        if process.poll() is None:
            (os.killpg if group else os.kill)(process.pid, number)
    done = finish(process, LIMIT)
    assert done.code == CODE[number], done
    assert "Traceback" not in done.out + done.err, done
    assert len(done.err.splitlines()) <= 2, done
    assert_nothing_left(process.pid)
    return done


def assert_goes_on(directory: Path) -> None:
    """The run has a whole checkpoint with steps in it."""
    policy = ss.load(directory)
    assert policy.steps > 0
    policy.act(np.zeros(4 if policy.run.env == "CartPole-v1" else 2, np.float32))


def test_while_starting(tmp_path: Path) -> None:
    def one(n: int, delay: float, number: signal.Signals, times: int, group: bool) -> None:
        process = begin(tmp_path / str(n))
        time.sleep(delay)
        stop(process, number, times, group)

    delays = [0.1, 0.2, 0.4, 0.8, *np.random.default_rng().uniform(0.1, 2.0, 2)]
    at_once(one, [(n, delay, *KINDS[n % 4]) for n, delay in enumerate(delays)])


KINDS = [
    (signal.SIGINT, 1, True), (signal.SIGTERM, 1, False), (signal.SIGINT, 2, False), (signal.SIGTERM, 2, True),
]  # fmt: skip


def test_while_training(tmp_path: Path) -> None:
    def one(n: int, number: signal.Signals, times: int, group: bool) -> None:
        directory = tmp_path / str(n)
        process = begin(directory, "--update", ("lock", "sync", "hogwild", "lock")[n])
        Live(process.pid, directory).steps_reach(2000)
        done = stop(process, number, times, group)
        assert f"stopped by {number.name} at step" in done.err
        assert f"slipstream resume {directory}" in done.err
        assert_goes_on(directory)

    at_once(one, [(n, *kind) for n, kind in enumerate(KINDS)])


def test_while_saving(tmp_path: Path) -> None:
    """Checkpoints are written all the time, so the signal falls into one."""

    def one(n: int, number: signal.Signals, times: int, group: bool) -> None:
        directory = tmp_path / str(n)
        process = begin(directory, "--watch.checkpoint-every", 0.001)
        until(lambda: len(list((directory / "checkpoints").glob("[0-9]*"))) >= 2)
        time.sleep(0.1 * np.random.default_rng().random())
        stop(process, number, times, group)
        assert_goes_on(directory)
        assert not list(directory.glob("checkpoints/.*.tmp"))

    at_once(one, [(n, *kind) for n, kind in enumerate(KINDS)])


def test_while_a_step_takes_long(tmp_path: Path) -> None:
    """A rollout would last a minute: it is not waited for, but what was trained is kept."""

    def one(n: int, number: signal.Signals, times: int, every: float) -> None:
        directory, slow = tmp_path / str(n), tmp_path / f"slow{n}"
        process = begin(
            directory, "--env-kwargs", f"{{slow: {slow}, slowness: 6.0}}", "--watch.checkpoint-every", every, env=BAD
        )
        live = Live(process.pid, directory)
        live.steps_reach(100)
        slow.touch()
        time.sleep(1.0)
        done = stop(process, number, times)
        assert times == 1 or done.seconds < 3 * slack()
        assert_goes_on(directory)

    # while training, also twice, and while the run waits for its workers to write a checkpoint
    at_once(one, [(0, signal.SIGINT, 1, 0), (1, signal.SIGTERM, 2, 0), (2, signal.SIGTERM, 1, 0.2)])


def test_parent_killed(tmp_path: Path) -> None:
    process = begin(tmp_path / "r", "--update", "sync")
    Live(process.pid, tmp_path / "r").steps_reach(1000)
    assert len(family(process.pid)) == 3  # launcher and two workers
    process.kill()
    assert_nothing_left(process.pid, 3.0)
    process.communicate()
