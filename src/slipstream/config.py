"""A run as data: environment, algorithm, rule and limits; YAML in and out; every cross-check.

The hyper-parameters of an algorithm live beside it (`algos/NAME.py`); here they are one nested
dataclass whose type depends on `algorithm`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from slipstream.cores import usable_cores
from slipstream.errors import ConfigError, unknown

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Net:
    """The network: torso, core, heads."""

    torso: str = "auto"
    """`mlp`, `nature`, `a3c`, `impala` (convolutions), or `package.module.Torso`: a callable from observation shape
    to nn.Module with `out_features`. auto: nature for images, else mlp."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the MLP's layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the MLP."""
    core: Literal["none", "lstm", "attention"] = "none"
    """Memory between torso and heads; attention: over the LSTM's last outputs."""
    core_size: int = 64
    """Units of the core."""
    window: int = 16
    """`attention`: steps looked back to, this one included."""
    heads: int = 4
    """`attention`: heads."""
    critic: Literal["auto", "shared", "separate"] = "auto"
    """Whether the value has its own torso. auto: separate for a plain MLP, else shared."""
    log_std: float = 0.0
    """Initial log standard deviation of Gaussian actions, in units of half the action range."""


@dataclass(frozen=True)
class Limits:
    """When to give up, and how long to wait."""

    max_restarts: int = 5
    """Times a dead or hung worker is replaced before the run fails."""
    max_env_failures: int = 20
    """Times a worker replaces an environment copy that raised before it gives up."""
    max_nonfinite: int = 20
    """Gradients in a row that may be NaN or Inf in one worker before the run stops."""
    hang_seconds: float = 120.0
    """A worker without a heartbeat for so long is replaced."""
    lock_seconds: float = 5.0
    """A worker that holds the lock for so long is replaced."""
    max_seconds: float = 0.0
    """Stop after so many seconds of training; 0: never."""
    stop_seconds: float = 6.0
    """Time workers get to finish their rollout when the run stops."""


@dataclass(frozen=True)
class Watch:
    """What is written while the run goes on."""

    every: float = 1.0
    """Seconds between lines of metrics.jsonl and TensorBoard."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    histograms_every: float = 30.0
    """Seconds between weight and gradient histograms; 0: none."""
    checkpoint_every: float = 60.0
    """Seconds between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 3
    """Checkpoints kept."""


@dataclass(frozen=True)
class Rule:
    """What is done with gradients, stale ones above all; on the command line also `--update.NAME`."""

    quorum: int = 1
    """`server`: gradients averaged into an update (fewer where fewer workers can send one)."""
    max_staleness: int | None = None
    """`server`: rollouts by which a worker may be ahead of the slowest before it waits; none: any number."""
    stale: Literal["accept", "scale", "drop"] = "accept"
    """`server`: what becomes of a gradient older than the version it would be averaged into; scale: weighs
    1/(1 + staleness)."""
    pipeline: int = 1
    """`server`: gradients a worker may have sent that are not applied; 1: it waits for each."""
    staleness_scaling: bool = False
    """Divide the step by 1 + staleness (Zhang et al. 2015, arXiv 1511.05950)."""
    delay_compensation: Literal["none", "constant", "adaptive"] = "none"
    """Correct a stale gradient by its first-order change since (DC-ASGD, Zheng et al. 2017, arXiv 1609.08326)."""
    delay_lambda: float = 0.04
    """lambda (constant) or lambda_0 (adaptive) of the delay compensation."""
    delay_momentum: float = 0.95
    """m of the adaptive delay compensation's mean square."""


@dataclass(frozen=True)
class Run:
    """Everything that determines a run."""

    env: str = "CartPole-v1"
    """Gymnasium id, or `module:Id` to import the module that registers it."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    algorithm: str = "a3c"
    """Name of a file in algos/."""
    update: str = "lock"
    """How gradients become a new version: a file in rules/ (`lock`, `hogwild`, `sync`, `server`)."""
    compress: str = "none"
    """`server`: how gradients are compressed: a file in compress/ with its options, as in `topk:0.01`."""
    workers: int | Literal["auto"] = 0
    """Worker processes; 0: one for each usable core; auto: measure for a few seconds and pick."""
    copies: int = 8
    """Environment copies stepped inside each worker."""
    backend: Literal["process", "thread"] = "process"
    """Run workers as processes or as threads of this one."""
    seed: int = 0
    """Seed from which every other seed is derived."""
    total_steps: int = 1_000_000
    """Environment steps, all workers together."""
    target_return: float | None = None
    """Stop when the mean return of the last `target_window` episodes reaches this."""
    target_window: int = 100
    """Episodes in that mean."""
    normalize_observations: bool = False
    """Subtract the running mean and divide by the running standard deviation."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    record: bool = True
    """Write schedule.bin, from which the run can be executed again bit for bit."""
    check_reads: bool = False
    """Verify a checksum of the weights at every read."""
    net: Net = Net()
    """The network."""
    algo: Any = None
    """Hyper-parameters of the algorithm."""
    rule: Rule = Rule()
    """What is done with gradients, stale ones above all."""
    limits: Limits = Limits()
    """When to give up."""
    watch: Watch = Watch()
    """What is written while the run goes on."""

    @property
    def worker_count(self) -> int:
        """`workers` of a checked run, whose `auto` has been measured."""
        return int(self.workers)


@dataclass
class Given:
    """Things that cannot be written in YAML, given in Python: they override the run's names."""

    env: Callable[..., Any] | None = None
    torso: Callable[..., Any] | None = None


def names(room: str) -> list[str]:
    """Names in a room (`algos`, `rules`): its files. No registry to edit."""
    return sorted(f.stem for f in (HERE / room).glob("*.py") if not f.stem.startswith("_"))


def module(room: str, name: str) -> types.ModuleType:
    """The file `name` of a room.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in names(room):
        raise unknown({"algos": "algorithm", "rules": "update"}.get(room, room), name, names(room))
    return importlib.import_module(f"slipstream.{room}.{name}")


def hyperparameters(algorithm: str) -> type:
    """The dataclass of hyper-parameters of an algorithm."""
    if algorithm not in names("algos"):
        raise unknown("algorithm", algorithm, names("algos"))
    found = importlib.import_module(f"slipstream.algos.{algorithm}")
    return typing.cast(type, found.Hyperparameters)


def run_type(algorithm: str) -> type:
    """`Run` with `algo` typed as the hyper-parameters of `algorithm`, for the command line."""
    hyper = hyperparameters(algorithm)
    fields = [(f.name, hyper if f.name == "algo" else f.type, _default(f, hyper)) for f in dataclasses.fields(Run)]
    made = dataclasses.make_dataclass("Run", fields, bases=(Run,), frozen=True)
    made.__doc__ = Run.__doc__
    return made


def _default(f: dataclasses.Field[Any], hyper: type) -> Any:
    if f.name == "algo":
        return field(default_factory=hyper)
    if f.default_factory is not dataclasses.MISSING:
        return field(default_factory=f.default_factory)
    return field(default=f.default)


def from_dict(values: dict[str, Any], base: Run | None = None) -> Run:
    """A run from nested plain values laid over `base` (default: the defaults).

    Raises:
        ConfigError: an unknown key (with the nearest valid one) or a value of the wrong type.
    """
    base = base or Run()
    algorithm = _coerce(values.get("algorithm", base.algorithm), str, "algorithm")
    hyper = hyperparameters(algorithm)
    algo = base.algo if isinstance(base.algo, hyper) else hyper()
    return typing.cast(Run, _overlay(dataclasses.replace(base, algo=algo), values, ""))


def _overlay(base: Any, values: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    for raw_key, value in values.items():
        key = str(raw_key).replace("-", "_")
        if key not in hints:
            raise unknown(f"option {where or 'of the run'}".strip(), f"{where}{raw_key}", _paths(base, where))
        current = getattr(base, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{key}: needs a mapping of options, got {value!r}")
            changes[key] = _overlay(current, value, f"{where}{key}.")
        else:
            changes[key] = _coerce(value, hints[key], f"{where}{key}")
    return dataclasses.replace(base, **changes)


def _paths(base: Any, where: str) -> list[str]:
    return [f"{where}{f.name}" for f in dataclasses.fields(base)]


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`, or an error that names the field, the value and what is allowed."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if value not in args:
            raise unknown(where, str(value), [str(a) for a in args])
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        choices = [a for a in args if a is not type(None)]
        for choice in choices[:-1]:
            try:
                return _coerce(value, choice, where)
            except ConfigError:
                pass
        return _coerce(value, choices[-1], where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_coerce(v, args[0], where) for v in value)
    if (hint is dict or origin is dict) and isinstance(value, dict):
        return dict(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0:
        return int(value)
    if hint is float and not isinstance(value, bool):
        try:  # YAML reads 1e-3 as text
            return float(value)
        except (TypeError, ValueError):
            pass
    if hint is str and isinstance(value, str):
        return value
    raise ConfigError(f"{where}: {value!r} is not {getattr(hint, '__name__', hint)}")


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"algo.gamma": 0.9}` or `{"algo": {"gamma": 0.9}}` -> the latter."""
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {parent} is given as {place!r} too; it is a group of options")
        if isinstance(value, dict) and isinstance(place.get(leaf), dict):
            place[leaf].update(nested(value))
        else:
            place[leaf] = nested(value) if isinstance(value, dict) and leaf != "env_kwargs" else value
    return out


def to_dict(run: Run) -> dict[str, Any]:
    """Plain nested values, as YAML and JSON hold them."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return typing.cast(dict[str, Any], plain(dataclasses.asdict(run)))


def save(run: Run, path: Path) -> None:
    """Write the whole configuration as YAML; `load` gives it back equal."""
    path.write_text(yaml.safe_dump(to_dict(run), sort_keys=False))


def load(path: str | Path) -> Run:
    """Read a configuration.

    Raises:
        ConfigError: no such file, not YAML, or an unknown or wrong option.
    """
    return from_dict(read_yaml(path))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file that holds a mapping."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not YAML ({str(e).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds no options")
    return values


def preset(env: str, algorithm: str | None = None) -> dict[str, Any]:
    """Options known to work for an environment id (also `module:Id`) and an algorithm, or none.

    Under the name of another algorithm than its own, a preset says what is different for that. Where it says
    nothing of an algorithm, its hyper-parameters are not for it and are left out.
    """
    options = copy.deepcopy(_presets().get(env.split(":")[-1]))
    if options is None:
        return {} if algorithm is None else {"algorithm": algorithm}
    others = {name: options.pop(name) for name in names("algos") if name in options}
    if algorithm is None or algorithm == options.get("algorithm", Run.algorithm):
        return options
    options.pop("algo", None)
    return {**options, **others.get(algorithm, {}), "algorithm": algorithm}


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    """What each id has in presets/."""
    files = sorted((HERE / "presets").glob("*.yaml"))
    return {name: options for file in files for ids, options in read_yaml(file).items() for name in str(ids).split()}


def differences(old: Run, new: Run) -> list[str]:
    """Every option that differs, as `name: old -> new`."""
    a, b = _flat(to_dict(old)), _flat(to_dict(new))
    return [f"{k}: {a.get(k)} -> {b.get(k)}" for k in b if a.get(k) != b.get(k)]


def _flat(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "env_kwargs":
            out.update(_flat(value, f"{where}{key}."))
        else:
            out[where + key] = value
    return out


SERVER_ONLY = ("quorum", "max_staleness", "stale", "pipeline")


def _check_rule(run: Run, workers: int | str) -> None:
    """Options of the update rule: in range, and meant for the rule chosen."""
    r = run.rule
    for name, low in [("quorum", 1), ("pipeline", 1), ("max_staleness", 0)]:
        value = getattr(r, name)
        if value is not None and value < low:
            raise ConfigError(f"rule.{name}: {value} is too small, the least is {low}")
    if not r.delay_lambda >= 0:
        raise ConfigError(f"rule.delay_lambda: {r.delay_lambda} is negative")
    if not 0 <= r.delay_momentum < 1:
        raise ConfigError(f"rule.delay_momentum: {r.delay_momentum} is not between 0 and 1")
    if workers != "auto" and run.update == "server" and r.quorum > int(workers):
        raise ConfigError(f"rule.quorum: {r.quorum} is more than the {workers} workers")
    if run.update != "server":
        for name in SERVER_ONLY:
            if getattr(r, name) != getattr(Rule(), name):
                raise ConfigError(
                    f"rule.{name}: {getattr(r, name)} is an option of update: server, not of {run.update!r}"
                )
        if run.compress != "none":
            raise ConfigError(
                f"compress: {run.compress!r} needs update: server; under {run.update!r} gradients are not sent anywhere"
            )
    from slipstream import compress

    compress.check(run.compress)


def check(run: Run) -> Run:
    """Every cross-check in one place; returns the run with `workers` filled in.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """
    if run.update not in names("rules"):  # not imported here: rules need torch
        raise unknown("update", run.update, names("rules"))
    hyperparameters(run.algorithm)
    for name, low in [("copies", 1), ("total_steps", 0), ("target_window", 1), ("seed", 0), ("workers", 0)]:
        if getattr(run, name) != "auto" and getattr(run, name) < low:
            raise ConfigError(f"{name}: {getattr(run, name)} is too small, the least is {low}")
    for name, value in [*vars(run.limits).items(), *vars(run.watch).items()]:
        if not value >= 0:
            raise ConfigError(f"{name}: {value} is negative")
    if any(h < 1 for h in run.net.hidden):
        raise ConfigError(f"net.hidden: {run.net.hidden} has a layer without units")
    if run.net.core_size < 1:
        raise ConfigError(f"net.core_size: {run.net.core_size} is too small, the least is 1")
    for name in ("window", "heads"):
        if getattr(run.net, name) < 1:
            raise ConfigError(f"net.{name}: {getattr(run.net, name)} is too small, the least is 1")
    if run.net.critic == "separate" and (run.net.core != "none" or run.net.torso not in ("auto", "mlp")):
        raise ConfigError("net.critic: separate is for a plain MLP; with a core or your own torso use shared")
    workers = run.workers or usable_cores()
    if workers != "auto" and workers > 1024:
        raise ConfigError(f"workers: {workers} is too many, the most is 1024")
    run.algo.check()
    _check_rule(run, workers)
    if run.update == "hogwild" and run.check_reads:
        raise ConfigError(
            "check_reads: true contradicts update: hogwild, whose reads may mix versions by design "
            "(its metrics count overlapped reads); use update: lock"
        )
    return dataclasses.replace(run, workers=workers)
