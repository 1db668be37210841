"""The environment of a run as it can be looked at: one copy that renders, and what it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from slipstream.envs import atari, gym
from slipstream.errors import ConfigError
from slipstream.evaluate import Policy

Array = NDArray[Any]
ATARI_FPS = 60.0  # of the console, of which an environment step is `frame_skip` frames


class _Single:
    """Makes one plain environment of an id, also where there is a vector form."""

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id

    def __call__(self, **kwargs: Any) -> Any:
        return gymnasium.make(gym.find(self.env_id), **kwargs)

    def __str__(self) -> str:
        return self.env_id


def build(
    policy: Policy, env: Callable[..., Any] | None, mode: str, seeds: np.random.SeedSequence
) -> tuple[gym.Copies, float | None]:
    """One copy of the run's environment that renders in `mode`, and the frames a second it asks for.

    Args:
        policy: of the run.
        env: the environment's maker, for a run trained with a callable.
        mode: `rgb_array` or `human`.
        seeds: of its episodes.

    Raises:
        ConfigError: it does not render so, or what renders is another environment than the policy's.
    """
    game = env is None and atari.owns(policy.run.env)
    rows, fps = _game(policy, mode, seeds) if game else _plain(policy, env, mode, seeds)
    if (rows.shape, rows.dtype, rows.head) != (policy.env.shape, policy.env.dtype, policy.env.head):
        raise ConfigError(f"env: {policy.run.env} as it renders has other observations or actions than in training")
    return rows, fps


def _plain(
    policy: Policy, env: Callable[..., Any] | None, mode: str, seeds: np.random.SeedSequence
) -> tuple[gym.Copies, float | None]:
    run, plain = policy.run, policy.env
    maker: Any = env or _Single(run.env)
    if not isinstance(plain, gym.Copies):
        plain = cast(gym.Copies, gym.make(maker, 1, seeds, run.env_kwargs, 0))
    first = plain.envs[0]
    modes = list(first.metadata.get("render_modes") or ())
    drawn = first.render_mode == mode
    by_gymnasium = mode == "human" and "rgb_array" in modes and env is None
    if not (drawn or mode in modes or by_gymnasium):
        what = "pictures" if mode == "rgb_array" else "a window"
        raise ConfigError(f"env: {run.env} does not render {what} ({mode!r}); its render_modes are {modes}")
    kwargs = run.env_kwargs if env is not None and drawn else {**run.env_kwargs, "render_mode": mode}
    try:
        rows = gym.make(maker, 1, seeds, kwargs, 0)
    except ConfigError as e:
        if env is None or "'render_mode'" not in str(e):
            raise
        raise ConfigError(
            f"env: let the maker of {run.env!r} take render_mode, or give one that makes it with render_mode={mode!r}"
        ) from None
    return cast(gym.Copies, rows), first.metadata.get("render_fps")


def _game(policy: Policy, mode: str, seeds: np.random.SeedSequence) -> tuple[gym.Copies, float | None]:
    """An Atari game behind Gymnasium's wrappers, which give the observations of the vector form. Whole games."""
    run = policy.run
    kwargs = atari.drawn(run.env_kwargs, mode)
    return cast(gym.Copies, atari.make(run.env, 1, seeds, kwargs, 0)), ATARI_FPS / kwargs.get("frame_skip", 4)


def picture(env: Any, name: str) -> Array:
    """What an environment draws, as RGB bytes `[height, width, 3]`.

    Raises:
        ConfigError: something it needs for that is missing, or it gives no picture.
    """
    try:
        drawn = env.render()
    except gymnasium.error.DependencyNotInstalled as e:
        raise lacking(name, e) from None
    drawn = drawn[-1] if isinstance(drawn, list) and drawn else drawn
    frame = np.asarray(drawn)
    frame = frame[..., None] if frame.ndim == 2 else frame
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] not in (1, 3, 4):
        raise ConfigError(f"env: {name} renders {type(drawn).__name__}, not a picture of bytes [height, width, 3]")
    return np.repeat(frame, 3, 2) if frame.shape[2] == 1 else frame[..., :3]


def lacking(name: str, error: BaseException) -> ConfigError:
    """The error for an environment that lacks something to render."""
    return ConfigError(f"env: {name} needs something to render that is not installed.{gym.missing(str(error))}")
