"""Training from scripts, threads, notebooks and busy programs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Launchers, descriptors, environment, family, finish, start

import slipstream as ss

QUICK: dict[str, Any] = {"total_steps": 1500, "target_return": None, "show": "none", "workers": 2}

NO_GUARD = """
import gymnasium as gym
import slipstream as ss
print("begins", flush=True)
run = ss.train(lambda: gym.make("CartPole-v1"), workers=2, total_steps=1500, show="none", run="r")
print("done", run.steps, flush=True)
"""

STANDARD_INPUT = """
import gymnasium as gym
import slipstream as ss

class Mine(gym.Wrapper):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, 2 * reward, terminated, truncated, info

def make():
    return Mine(gym.make("CartPole-v1"))

print("begins", flush=True)
run = ss.train(make, workers=2, total_steps=1500, show="none", run="r", update="sync")
doubled, plain = (ss.evaluate(run, 2, env=e).mean for e in (make, lambda: gym.make("CartPole-v1")))
print("done", run.steps, doubled / plain)
"""


def test_script_without_a_guard(tmp_path: Path) -> None:
    """The main module is not imported again: no storm of processes, and a lambda will do for an environment."""
    (tmp_path / "script.py").write_text(NO_GUARD)
    process = start(program=[sys.executable, "script.py"], cwd=tmp_path)
    most = 0
    while process.poll() is None:
        most = max(most, len(family(process.pid)))
        time.sleep(0.02)
    done = finish(process)
    assert done.code == 0, done
    assert done.err == ""
    begins, ended = done.out.splitlines()
    assert begins == "begins"
    assert int(ended.split()[1]) >= 1500
    assert most == 3  # a launcher and two workers


def test_script_on_standard_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=STANDARD_INPUT, capture_output=True, text=True, cwd=tmp_path, env=environment(),
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert done.stderr == ""
    begins, ended = done.stdout.splitlines()
    assert begins == "begins"
    assert float(ended.split()[2]) == 2.0  # the environment was the one of the script


def test_after_a_backward_pass_and_again(tmp_path: Path, launchers: Launchers) -> None:
    """torch's threads run in this process; its settings, signal handlers and descriptors are as before."""
    torch.set_num_threads(2)
    try:
        x = torch.randn(600, 600, requires_grad=True)
        (x @ x).sum().backward()
        handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        open_before = 0
        for n, backend in enumerate(("process", "thread", "process", "thread")):
            launcher = launchers.take() if backend == "process" else None
            launchers.settle()
            run = ss.train("CartPole-v1", run=tmp_path / str(n), launcher=launcher, backend=backend, **QUICK)
            assert run.steps >= 1500
            assert torch.get_num_threads() == 2
            assert ss.replay(run).identical
            del run
            gc.collect()  # mappings of the store
            if n == 1:
                open_before = descriptors(os.getpid())
        assert descriptors(os.getpid()) == open_before
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
        (x @ x).sum().backward()
    finally:
        torch.set_num_threads(1)


def test_from_another_thread(tmp_path: Path, launchers: Launchers) -> None:
    """Where no signal handler can be installed."""
    found: list[Any] = []

    def body(name: str, **settings: Any) -> None:
        try:
            found.append(ss.train("CartPole-v1", run=tmp_path / name, **QUICK, **settings).steps)
        except BaseException as e:
            found.append(e)

    for name, settings in (("process", {"launcher": launchers.take()}), ("thread", {"backend": "thread"})):
        thread = threading.Thread(target=body, args=(name,), kwargs=settings)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert len(found) == 2
    assert min(found) >= 1500


def test_errors_in_user_code(tmp_path: Path) -> None:
    """A callable that raises, or gives no environment, is told with its own traceback."""

    def broken() -> Any:
        raise ZeroDivisionError("made by the user")

    for make in (broken, lambda: 3):
        with pytest.raises(ss.SlipstreamError) as caught:
            ss.train(make, run=tmp_path / str(id(make)), backend="thread", **QUICK)
        if make is broken:
            assert "made by the user" in str(caught.value)
            assert "in broken" in str(caught.value)
