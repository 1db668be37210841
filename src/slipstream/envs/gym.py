"""Gymnasium environments as rows: the environment's own vector form where it has one, else copies
stepped inside this process. Never a process and a pipe for each environment: that is slower (see
docs/architecture.md).
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

import slipstream.envs.hidden  # noqa: F401  (registers our environments)
from slipstream.envs import snapshot
from slipstream.envs.spaces import actions, observations
from slipstream.errors import ConfigError, RunFailed, nearest
from slipstream.rollout import Step

Array = NDArray[Any]
HISTORY = 200_000  # steps of an episode that can be executed again on resume
EXTRAS = {"box2d": "box2d", "pygame": "classic", "ale_py": "atari"}
OLD_API = (
    "the environment follows the old Gym API ({}); wrap it with gymnasium's "
    "`shimmy.GymV21CompatibilityV0` or return (obs, info) from reset and "
    "(obs, reward, terminated, truncated, info) from step"
)


def find(env_id: str) -> Any:
    """The spec of a Gymnasium id; `module:Id` imports the module first, Atari's ids import ale-py.

    Raises:
        ConfigError: no such module or id; names near ones.
    """
    module, _, name = env_id.rpartition(":")
    if not module and name not in gym.registry:
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers its games, which are near ids too
        if name.startswith("ALE/") or "NoFrameskip-v" in name:
            module = "ale_py"
    if module:
        try:
            importlib.import_module(module)
        except ImportError as e:
            if module == "ale_py":
                raise ConfigError(f"env: {env_id} needs ale-py.{missing(module)}") from None
            raise ConfigError(f"env: cannot import module {module!r} of {env_id!r}: {e}") from None
    try:
        return gym.spec(name)
    except gym.error.Error as e:
        close = nearest(name, gym.registry, cutoff=0.0)  # always three to choose from
        hint = f" Did you mean {', '.join(close)}?" if close else " `slipstream envs` lists what there is."
        reason = "" if type(e).__name__ in ("NameNotFound", "NamespaceNotFound") else f" ({e})"
        raise ConfigError(f"env: no environment {env_id!r}.{reason}{hint}") from None


def make(
    env: str | Callable[..., Any],
    copies: int,
    seeds: np.random.SeedSequence,
    kwargs: dict[str, Any],
    failures: int,
) -> Native | Copies:
    """`copies` rows of an environment given by id or by a callable that makes one.

    Raises:
        ConfigError: unknown id, missing extra, or a space that is not supported.
    """
    spec: Any = None if callable(env) else find(env)
    native = spec is not None and spec.vector_entry_point is not None and not spec.additional_wrappers
    try:
        if native and "Jax" not in str(spec.vector_entry_point):
            return Native(lambda: gym.make_vec(spec, num_envs=copies, **kwargs), copies, seeds, failures)
        one = (lambda: env(**kwargs)) if callable(env) else (lambda: gym.make(spec, **kwargs))
        return Copies(one, copies, seeds, failures)
    except gym.error.DependencyNotInstalled as e:
        raise ConfigError(f"env: {env} needs something that is not installed.{missing(str(e))}") from None
    except ImportError as e:  # raised by environments whose package is missing
        raise ConfigError(f"env: {env} needs something that is not installed: {e}") from e
    except TypeError as e:
        if kwargs and "unexpected keyword" in str(e):
            raise ConfigError(f"env_kwargs: {kwargs} do not fit {env}: {e}") from None
        raise _old_api(e) or e from None


def _old_api(error: Exception) -> ConfigError | None:
    """The sentence for an environment of the old Gym API, which wrappers and Python meet before we do."""
    reasons = {
        "unexpected keyword argument 'seed'": "reset takes no seed",
        "(expected 5, got 4)": "step returned 4 values",
        "must inherit from the gymnasium.Env class": "it is no gymnasium.Env",
    }
    for symptom, reason in reasons.items():
        if symptom in str(error):
            return ConfigError(f"env: {OLD_API.format(reason)}")
    return None


def missing(reason: str) -> str:
    """The line that says which extra to install."""
    for word, extra in EXTRAS.items():
        if word in reason.lower():
            return f" Install it with: pip install 'slipstream-rl[{extra}]'"
    return f" {reason}"


class Native:
    """An environment's own vector form; every autoreset mode of Gymnasium is understood."""

    def __init__(self, build: Callable[[], Any], copies: int, seeds: np.random.SeedSequence, failures: int) -> None:
        self.build, self.copies, self.max_restarts, self.restarts = build, copies, failures, 0
        self.env = build()
        self.mode = AutoresetMode(self.env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.encoder = observations(self.env.single_observation_space)
        self.decoder = actions(self.env.single_action_space)
        self.shape, self.dtype, self.head = self.encoder.shape, self.encoder.dtype, self.decoder.head
        self.rng = np.random.Generator(np.random.PCG64(seeds))
        self.ended = np.zeros(copies, bool)
        self.afresh = False
        self.steps = 0

    def reset(self) -> tuple[Array, Array | None]:
        """Begin an episode in every copy."""
        obs, info = self.env.reset(seed=int(self.rng.integers(2**31)))
        self.ended = np.zeros(self.copies, bool)
        self.afresh = False
        return self.encoder.encode(obs, (self.copies,)), _mask(info, ~self.ended)

    def step(self, action: Array) -> Step:
        """Step every copy; where the environment raises, all copies are made anew."""
        try:
            return self._begin_again() if self.afresh else self._step(action)
        except RunFailed:
            raise
        except Exception as e:
            return self._failed(e)

    def _step(self, action: Array) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(self.decoder.decode(action))
        self.steps += 1
        ended = np.logical_or(terminated, truncated)
        valid, final = ~self.ended, None
        mask = _mask(info, np.ones_like(ended) if self.mode == AutoresetMode.SAME_STEP else ~ended)
        if self.mode == AutoresetMode.NEXT_STEP:
            starts, self.ended = self.ended, ended
        else:
            starts = ended
            if ended.any():
                obs, final, mask = self._resetting(obs, ended, info, mask)
        return Step(
            self.encoder.encode(obs, (self.copies,)),
            reward,
            terminated,
            truncated,
            valid,
            starts,
            final,
            mask,
        )

    def _resetting(
        self, obs: Any, ended: Array, info: dict[str, Any], mask: Array | None
    ) -> tuple[Any, tuple[Array, Array], Array | None]:
        """Final observations of rows that ended, and observations and masks that begin the next episodes."""
        rows = np.flatnonzero(ended)
        if self.mode == AutoresetMode.SAME_STEP:
            finals = info["final_obs"]
            seen = np.stack([self.encoder.encode(_row(finals, int(b))) for b in rows])
            return obs, (rows, seen), mask
        seen = self.encoder.encode(obs, (self.copies,))[rows]  # a copy
        obs, info = self.env.reset(options={"reset_mask": ended})
        return obs, (rows, seen), _mask(info, ended, mask)

    def _begin_again(self, failures: tuple[str, ...] = ()) -> Step:
        obs, mask = self.reset()
        no, yes = np.zeros(self.copies, bool), np.ones(self.copies, bool)
        return Step(obs, np.zeros(self.copies, np.float32), no, no, no, yes, None, mask, failures)

    def _failed(self, error: Exception) -> Step:
        """Make all copies anew; gives up when that has happened too often."""
        trace = "".join(traceback.format_exception(error))
        self.restarts += 1
        if self.restarts > self.max_restarts:
            raise RunFailed(f"environment raised {self.restarts} times; last at its step {self.steps}:\n{trace}")
        try:
            self.env = self.build()
            return self._begin_again((f"step {self.steps}, all copies made anew: {trace}",))
        except Exception as e:
            return self._failed(e)

    def close(self) -> None:
        """Release what the environment holds."""
        _close(self.env)

    def replace(self, row: int) -> None:
        """Make all copies begin anew at the next step: a vector form has no reset of one."""
        self.afresh = True

    def save(self) -> tuple[dict[str, Any], dict[str, Array]] | None:
        """State of the environment, if its attributes are plain."""
        try:
            values, arrays = snapshot.capture(self.env)
            values = {"env": values, "rng": snapshot.generator_state(self.rng), "afresh": self.afresh}
        except snapshot.Unsupported:
            return None
        arrays["ended"] = self.ended.copy()
        return values, arrays

    def restore(self, values: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Go on from `save`."""
        arrays = dict(arrays)
        self.ended, self.afresh = arrays.pop("ended").astype(bool), values["afresh"]
        snapshot.restore(self.env, values["env"], arrays)
        self.rng = snapshot.generator_from(values["rng"])


def _mask(info: dict[str, Any], rows: Array, before: Array | None = None) -> Array | None:
    """Allowed actions `[B, actions]` from a vector form's info: all where a copy gave no mask.

    Only `rows` choose an action next; the others are as `before`, else all allowed.
    """
    if "action_mask" in info:
        mask = np.array(info["action_mask"], bool)
        mask[~np.broadcast_to(info.get("_action_mask", True), len(mask))] = True
    elif before is not None:
        mask = np.ones_like(before)
    else:
        return None
    stuck = np.flatnonzero(rows & ~mask.any(-1))
    if stuck.size:
        raise RunFailed(f"copy {stuck[0]}: the environment's action_mask allows no action")
    mask[~rows] = True if before is None else before[~rows]
    return mask


def _close(env: Any) -> None:
    try:
        env.close()
    except Exception as e:
        warnings.warn(f"closing the environment: {e}", stacklevel=1)


def _row(batch: Any, b: int) -> Any:
    if isinstance(batch, dict):
        return {k: _row(v, b) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(v, b) for v in batch)
    return batch[b]


class Copies:
    """Copies of one environment stepped in turn. An ended copy is reset in its next row, which is not valid.

    Every episode has its own seed and its actions are remembered until it ends, so that a resumed run
    can execute the open episodes again, whatever the environment is written in.
    """

    def __init__(self, build: Callable[[], Any], copies: int, seeds: np.random.SeedSequence, failures: int) -> None:
        self.build, self.copies, self.max_restarts, self.restarts = build, copies, failures, 0
        self.envs = [build() for _ in range(copies)]
        first = self.envs[0]
        self.encoder, self.decoder = observations(first.observation_space), actions(first.action_space)
        self.shape, self.dtype, self.head = self.encoder.shape, self.encoder.dtype, self.decoder.head
        self.rngs = [np.random.Generator(np.random.PCG64(s)) for s in seeds.spawn(copies)]
        self.seeds, self.histories = [0] * copies, [[] for _ in range(copies)]  # type: ignore[var-annotated]
        self.obs = np.zeros((copies, *self.shape), self.dtype)
        self.ended = np.zeros(copies, bool)
        self.mask: Array | None = None
        self.failures: list[str] = []  # not yet reported

    def reset(self) -> tuple[Array, Array | None]:
        """Begin an episode in every copy."""
        for b in range(self.copies):
            try:
                self._begin(b)
            except Exception as e:
                self._failed(b, e)
        return self.obs.copy(), None if self.mask is None else self.mask.copy()

    def _begin(self, b: int) -> None:
        self.seeds[b], self.histories[b] = int(self.rngs[b].integers(2**31)), []
        result = self.envs[b].reset(seed=self.seeds[b])
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise ConfigError(f"env: {OLD_API.format('reset returned no info')}")
        self._see(b, *result)
        self.ended[b] = False

    def _see(self, b: int, obs: Any, info: dict[str, Any], ended: bool = False) -> None:
        self.obs[b] = self.encoder.encode(obs)  # copies: environments reuse their arrays
        if self.head.kind == "categorical" and (self.mask is not None or "action_mask" in info):
            if self.mask is None:
                self.mask = np.ones((self.copies, self.head.outputs), bool)
            self.mask[b] = np.asarray(info.get("action_mask", True), bool)
            if ended:  # nothing is chosen in a final state, and its mask may well be empty
                self.mask[b] = True
            elif not self.mask[b].any():
                raise RunFailed(f"copy {b}: the environment's action_mask allows no action")

    def step(self, action: Array) -> Step:
        """Step each copy, or reset it where its episode has ended; replace it where it raises."""
        n = self.copies
        reward = np.zeros(n, np.float32)
        terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
        valid, starts = ~self.ended, self.ended.copy()
        chosen = self.decoder.decode(action)
        for b in range(n):
            try:
                if self.ended[b]:
                    self._begin(b)
                else:
                    reward[b], terminated[b], truncated[b] = self._step(b, chosen[b])
            except Exception as e:
                self._failed(b, e)
                valid[b], starts[b], reward[b] = False, True, 0.0
                terminated[b] = truncated[b] = False
        self.ended = terminated | truncated
        mask = None if self.mask is None else self.mask.copy()
        failures, self.failures = tuple(self.failures), []
        return Step(self.obs.copy(), reward, terminated, truncated, valid, starts, None, mask, failures)

    def _step(self, b: int, action: Any) -> tuple[float, bool, bool]:
        if len(self.histories[b]) < HISTORY:
            self.histories[b].append(action)
        result = self.envs[b].step(action)
        if len(result) != 5:
            raise ConfigError(f"env: {OLD_API.format(f'step returned {len(result)} values')}")
        obs, reward, terminated, truncated, info = result
        self._see(b, obs, info, bool(terminated or truncated))
        return float(reward), bool(terminated), bool(truncated)

    def _failed(self, b: int, error: Exception) -> None:
        """Replace copy b; gives up when that has happened too often."""
        wrong = error if isinstance(error, ConfigError) else _old_api(error)
        if wrong is not None:
            raise wrong from None
        step, trace = len(self.histories[b]), "".join(traceback.format_exception(error))
        where = f"copy {b}, episode step {step}"
        self.restarts += 1
        if isinstance(error, RunFailed) or self.restarts > self.max_restarts:
            raise RunFailed(f"environment failed {self.restarts} times; last in {where}:\n{trace}") from error
        _close(self.envs[b])
        self.failures.append(f"{where}, copy made anew: {trace}")
        try:
            self.envs[b] = self.build()
            self._begin(b)
        except Exception as e:
            self._failed(b, e)

    def close(self) -> None:
        """Release what the copies hold."""
        for env in self.envs:
            _close(env)

    def replace(self, row: int) -> None:
        """Begin a new episode in one copy at its next step."""
        self.ended[row] = True

    def save(self) -> tuple[dict[str, Any], dict[str, Array]] | None:
        """Seeds and actions of the open episodes; None if one is too long to execute again."""
        if any(len(h) >= HISTORY for h in self.histories):
            return None
        arrays = {f"actions.{b}": np.array(h) for b, h in enumerate(self.histories) if h}
        arrays["ended"], arrays["obs"] = self.ended.copy(), self.obs.copy()
        return {"seeds": list(self.seeds), "rngs": [snapshot.generator_state(r) for r in self.rngs]}, arrays

    def restore(self, values: dict[str, Any], arrays: dict[str, Array]) -> None:
        """Execute the open episodes again.

        Raises:
            ValueError: the environment did not come back to the same observation.
        """
        try:
            for b, env in enumerate(self.envs):
                self.seeds[b] = values["seeds"][b]
                self._see(b, *env.reset(seed=self.seeds[b]))
                self.histories[b] = []
                for action in arrays.get(f"actions.{b}", ()):
                    self._step(b, action)
        except Exception as e:
            raise ValueError(f"the environment raised when its episode was executed again: {e}") from e
        if not np.array_equal(self.obs, arrays["obs"], equal_nan=True):
            raise ValueError("the environment is not deterministic: the same seed and actions led elsewhere")
        self.ended = arrays["ended"].astype(bool)
        self.rngs = [snapshot.generator_from(state) for state in values["rngs"]]
