"""Train a policy, or go on training one: from the request to a session (session.py)."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import checkpoint, config
from slipstream.config import Given, Run
from slipstream.errors import ConfigError
from slipstream.launch import Launcher
from slipstream.session import Result, Session


def train(
    env: str | Callable[..., Any] | None = None,
    *,
    run: str | os.PathLike[str] | None = None,
    torso: Callable[..., Any] | None = None,
    show: str = "auto",
    options: Run | None = None,
    launcher: Launcher | None = None,
    **settings: Any,
) -> Result:
    """Train a policy.

    Args:
        env: a Gymnasium id, `module:Id`, or a callable that makes an environment.
        run: directory of the run; default `runs/<env>-<algorithm>-<time>`.
        torso: a callable from observation shape to an nn.Module with `out_features`.
        show: `auto` (live on a terminal, else lines), `plain` or `none`.
        options: a whole configuration; without it the preset of the environment and algorithm is the base.
        launcher: a launcher that is already importing (the command line starts one early).
        **settings: fields of `config.Run` laid over the base; nested ones as dictionaries or dotted names,
            as in `algo={"learning_rate": 1e-3}`.

    Raises:
        ConfigError: the request makes no sense; nothing was started.
        RunFailed: workers failed too often; the last checkpoint is kept.
        Interrupted: Ctrl-C or SIGTERM; the run was checkpointed.
    """
    given = Given(env if callable(env) else None, torso)
    name = env if isinstance(env, str) else getattr(env, "__name__", "callable") if env is not None else None
    base = options
    if base is None:
        preset = config.preset(name, settings.get("algorithm")) if name else {}
        base = config.from_dict({"env": name or "CartPole-v1", **preset})
    elif name is not None:
        base = dataclasses.replace(base, env=name)
    ready = config.check(config.from_dict(config.nested(settings), base))
    if given.env is None:
        from slipstream.envs.gym import find

        find(ready.env)
    if ready.workers == "auto":
        ready = _auto(ready, given)
    directory = make_directory(ready, run)
    config.save(ready, directory / "config.yaml")
    return Session(ready, given, directory, show, launcher).run()


def resume(
    run: str | os.PathLike[str], *, env: str | Callable[..., Any] | None = None,
    torso: Callable[..., Any] | None = None, show: str = "auto", launcher: Launcher | None = None, **settings: Any,
) -> Result:  # fmt: skip
    """Go on with a run from its newest whole checkpoint, with its own configuration.

    `settings` are laid over that; every difference is shown and logged. `env` and `torso` are the callables the
    run was trained with, if it was.

    Raises:
        ConfigError: no checkpoint, or settings that do not fit it.
    """
    directory = Path(run)
    loaded = checkpoint.newest(directory)
    given = Given(env if callable(env) else None, torso)
    if isinstance(env, str):
        settings["env"] = env
    old = config.load(directory / "config.yaml")
    new = config.check(config.from_dict(config.nested(settings), old))
    if new.workers == "auto":
        new = _auto(new, given)
    for fixed in ("env", "algorithm", "net", "normalize_observations", "normalize_rewards", "seed"):
        if getattr(new, fixed) != getattr(old, fixed):
            raise ConfigError(
                f"{fixed}: {getattr(new, fixed)!r} differs from the run's {getattr(old, fixed)!r}, with which its "
                "weights were trained; start a new run instead"
            )
    if loaded.state["steps"] >= new.total_steps:
        raise ConfigError(
            f"total_steps: the run has {loaded.state['steps']:,} of its {new.total_steps:,} steps; "
            "give a larger --total-steps to go on"
        )
    if old.algo.optimizer != new.algo.optimizer:
        raise ConfigError(f"algo.optimizer: the run's state belongs to {old.algo.optimizer!r}")
    session = Session(new, given, directory, show, launcher)
    session.loaded = loaded
    session.changes = config.differences(old, new)
    config.save(new, directory / "config.yaml")
    return session.run()


def _auto(run: Run, given: Given) -> Run:
    """The run with as many workers as are fastest here; each count is tried for a moment."""
    from slipstream.tune import best_workers

    def measure(workers: int, seconds: float) -> float:
        with tempfile.TemporaryDirectory() as place:
            trial = dataclasses.replace(
                run, workers=workers, target_return=None, total_steps=10**12, record=False,
                limits=dataclasses.replace(run.limits, max_seconds=seconds),
                watch=dataclasses.replace(run.watch, tensorboard=False),
            )  # fmt: skip
            return Session(trial, given, Path(place), "none", None).run().steps_per_second

    return dataclasses.replace(run, workers=best_workers(measure))


def make_directory(run: Run, wanted: str | os.PathLike[str] | None) -> Path:
    """A new run directory; two runs of one second never share one.

    Raises:
        ConfigError: the directory named is in use or cannot be made.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.env.split(":")[-1])
    base = Path(wanted) if wanted else Path("runs") / f"{name}-{run.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    for n in range(1, 1000):
        path = base if n == 1 else base.with_name(f"{base.name}-{n}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError:
            if wanted and not path.is_dir():
                raise ConfigError(f"run: {path} is a file") from None
            if wanted and any(path.iterdir()):
                raise ConfigError(f"run: {path} is not empty; `slipstream resume {path}` goes on with it") from None
            if wanted:
                return path
        except OSError as e:
            raise ConfigError(f"run: cannot make {path}: {e.strerror}") from None
    raise ConfigError(f"run: no free name like {base}")
