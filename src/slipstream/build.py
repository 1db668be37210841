"""The parts of one worker, made from a run: environment, policy, collector, optimizer, rule.

Everything random in them comes from the run's seed by `SeedSequence.spawn_key`, with a key of its own for
each role, worker and incarnation.
"""

from __future__ import annotations

import os
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream import actions, compress
from slipstream.config import Given, Run, module
from slipstream.cores import SINGLE_THREADED
from slipstream.envs import atari, gym
from slipstream.moments import size as moments_size
from slipstream.nets.acting import forward_for
from slipstream.nets.policy import Policy, flatten, initialize, pieces
from slipstream.optimize import Stepper, state_layout
from slipstream.rollout import Collector, Environment, Normalizer
from slipstream.store import Layout, Store


class Role(IntEnum):
    """First number of a spawn key: what a seed is for."""

    WEIGHTS = 0
    ENVIRONMENT = 1
    ACTIONS = 2
    EVALUATION = 3
    COMPRESSION = 4


def seeds(run: Run, role: Role, *more: int) -> np.random.SeedSequence:
    """The seed of one role (of one worker, of one incarnation)."""
    return np.random.SeedSequence(run.seed, spawn_key=(role, *more))


def environment(run: Run, given: Given, copies: int, sequence: np.random.SeedSequence) -> Environment:
    """The run's environment with `copies` rows."""
    env = given.env or run.env
    make: Any = atari.make if atari.owns(env) else gym.make
    made: Environment = make(env, copies, sequence, run.env_kwargs, run.limits.max_env_failures)
    return made


def policy_for(run: Run, given: Given, env: Environment) -> Policy:
    """The run's network, with the weights every run of this seed begins with."""
    state = torch.random.get_rng_state()  # a torso of the user's draws from torch's own generator
    seed = int(seeds(run, Role.WEIGHTS).generate_state(1)[0])
    torch.manual_seed(seed)
    policy = Policy(env.shape, env.head, run.net, given.torso)
    torch.random.set_rng_state(state)
    initialize(policy, seed)
    return policy


def normalizer_for(run: Run, env: Environment) -> Normalizer:
    """The run's normalizer of observations and rewards."""
    if run.normalize_observations and env.dtype == np.uint8:
        from slipstream.errors import ConfigError

        raise ConfigError("normalize_observations: the observations are 8-bit images, scaled by 255 instead")
    return Normalizer(env.shape, run.normalize_observations, run.normalize_rewards, run.algo.gamma)


def moment_sizes(run: Run, env: Environment) -> tuple[int, ...]:
    """Sizes of the parts of a slot's moments: observations, rewards."""
    n = normalizer_for(run, env)
    return tuple(s for s in (n.obs_size, moments_size(1) if n.reward else 0) if s)


def layout(run: Run, given: Given) -> tuple[Layout, NDArray[np.float32], dict[str, Any]]:
    """What the store must hold, the first weights, and a description of the parts for the run directory."""
    env = environment(run, given, 1, seeds(run, Role.EVALUATION, 0))
    policy = policy_for(run, given, env)
    places, _ = pieces(policy)
    weights, _ = flatten(policy)
    parts = {
        "observations": {"shape": list(env.shape), "dtype": str(env.dtype)},
        "actions": {"kind": env.head.kind, "sizes": list(env.head.sizes)},
        "parameters": sum(int(np.prod(p.shape)) for p in places),
        "pieces": [[p.name, list(p.shape), p.offset] for p in places],
        "observation_moments": normalizer_for(run, env).obs_size,
    }
    env.close()
    made = Layout(
        weights=len(weights),
        optimizer=state_layout(run.algo.optimizer, len(weights), run.rule),
        moments=sum(moment_sizes(run, env)),
        workers=run.worker_count + (run.update == "server"),
        offers=run.update == "sync",
        in_place=run.update == "hogwild",
        checksums=run.check_reads,
        uplink=_uplink(run, len(weights)),
    )
    return made, weights, parts


def _uplink(run: Run, size: int) -> tuple[int, int, int]:
    """Messages a worker may have on the way to the server, bytes of each gradient, weights sent with it."""
    if run.update != "server":
        return 0, 0, 0
    made = compressor(run, 0, 0, size)
    capacity = 4 * size if made is None else made.capacity
    return run.rule.pipeline, capacity, size if run.rule.delay_compensation != "none" else 0


def compressor(run: Run, worker: int, incarnation: int, size: int) -> compress.Compressor | None:
    """What a worker compresses its gradients with, or None."""
    if run.compress == "none":
        return None
    return compress.make(run.compress, size, seeds(run, Role.COMPRESSION, worker, incarnation))


def stepper(run: Run, store: Store, env: Environment) -> Stepper:
    """The optimizer over the store's slots."""
    a = run.algo
    return Stepper(store, a.optimizer, a.epsilon, a.rmsprop_decay, moment_sizes(run, env), run.rule)


def rule(run: Run, store: Store, env: Environment) -> Any:
    """The run's update rule over this handle of the store."""
    algorithm = module("algos", run.algorithm)
    rate = partial(algorithm.learning_rate, run.algo, horizon=run.total_steps)
    return module("rules", run.update).Rule(store, stepper(run, store, env), rate)


def collector(
    run: Run,
    env: Environment,
    policy: Policy,
    normalizer: Normalizer,
    worker: int,
    incarnation: int,
    row: Any,
) -> Collector:
    """The collector of one incarnation of one worker."""
    act, value = forward_for(policy)
    return Collector(
        env, run.algo.rollout_steps, act, value, partial(actions.sample, env.head),
        np.random.Generator(np.random.PCG64(seeds(run, Role.ACTIONS, worker, incarnation))),
        policy.state_size, normalizer, row,
    )  # fmt: skip


def single_threaded() -> None:
    """Limit this process's numerical libraries to one thread each (workers are the parallelism)."""
    for name, value in SINGLE_THREADED.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
