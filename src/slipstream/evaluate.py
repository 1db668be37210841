"""A trained policy: load it, act with it, measure it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import actions, build, checkpoint, config
from slipstream.build import Role
from slipstream.config import Given, Run
from slipstream.errors import ConfigError
from slipstream.nets.acting import forward_for
from slipstream.nets.policy import flatten

Array = NDArray[Any]


class Policy:
    """A trained policy with its normalization frozen.

    `act` takes one observation or a batch; recurrent state is kept between calls until `reset`.
    """

    def __init__(self, run: Run, given: Given, loaded: checkpoint.Loaded) -> None:
        self.run, self.checkpoint = run, loaded.path
        self.steps, self.version = int(loaded.state["steps"]), int(loaded.state["version"])
        self.env = build.environment(run, given, 1, build.seeds(run, Role.EVALUATION, 0))
        self.network = build.policy_for(run, given, self.env)
        weights, _ = flatten(self.network)
        if loaded.arrays["weights"].shape != weights.shape:
            raise ConfigError(f"{loaded.path}: weights are of another network than config.yaml describes")
        weights[:] = loaded.arrays["weights"]
        self.forward, _ = forward_for(self.network)
        self.normalizer = build.normalizer_for(run, self.env)
        self.normalizer.use(loaded.arrays["moments"])
        self.rng = np.random.Generator(np.random.PCG64(build.seeds(run, Role.EVALUATION, 2)))
        self.state: Array | None = None
        self.starts: Array = np.ones(0, bool)

    def reset(self, row: int | None = None) -> None:
        """Forget the past of one row, or of all: a new episode begins."""
        if row is None:
            self.state = None
        else:
            self.starts[row] = True

    def act(
        self,
        obs: Any,
        deterministic: bool = True,
        action_mask: Array | None = None,
        batched: bool | None = None,
    ) -> Any:
        """Actions for the environment.

        Args:
            obs: one observation of the environment's space, or a batch `[B, ...]` of them.
            deterministic: the most likely action, else a sample.
            action_mask: `[actions]` or `[B, actions]`, True where an action is allowed.
            batched: whether `obs` is a batch; found out by its shape if not given.

        Returns:
            An action the environment takes, or `B` of them.
        """
        encoder, decoder = self.env.encoder, self.env.decoder  # type: ignore[attr-defined]
        many = self._batched(obs) if batched is None else batched
        lead = (_length(obs),) if many else ()
        rows = np.asarray(encoder.encode(obs, lead)).reshape(-1, *self.env.shape)
        mask = None if action_mask is None else np.asarray(action_mask, bool).reshape(len(rows), -1)
        chosen = decoder.decode(self.choose(rows, deterministic, mask))
        return chosen if many else chosen[0]

    def choose(self, rows: Array, deterministic: bool, mask: Array | None) -> Array:
        """Raw actions for encoded observations `[B, *shape]`; keeps recurrent state."""
        if self.normalizer.obs:
            seen = np.zeros(rows.shape, np.float32)
            self.normalizer.observations(rows, out=seen)
            rows = seen
        if self.state is None or len(self.state) != len(rows):
            self.state = np.zeros((len(rows), self.network.state_size), np.float32)
            self.starts = np.ones(len(rows), bool)
        params, self.state = self.forward(np.ascontiguousarray(rows), self.state, self.starts)
        self.starts = np.zeros(len(rows), bool)
        if deterministic:
            return actions.mode(self.env.head, params, mask)
        return actions.sample(self.env.head, params, self.rng, mask)

    def _batched(self, obs: Any) -> bool:
        space = self.env.encoder.space  # type: ignore[attr-defined]
        while isinstance(obs, dict | tuple):
            key = next(iter(obs)) if isinstance(obs, dict) else 0
            obs, space = obs[key], space[key]
        return int(np.ndim(obs)) > len(space.shape or ())


def _length(obs: Any) -> int:
    while isinstance(obs, dict | tuple):
        obs = next(iter(obs.values())) if isinstance(obs, dict) else obs[0]
    return len(obs)


def load(
    run: str | os.PathLike[str],
    *,
    env: Callable[..., Any] | None = None,
    torso: Callable[..., Any] | None = None,
) -> Policy:
    """The policy of a run's newest whole checkpoint (or of a checkpoint directory).

    Args:
        run: a run directory, a checkpoint directory in it, or the result of `train`.
        env: the environment's maker, for a run trained with a callable.
        torso: the torso's maker, for a run trained with a callable.

    Raises:
        ConfigError: nothing there to load, or it is damaged.
    """
    path = Path(run)
    loaded = checkpoint.Loaded(path) if (path / "state.json").exists() else checkpoint.newest(path)
    return Policy(config.from_dict(loaded.state["config"]), Given(env, torso), loaded)


@dataclass(frozen=True)
class Evaluation:
    """Raw returns over whole episodes.

    Attributes:
        iqm: interquartile mean; `iqm_low`, `iqm_high` its 95 % bootstrap interval.
        cut: episodes that did not end within the limit of steps and were counted as they stood.
    """

    run: str
    checkpoint: str
    steps: int
    episodes: int
    mean: float
    std: float
    iqm: float
    iqm_low: float
    iqm_high: float
    minimum: float
    maximum: float
    length: float
    deterministic: bool
    cut: int
    returns: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def evaluate(
    run: str | os.PathLike[str], episodes: int = 100, *, deterministic: bool = True, copies: int = 16,
    seed: int | None = None, max_episode_steps: int = 100_000, env: Callable[..., Any] | None = None,
    torso: Callable[..., Any] | None = None,
) -> Evaluation:  # fmt: skip
    """Measure a run's newest policy on environments of its own.

    Every copy plays the same number of episodes, so long ones are not under-represented; normalization is
    frozen and returns are raw.

    Raises:
        ConfigError: no policy there, or no episodes asked for.
    """
    if episodes < 1:
        raise ConfigError(f"episodes: {episodes} is too small, the least is 1")
    policy = load(run, env=env, torso=torso)
    copies = max(1, min(copies, episodes))
    options = policy.run if seed is None else config.from_dict({"seed": seed}, policy.run)
    rows = build.environment(options, Given(env, torso), copies, build.seeds(options, Role.EVALUATION, 1))
    returns, lengths, cut = _play(policy, rows, episodes, deterministic, max_episode_steps)
    rows.close()
    low, high = bootstrap(returns)
    return Evaluation(
        str(Path(run)), policy.checkpoint.name, policy.steps, len(returns), float(returns.mean()),
        float(returns.std()), iqm(returns), low, high, float(returns.min()), float(returns.max()),
        float(lengths.mean()), deterministic, cut, [float(r) for r in returns],
    )  # fmt: skip


def _play(policy: Policy, env: Any, episodes: int, deterministic: bool, limit: int) -> tuple[Array, Array, int]:
    quota = np.full(env.copies, episodes // env.copies)
    quota[: episodes % env.copies] += 1
    totals, lengths = np.zeros(env.copies), np.zeros(env.copies, int)
    done: list[tuple[float, int]] = []
    cut = 0
    policy.reset()
    obs, mask = env.reset()
    while quota.any():
        step = env.step(policy.choose(obs, deterministic, mask))
        obs, mask = step.obs, step.mask
        totals += step.reward * step.valid
        lengths += step.valid
        over = lengths >= limit
        ended = step.terminated | step.truncated
        if step.lost is not None:  # a lost life ends no game
            ended &= ~step.lost
        for b in np.flatnonzero(ended | over):
            if quota[b]:
                done.append((float(totals[b]), int(lengths[b])))
                quota[b] -= 1
                cut += bool(over[b])
            if over[b]:
                env.replace(int(b))
            totals[b], lengths[b] = 0.0, 0
        for b in np.flatnonzero(step.starts):
            policy.reset(int(b))
    returns, steps = zip(*done, strict=True)
    return np.array(returns), np.array(steps), cut


def iqm(x: Array) -> float:
    """Interquartile mean: the mean of the middle half (Agarwal et al. 2021)."""
    cut = len(x) // 4
    return float(np.sort(x)[cut : len(x) - cut].mean())


def bootstrap(x: Array, resamples: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the interquartile mean."""
    rng = np.random.default_rng(0)
    cut = len(x) // 4
    drawn = np.sort(rng.choice(x, (resamples, len(x))), axis=1)[:, cut : len(x) - cut].mean(1)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
