"""Gymnasium spaces to what the network sees, and the network's actions to what the environment gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from slipstream.actions import Head
from slipstream.errors import ConfigError

Array = NDArray[Any]
LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True)
class Observations:
    """How observations of `space` are stored.

    A Box keeps its shape; 8-bit images (bounds 0 and 255) stay uint8 up to the network, which scales them;
    everything else becomes float32. Discrete parts are one-hot; Dict and Tuple are concatenated in the
    order of the space, never of the observation; 8-bit images in them are scaled here.
    """

    space: spaces.Space[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def encode(self, obs: Any, lead: tuple[int, ...] = ()) -> Array:
        """One observation, or a batch with leading shape `lead`, as the network's array (a copy or a cast)."""
        if isinstance(self.space, spaces.Box):
            return np.asarray(obs, self.dtype).reshape(*lead, *self.shape)
        return _concatenate(self.space, obs, lead)


def observations(space: spaces.Space[Any]) -> Observations:
    """The encoding of an observation space.

    Raises:
        ConfigError: a space (or a part of one) that is not supported; names it.
    """
    _supported(space, "observation")
    if isinstance(space, spaces.Box):
        return Observations(space, space.shape or (1,), np.dtype(np.uint8 if _image(space) else np.float32))
    return Observations(space, (_width(space),), np.dtype(np.float32))


def _image(space: spaces.Space[Any]) -> bool:
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and bool((space.high == 255).all() and (space.low == 0).all())
    )


def _supported(space: spaces.Space[Any], what: str) -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for part in parts:
            _supported(part, what)
    elif not isinstance(space, LEAVES):
        raise ConfigError(
            f"{what} space {space} is not supported; supported are Box, Discrete, MultiDiscrete, MultiBinary, "
            "and Dict and Tuple of these"
        )


def _width(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Dict):
        return sum(_width(s) for s in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return sum(_width(s) for s in space.spaces)
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    return math.prod(space.shape or (1,))


def _concatenate(space: spaces.Space[Any], obs: Any, lead: tuple[int, ...]) -> Array:
    if isinstance(space, spaces.Dict):
        parts = [_concatenate(s, obs[key], lead) for key, s in space.spaces.items()]
        return np.concatenate(parts, -1)
    if isinstance(space, spaces.Tuple):
        return np.concatenate([_concatenate(s, o, lead) for s, o in zip(space.spaces, obs, strict=True)], -1)
    if isinstance(space, spaces.Discrete):
        index: Array = np.asarray(obs).reshape(*lead, 1) - space.start
        return np.asarray(index == np.arange(space.n), np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        values = (np.asarray(obs) - space.start).reshape(*lead, -1)
        hots = [values[..., i : i + 1] == np.arange(n) for i, n in enumerate(space.nvec.ravel())]
        return np.concatenate(hots, -1).astype(np.float32)
    values = np.asarray(obs, np.float32).reshape(*lead, -1)
    return values / np.float32(255) if _image(space) else values


@dataclass(frozen=True)
class Actions:
    """How raw actions become the environment's.

    Box: the raw sample is clipped to [-1, 1] and stretched to [low, high] (no tanh), so 0 is the middle of
    the range and a standard deviation of 1 is half of it. A component without finite bounds gets the raw
    sample, clipped on the side that is bounded. The raw sample is what is stored and learned from.
    """

    space: spaces.Space[Any]
    head: Head

    def decode(self, raw: Array) -> Array:
        """Raw actions `[..., components]` (or `[...]` of a single choice) to environment actions."""
        space = self.space
        if isinstance(space, spaces.Discrete):
            return np.asarray(raw + space.start)
        lead = raw.shape[:-1]
        if isinstance(space, spaces.MultiDiscrete):
            values = raw + space.start.ravel()
            return np.asarray(values.astype(space.dtype).reshape(*lead, *space.shape))
        assert isinstance(space, spaces.Box)
        low, high = space.low.ravel(), space.high.ravel()
        finite = np.isfinite(low) & np.isfinite(high)
        with np.errstate(invalid="ignore", over="ignore"):
            stretched = low + (np.clip(raw, -1, 1) + 1) * 0.5 * (high - low)
        values = np.clip(np.where(finite, stretched, raw), low, high)
        return np.asarray(values.astype(space.dtype).reshape(*lead, *space.shape))


def actions(space: spaces.Space[Any]) -> Actions:
    """The encoding of an action space.

    Raises:
        ConfigError: not Discrete, MultiDiscrete or a Box of floats; names it.
    """
    if isinstance(space, spaces.Discrete):
        return Actions(space, Head("categorical", (int(space.n),)))
    if isinstance(space, spaces.MultiDiscrete):
        return Actions(space, Head("multi", tuple(int(n) for n in space.nvec.ravel())))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Actions(space, Head("gaussian", (1,) * math.prod(space.shape or (1,))))
    hint = "; a Box of integers can be offered as MultiDiscrete" if isinstance(space, spaces.Box) else ""
    raise ConfigError(
        f"action space {space} is not supported; supported are Discrete, MultiDiscrete and Box of floats{hint}"
    )
