"""Slipstream: asynchronous deep reinforcement learning. Many actors, one policy, never a torn weight.

import slipstream as ss
run = ss.train("CartPole-v1", update="lock", total_steps=200_000)
policy = ss.load(run)
action = policy.act(observation)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slipstream.config import Run
    from slipstream.errors import ConfigError, Interrupted, RunFailed, SlipstreamError
    from slipstream.evaluate import Evaluation, Policy, evaluate, load
    from slipstream.replay_run import Replay, replay
    from slipstream.session import Result
    from slipstream.train import resume, train
    from slipstream.video import Video, record_video

_PLACES = {
    "train": "train", "resume": "train", "Result": "session",
    "load": "evaluate", "evaluate": "evaluate", "Policy": "evaluate", "Evaluation": "evaluate",
    "replay": "replay_run", "Replay": "replay_run",
    "record_video": "video", "Video": "video",
    "Run": "config",
    "ConfigError": "errors", "Interrupted": "errors", "RunFailed": "errors", "SlipstreamError": "errors",
}  # fmt: skip

__all__ = [
    "ConfigError",
    "Evaluation",
    "Interrupted",
    "Policy",
    "Replay",
    "Result",
    "Run",
    "RunFailed",
    "SlipstreamError",
    "Video",
    "evaluate",
    "load",
    "record_video",
    "replay",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: starting must not cost what is not needed."""
    if name not in _PLACES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"slipstream.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `slipstream.train` the function, where importing the submodule of that name would put the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PLACES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
