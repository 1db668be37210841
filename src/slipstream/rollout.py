"""Rollouts `[T, B, ...]`, the collector that fills them, and returns computed from them.

The order of time: in row t the policy saw `obs[t]` and took `action[t]`, which gave `reward[t]` and
`terminated[t]` / `truncated[t]` ("the transition out of obs[t] ended the episode"), and led to
`obs[t + 1]`. After an ended row comes either the true final observation, in a row that is not `valid`
(nothing was done in it), or at once the first observation of the next episode, and then `bootstrap`
holds the value of the final one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream import moments
from slipstream.counters import Counter

Array = NDArray[Any]
CLIP = 10.0  # bound of normalized observations and rewards


class Step(NamedTuple):
    """What one step of B rows gave.

    Attributes:
        obs: `[B, *shape]`, the observation to act on next (the final one in the row an episode ended,
            unless `final` holds it).
        reward: float32 `[B]`.
        terminated: bool `[B]`, the environment ended: nothing follows.
        truncated: bool `[B]`, a time limit cut the episode: bootstrap.
        valid: bool `[B]`, False where the row was a reset, or its outcome is unknown: never trained on.
        starts: bool `[B]`, the next observation begins an episode.
        final: where the environment resets in the same step: (row ids, their final observations).
        mask: bool `[B, actions]`, actions allowed next, or None.
        failures: a sentence for each copy that raised and was replaced.
        lost: bool `[B]`, terminated by a lost life only: the game and its return go on; None where that cannot be.
    """

    obs: Array
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    starts: Array
    final: tuple[Array, Array] | None = None
    mask: Array | None = None
    failures: tuple[str, ...] = ()
    lost: Array | None = None


class Environment(Protocol):
    """The batched interface over rows that every file of envs/ offers."""

    copies: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    head: Any
    max_restarts: int

    def reset(self) -> tuple[Array, Array | None]:
        """Begin an episode in every copy: (obs `[B, *shape]`, mask)."""

    def step(self, action: Array) -> Step:
        """Step every copy with raw actions `[B, ...]`."""

    def replace(self, row: int) -> None:
        """Begin a new episode in one copy at its next step, without stepping it."""

    def save(self) -> tuple[dict[str, Any], dict[str, Array]] | None:
        """State as (JSON values, arrays), or None where it cannot be had."""

    def restore(self, values: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Go on from what `save` gave; raises ValueError where that is impossible."""

    def close(self) -> None:
        """Release what the copies hold outside this process (simulators, windows); never raises."""


@dataclass
class Rollout:
    """A time-major fragment of experience. T steps of B rows; see the module for the order of time."""

    obs: Array  # [T+1, B, *shape], normalized if the run normalizes
    action: Array  # [T, B, ...], the raw sample
    reward: Array  # [T, B], scaled if the run normalizes
    terminated: Array  # [T, B]
    truncated: Array  # [T, B]
    valid: Array  # [T, B]
    starts: Array  # [T+1, B]
    bootstrap: Array  # [T, B], value of the final observation where `has_bootstrap`
    has_bootstrap: Array  # [T, B]
    state: Array  # [B, S], recurrent state before row 0
    mask: Array | None = None  # [T, B, actions]
    version: int = 0
    samples: int = 0  # valid rows
    episodes: list[tuple[int, float, int]] = field(default_factory=list)  # (row t, return, length)
    moments: Array = field(default_factory=lambda: np.zeros(0))
    failures: list[str] = field(default_factory=list)


class Collector:
    """Steps environments with a policy and fills one rollout, the same memory each time."""

    def __init__(
        self,
        env: Environment,
        steps: int,
        act: Callable[[Array, Array, Array], tuple[Array, Array]],
        value: Callable[[Array, Array, Array], tuple[Array, Array]],
        choose: Callable[[Array, np.random.Generator, Array | None], Array],
        rng: np.random.Generator,
        state_size: int,
        normalizer: Normalizer,
        row: Array,
    ) -> None:
        self.env, self.act, self.value, self.choose, self.rng = env, act, value, choose, rng
        self.normalizer, self.counters = normalizer, row
        T, B, shape = steps, env.copies, env.shape
        dtype = np.dtype(np.float32) if normalizer.obs else env.dtype
        self.raw = np.zeros((T + 1, B, *shape), env.dtype) if normalizer.obs else None

        def zeros(*shape: int, dtype: Any = np.float32) -> Array:
            return aligned(shape, np.dtype(dtype))

        self.rollout = Rollout(
            obs=aligned((T + 1, B, *shape), dtype),
            action=zeros(T, B, *env.head.action_shape, dtype=env.head.action_dtype),
            reward=zeros(T, B),
            terminated=zeros(T, B, dtype=bool),
            truncated=zeros(T, B, dtype=bool),
            valid=zeros(T, B, dtype=bool),
            starts=zeros(T + 1, B, dtype=bool),
            bootstrap=zeros(T, B),
            has_bootstrap=zeros(T, B, dtype=bool),
            state=zeros(B, state_size),
        )
        self.raw_reward = zeros(T, B)
        self.lost = zeros(T, B, dtype=bool)
        self.state = zeros(B, state_size)  # recurrent state now
        self.starts = np.ones(B, bool)
        self.returns, self.lengths = np.zeros(B), np.zeros(B, np.int64)
        self.discounted = np.zeros(B)
        self.obs, self.mask = env.reset()

    def collect(self, version: int, stopped: Callable[[], bool]) -> Rollout | None:
        """Act for T steps with the weights pulled last; None if `stopped()` before the end.

        The rollout returned is overwritten by the next call.
        """
        r, env, norm, counters = self.rollout, self.env, self.normalizer, self.counters
        obs_out = r.obs if self.raw is None else self.raw
        r.version, r.episodes, r.failures = version, [], []
        r.has_bootstrap[:] = False
        r.state[:] = self.state
        obs_out[0], r.starts[0] = self.obs, self.starts
        state = self.state
        for t in range(len(r.action)):
            seen = r.obs[t]
            if self.raw is not None:
                norm.observations(self.raw[t], out=seen)
            params, state = self.act(seen, state, r.starts[t])
            action = self.choose(params, self.rng, self.mask)
            if self.mask is not None and r.mask is None:  # the first one need not come with the reset
                r.mask = aligned((len(r.action), *self.mask.shape), np.dtype(bool))
                r.mask[:t] = True
            if r.mask is not None:
                r.mask[t] = True if self.mask is None else self.mask
            step = env.step(action)
            obs_out[t + 1], r.action[t], self.raw_reward[t] = step.obs, action, step.reward
            r.terminated[t], r.truncated[t] = step.terminated, step.truncated
            r.valid[t], r.starts[t + 1] = step.valid, step.starts
            self.lost[t] = False if step.lost is None else step.lost
            self.mask = step.mask
            if step.final is not None:
                self._value_final(t, step, state)
            if step.failures:
                r.failures += step.failures
            counters[Counter.BEAT] += 1
            if counters[Counter.BEAT] % 16 == 0 and stopped():
                return None
        self.obs, self.starts = obs_out[-1].copy(), r.starts[-1].copy()
        self.state = np.array(state)
        if self.raw is not None:
            norm.observations(self.raw[-1], out=r.obs[-1])
        self._finish(r)
        return r

    def _value_final(self, t: int, step: Step, state: Array) -> None:
        """Value of final observations that the environment has already replaced by reset ones."""
        assert step.final is not None
        rows, obs = step.final
        seen = np.zeros((len(rows), *self.env.shape), self.rollout.obs.dtype)
        if self.raw is None:
            seen[:] = obs
        else:
            self.normalizer.observations(obs, out=seen)
        value, _ = self.value(seen, state[rows], np.zeros(len(rows), bool))
        self.rollout.bootstrap[t, rows], self.rollout.has_bootstrap[t, rows] = value, True

    def _finish(self, r: Rollout) -> None:
        """Scale rewards, gather moments and the statistics of finished episodes."""
        r.samples = int(r.valid.sum())
        ended = r.terminated | r.truncated | (~r.valid & r.starts[1:])
        self._episodes(r, ended & ~self.lost)
        r.reward[:] = self.raw_reward
        if getattr(self.env, "reward_clip", False):  # learned from, never reported
            np.clip(r.reward, -1, 1, out=r.reward)
        if self.normalizer.reward:
            self.normalizer.rewards(r.reward)
        r.moments = self.normalizer.gather(self.raw, self.raw_reward, r, ended, self.discounted)

    def _episodes(self, r: Rollout, ended: Array) -> None:
        if not ended.any():
            self.returns += self.raw_reward.sum(0)
            self.lengths += r.valid.sum(0)
            return
        for t in range(len(ended)):
            self.returns += self.raw_reward[t]
            self.lengths += r.valid[t]
            for b in np.flatnonzero(ended[t]):
                # an episode lost to a failure, or to NaN, is not counted
                if (r.terminated[t, b] or r.truncated[t, b]) and np.isfinite(self.returns[b]):
                    r.episodes.append((t, float(self.returns[b]), int(self.lengths[b])))
                self.returns[b], self.lengths[b] = 0.0, 0

    def drop(self, rows: Array) -> None:
        """Begin anew in `rows`: their copies gave numbers that are not finite."""
        for b in rows:
            self.env.replace(int(b))
            self.returns[b], self.lengths[b], self.discounted[b] = 0.0, 0, 0.0
        self.state[rows] = 0
        self.obs = np.where(np.isfinite(self.obs), self.obs, 0).astype(self.obs.dtype)


class Normalizer:
    """Normalizes with the moments pulled last; gathers new ones for the next push.

    Observations: minus mean, over standard deviation. Rewards: over the standard deviation of the
    discounted return, never minus its mean, which would change the task.
    """

    def __init__(self, shape: tuple[int, ...], obs: bool, reward: bool, gamma: float) -> None:
        self.features = int(np.prod(shape))
        self.obs, self.reward, self.gamma = obs, reward, gamma
        self.obs_size = moments.size(self.features) if obs else 0
        self.size = self.obs_size + (moments.size(1) if reward else 0)
        self.mean: Array = np.zeros(shape, np.float32)
        self.scale: Array = np.ones(shape, np.float32)
        self.reward_scale = 1.0

    def use(self, pulled: Array) -> None:
        """Normalize with these moments from now on."""
        if self.obs:
            mean, scale = moments.mean_and_scale(pulled[: self.obs_size])
            self.mean[:] = mean.reshape(self.mean.shape)
            self.scale[:] = scale.reshape(self.scale.shape)
        if self.reward:
            self.reward_scale = float(moments.mean_and_scale(pulled[self.obs_size :])[1][0])

    def observations(self, raw: Array, out: Array) -> None:
        """Write normalized `raw [B, *shape]` to `out`."""
        np.subtract(raw, self.mean, out=out, casting="unsafe")
        out *= self.scale
        np.clip(out, -CLIP, CLIP, out=out)

    def rewards(self, reward: Array) -> None:
        """Scale rewards in place."""
        reward *= self.reward_scale
        np.clip(reward, -CLIP, CLIP, out=reward)

    def gather(self, raw: Array | None, reward: Array, r: Rollout, ended: Array, discounted: Array) -> Array:
        """Moments of this rollout's observations and discounted returns; `discounted [B]` goes on."""
        parts = []
        if self.obs and raw is not None:
            # every observation but the last row's, which opens the next rollout
            parts.append(moments.of_batch(raw[:-1].reshape(-1, self.features)))
        if self.reward:
            seen = []
            for t in range(len(reward)):
                discounted *= self.gamma
                discounted += reward[t]
                seen.append(discounted[r.valid[t]].copy())
                discounted[ended[t]] = 0.0
            parts.append(moments.of_batch(np.concatenate(seen)[:, None]))
        return np.concatenate(parts) if parts else np.zeros(0)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros on a 64-byte boundary: the same numbers from the same kernels in every process."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def gae(
    reward: Array,
    value: Array,
    terminated: Array,
    truncated: Array,
    valid: Array,
    bootstrap: Array,
    has_bootstrap: Array,
    gamma: float,
    lam: float,
) -> Array:
    """Generalized advantage estimates `[T, B]` (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V(s_{t+1}) (1 - terminated_t) - V(s_t);
    A_t = delta_t + gamma lam (1 - done_t) A_{t+1}. lam = 1 is the n-step return of A3C less V.

    Args:
        reward: `[T, B]`.
        value: `[T+1, B]`; the last row is V of the observation after the rollout.
        terminated: `[T, B]`; wins where both flags are set.
        truncated: `[T, B]`; cuts the trace, does not stop bootstrapping.
        valid: `[T, B]`; rows that are not have no advantage and pass none on.
        bootstrap: `[T, B]`; V of the final observation where `has_bootstrap`.
        has_bootstrap: `[T, B]`.
        gamma: discount.
        lam: lambda.
    """
    if value.shape != (len(reward) + 1, *reward.shape[1:]):
        raise ValueError(f"values {value.shape} do not fit rewards {reward.shape}")
    for other in (terminated, truncated, valid, bootstrap, has_bootstrap):
        if other.shape != reward.shape:  # would be broadcast without a word
            raise ValueError(f"an array {other.shape} does not fit rewards {reward.shape}")
    following = np.where(has_bootstrap, bootstrap, value[1:]) if has_bootstrap.any() else value[1:]
    delta = reward + gamma * following * ~terminated - value[:-1]
    delta *= valid
    carry = (gamma * lam * valid * ~(terminated | truncated)).astype(np.float32)
    advantage = np.empty_like(delta, dtype=np.float32)
    last = np.zeros(reward.shape[1:], np.float32)
    for t in range(len(reward) - 1, -1, -1):
        last = delta[t] + carry[t] * last
        advantage[t] = last
    return advantage


def explained_variance(prediction: Array, target: Array, valid: Array) -> float:
    """1 - Var(target - prediction) / Var(target) over valid rows; NaN where the target is constant."""
    y = target[valid]
    spread = float(y.var()) if y.size else 0.0
    return 1.0 - float((y - prediction[valid]).var()) / spread if spread > 0 else float("nan")
