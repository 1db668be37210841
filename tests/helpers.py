"""Small parts that several tests share: environments with hand-computable episodes, networks, rollouts, stores."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from slipstream import store as stores
from slipstream.actions import Head, sample
from slipstream.config import Net
from slipstream.counters import ROW
from slipstream.envs.gym import Copies, Native
from slipstream.nets.policy import Policy, flatten, initialize
from slipstream.rollout import Collector, Normalizer, Rollout

KINDS = ("copies", "next_step", "same_step", "disabled")
MODES = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}


class CounterEnv(gym.Env):
    """The observation is `base` + the number of steps taken; the reward of step n is n.

    An episode has `length` steps and ends by `ends`: terminated, truncated or both.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 3, ends: str = "terminated", base: float = 0.0, reward: float | None = None):
        self.length, self.ends, self.base, self.reward = length, ends, base, reward
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.n = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        assert self.n < self.length, "stepped after the end of its episode"
        self.n += 1
        over = self.n == self.length
        reward = float(self.n) if self.reward is None else self.reward
        return self.seen(), reward, over and self.ends != "truncated", over and self.ends != "terminated", {}

    def seen(self) -> Any:
        return np.array([self.base + self.n], np.float32)


class NoiseEnv(gym.Env):
    """Observations are random numbers of the seed given to `reset`; episodes have random lengths."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        ends = self.np_random.random(2) < (0.1, 0.1)
        return self.seen(), float(self.np_random.normal() + action), bool(ends[0]), bool(ends[1]), {}

    def seen(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


for name, maker in (("Counter", CounterEnv), ("Noise", NoiseEnv)):
    if f"tests/{name}-v0" not in gym.registry:
        gym.register(f"tests/{name}-v0", entry_point=maker)


def rows(kind: str, build: Callable[[], gym.Env], copies: int, seed: int = 0, failures: int = 5) -> Copies | Native:
    """`copies` rows of an environment: stepped by us, or in a vector form with one of the autoreset modes."""
    seeds = np.random.SeedSequence(seed)
    if kind == "copies":
        return Copies(build, copies, seeds, failures)
    vector = lambda: SyncVectorEnv([build] * copies, autoreset_mode=MODES[kind])  # noqa: E731
    return Native(vector, copies, seeds, failures)


def each(*environments: Callable[[], gym.Env]) -> Callable[[], gym.Env]:
    """A builder that makes these environments in turn."""
    makers = itertools.cycle(environments)
    return lambda: next(makers)()


def collector(
    env: Any,
    steps: int,
    act: Callable[..., Any] | None = None,
    value: Callable[..., Any] | None = None,
    seed: int = 0,
    state_size: int = 0,
    normalize: tuple[bool, bool] = (False, False),
    gamma: float = 0.9,
) -> Collector:
    """A collector; by default all actions are equally likely and the value is the first number observed."""

    width = env.head.outputs * (2 if env.head.kind == "gaussian" else 1)

    def level(obs: Any, state: Any, starts: Any) -> Any:
        return np.zeros((len(obs), width), np.float32), state

    def first(obs: Any, state: Any, starts: Any) -> Any:
        return obs.reshape(len(obs), -1)[:, 0].astype(np.float32), state

    return Collector(
        env, steps, act or level, value or first,
        lambda params, rng, mask: sample(env.head, params, rng, mask),
        np.random.default_rng(seed), state_size, Normalizer(env.shape, *normalize, gamma), np.zeros(ROW),
    )  # fmt: skip


def transitions(rollout: Rollout, finals: dict[tuple[int, int], Any]) -> list[list[tuple[float, float, bool, bool]]]:
    """For each stream the valid (observation, next observation, terminated, truncated).

    `finals[t, b]` are the final observations that the environment handed over in the row an episode ended.
    """
    out: list[list[tuple[float, float, bool, bool]]] = [[] for _ in range(rollout.action.shape[1])]
    for t, b in zip(*np.nonzero(rollout.valid), strict=True):
        after = finals.get((int(t), int(b)), rollout.obs[t + 1, b])
        ends = bool(rollout.terminated[t, b]), bool(rollout.truncated[t, b])
        out[b].append((float(rollout.obs[t, b].flat[0]), float(np.ravel(after)[0]), *ends))
    return out


HEADS = {
    "categorical": Head("categorical", (3,)),
    "multi": Head("multi", (3, 2)),
    "gaussian": Head("gaussian", (1, 1)),
}


def network(
    head: Head, shape: tuple[int, ...] = (4,), seed: int = 0, torso: Any = "mlp", spread: float = 0.5, **net: Any
) -> tuple[Policy, np.ndarray, np.ndarray]:
    """A small policy with weights that are not small: (policy, flat weights, flat gradient)."""
    named = torso if isinstance(torso, str) else "mlp"
    options = {"hidden": (16, 16), "core_size": 8, "torso": named, **net}
    policy = Policy(shape, head, Net(**options), None if named is torso else torso)
    initialize(policy, seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for p in policy.parameters():
            p += spread * torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5
    return policy, *flatten(policy)


def random_rollout(
    policy: Policy, T: int, B: int, seed: int = 0, masks: bool = False, ends: float = 0.15, invalid: float = 0.1
) -> Rollout:
    """Random experience with episodes that end, invalid rows, final observations and masks."""
    rng = np.random.default_rng(seed)
    head, shape = policy.head, policy.shape
    if head.kind == "gaussian":
        action = rng.normal(size=(T, B, *head.action_shape)).astype(np.float32)
    else:
        action = rng.integers(0, head.sizes, (T, B, len(head.sizes))).reshape(T, B, *head.action_shape)
    terminated, truncated = rng.random((T, B)) < ends, rng.random((T, B)) < ends
    valid = rng.random((T, B)) >= invalid
    valid[T // 2, 0] &= not invalid  # at least one
    mask = None
    if masks:
        mask = rng.random((T, B, head.outputs)) < 0.5
        at = np.cumsum([0, *head.sizes[:-1]])
        np.put_along_axis(mask, action.reshape(T, B, -1) + at, True, -1)  # what was chosen was allowed
    return Rollout(
        obs=rng.normal(size=(T + 1, B, *shape)).astype(np.float32),
        action=action,
        reward=rng.normal(size=(T, B)).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        starts=np.concatenate([rng.random((1, B)) < 0.5, terminated | truncated | ~valid]),
        bootstrap=rng.normal(size=(T, B)).astype(np.float32),
        has_bootstrap=truncated & (rng.random((T, B)) < 0.5),
        state=rng.normal(size=(B, policy.state_size)).astype(np.float32) * np.float32(0.5),
        mask=mask,
        samples=int(valid.sum()),
    )


@contextlib.contextmanager
def open_store(folder: Path, layout: stores.Layout, weights: np.ndarray, handles: int = 1) -> Iterator[Any]:
    """A parameter store in `folder` and handles on it (one alone, or a list)."""
    _, size = layout.regions()
    segment = stores.Segment.create(size, [str(folder)])
    stores.initialize(segment.path, layout, weights)
    opened = [stores.Store(segment.path, i) for i in range(handles)]
    try:
        yield opened[0] if handles == 1 else opened
    finally:
        for handle in opened:
            handle.close()
        segment.close()


class Convolution(nn.Module):
    """A torso such as a user writes: 8-bit images to features."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 4, 3, 2), nn.ReLU(), nn.Flatten())
        self.out_features = self.body(torch.zeros(1, *shape)).shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.float() / 255.0)


class Normed(nn.Module):
    """A torso of vectors with LayerNorm."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 12), nn.LayerNorm(12), nn.SiLU())
        self.out_features = 12

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Batched(Normed):
    """A torso that keeps running statistics, which would not be shared."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.body.append(nn.BatchNorm1d(12))


class Nameless(nn.Module):
    """A torso that does not say how wide its features are."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(shape)), 3)
