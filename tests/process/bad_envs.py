"""A small environment that misbehaves on request; a child finds it as `bad_envs:Bad-v0`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

LENGTH = 20  # steps of an episode


class Bad(gym.Env[Any, Any]):
    """Two numbers seen, two actions, reward 1 for action 1.

    Args:
        fault: what goes wrong, see `_fail`; empty: nothing. Several, separated by commas, happen in turn.
        at: the step of an episode at which it does.
        marker: a file; where given, each fault happens only for whoever creates it, so once in a run.
        slow: a file; while it is there each step takes time, so a run lasts but its replay does not.
        slowness: that time in seconds.
    """

    observation_space = gym.spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault: str = "", at: int = 7, marker: str = "", slow: str = "", slowness: float = 0.001) -> None:
        self.fault, self.at, self.marker, self.slow, self.slowness = fault, at, marker, slow, slowness
        self.step_number = 0
        if fault == "hang in construction":
            time.sleep(3600)
        if fault == "raise in construction":
            raise RuntimeError("boom in construction")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.fault == "raise in reset":
            raise RuntimeError("boom in reset")
        self.step_number = 0
        return self._see(), {}

    def _see(self) -> Any:
        return self.np_random.normal(size=2).astype(np.float32)

    def step(self, action: Any) -> Any:
        self.step_number += 1
        if self.slow and os.path.exists(self.slow):
            time.sleep(self.slowness)
        obs, reward = self._see(), float(action)
        if self.step_number == self.at and (fault := self._due()):
            obs, reward = self._fail(fault, obs, reward)
        return obs, reward, self.step_number >= LENGTH, False, {}

    def _due(self) -> str:
        """The fault that is to happen now, or none."""
        if not self.marker:
            return self.fault
        for n, fault in enumerate(self.fault.split(", ")):
            try:
                os.close(os.open(f"{self.marker}{n}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return fault
        return ""

    def _fail(self, fault: str, obs: Any, reward: float) -> tuple[Any, float]:
        match fault:
            case "raise":
                raise ValueError(f"boom at step {self.step_number}")
            case "hang":
                time.sleep(3600)
            case "exit":
                os._exit(3)
            case "exit well":
                os._exit(0)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "nan reward":
                reward = float("nan")
            case "inf reward":
                reward = float("inf")
            case "nan observation":
                obs = np.full(2, np.nan, np.float32)
            case "report":
                print(f"torch threads: {torch.get_num_threads()}", flush=True)
            case "unlike":  # another number in every process and at every moment
                reward = int.from_bytes(os.urandom(2), "little") / 65536
        return obs, reward


gym.register("Bad-v0", entry_point=Bad)
