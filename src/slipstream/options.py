"""The options of a training on the command line, by tyro over the dataclasses of config.py."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
import yaml

from slipstream import config
from slipstream.errors import ConfigError


def _yaml_mapping() -> Any:
    def parse(texts: list[str]) -> dict[str, Any]:
        value = yaml.safe_load(texts[0])
        if not isinstance(value, dict):
            raise ValueError("a YAML mapping is needed, such as '{gravity: -5.0}'")
        return value

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar="YAML", instance_from_str=parse, is_instance=lambda x: isinstance(x, dict),
        str_from_instance=lambda x: [json.dumps(x)],
    )  # fmt: skip


Mapping = Annotated[dict[str, Any], _yaml_mapping()]


def parse(options: config.Run, arguments: list[str], prog: str) -> Any:
    """`arguments` over `options`, by tyro: errors name the nearest options and exit with code 2."""
    hyper = type(options.algo)
    cls = _options_class(hyper)
    defaults = {f.name: getattr(options, f.name) for f in dataclasses.fields(config.Run)}
    default = cls(**defaults, run=None, config=None, show="auto", json=False)
    return tyro.cli(cls, default=default, args=_plain_flags(arguments), prog=prog, description=config.Run.__doc__)


def _options_class(hyper: type) -> type:
    """The command line of a run whose algorithm has the hyper-parameters `hyper`."""

    class Options(config.Run):  # the strings under config.Run's fields are found through it
        """Train a policy. Nested options are written with a dot: --algo.learning-rate 1e-3."""

    hints = typing.get_type_hints(config.Run)
    Options.__annotations__ = {
        **hints, "env": tyro.conf.Positional[str], "env_kwargs": Mapping, "algo": hyper,
        "run": Annotated[str | None, tyro.conf.arg(help="Its directory; default runs/<env>-<algorithm>-<time>.")],
        "config": Annotated[str | None, tyro.conf.arg(help="YAML file of options; options given here go over it.")],
        "show": Annotated[
            typing.Literal["auto", "plain", "none"], tyro.conf.arg(help="Live view, plain lines, or nothing.")
        ],
        "json": Annotated[bool, tyro.conf.arg(help="Print one JSON object on standard output and nothing else there.")],
    }  # fmt: skip
    for f in dataclasses.fields(config.Run):
        missing = f.default is dataclasses.MISSING
        setattr(Options, f.name, dataclasses.field(default_factory=f.default_factory) if missing else f.default)  # type: ignore[arg-type]
    for name, value in (("run", None), ("config", None), ("show", "auto"), ("json", False)):
        setattr(Options, name, value)
    return dataclass(frozen=True)(Options)


def flags(cls: type, where: str = "") -> set[str]:
    """Every boolean option, by its name on the command line."""
    found: set[str] = {"--json"} if not where else set()
    for f in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls)[f.name]
        if hint is bool:
            found.add(f"--{where}{f.name}".replace("_", "-"))
        elif dataclasses.is_dataclass(hint):
            found |= flags(typing.cast(type, hint), f"{where}{f.name}.")
        elif f.name == "algo" and not where:
            for algorithm in config.names("algos"):
                found |= flags(config.hyperparameters(algorithm), "algo.")
    return found


def _plain_flags(arguments: list[str]) -> list[str]:
    """`--record false` as `--no-record`: a flag with a value means what it says."""
    known, out, i = flags(config.Run), [], 0
    while i < len(arguments):
        name, _, value = arguments[i].partition("=")
        plain = name.replace("_", "-")
        if plain in known:
            following = arguments[i + 1] if i + 1 < len(arguments) and not value else value
            word = following.lower()
            if word in ("true", "yes", "on", "1", "false", "no", "off", "0"):
                *parents, leaf = plain[2:].split(".")
                off = ".".join([*parents, f"no-{leaf}"])
                out.append(plain if word in ("true", "yes", "on", "1") else f"--{off}")
                i += 1 if value else 2
                continue
            if value or (following and not following.startswith("-")):
                raise ConfigError(f"{plain}: {following!r} is neither true nor false")
        out.append(arguments[i])
        i += 1
    return out


def _value_of(arguments: list[str], *names: str) -> str | None:
    for i, a in enumerate(arguments):
        for name in names:
            if a == name and i + 1 < len(arguments):
                return arguments[i + 1]
            if a.startswith(name + "="):
                return a.partition("=")[2]
    return None


def _base(arguments: list[str]) -> config.Run:
    """What options are laid over: the file named by --config, else the preset of the environment."""
    values: dict[str, Any] = {}
    file = _value_of(arguments, "--config")
    if file is not None:
        values = config.read_yaml(file)
    env = next((a for a in arguments[:1] if not a.startswith("-")), None) or values.get("env")
    if file is None and env is None:
        env = next((a for a in arguments if config.preset(a)), None)
    algorithm = _value_of(arguments, "--algorithm", "--algo")
    if file is None and env is not None:
        values = config.preset(env, algorithm)
    elif algorithm is not None:
        values["algorithm"] = algorithm
    if env is not None:
        values["env"] = env
    return config.from_dict(values)


def train_options(arguments: list[str]) -> tuple[config.Run, Any]:
    """The run that `slipstream train` is asked for, and all options: also where and how to show it."""
    arguments = ["--algorithm" if a == "--algo" else rule_option(a) for a in arguments]
    if arguments and arguments[0].startswith("-") and not {"-h", "--help", "--config"} & set(arguments):
        arguments = _env_first(arguments)
    elif not arguments:
        raise ConfigError("train: which environment? Such as: slipstream train CartPole-v1")
    parsed = parse(_base(arguments), arguments, "slipstream train")
    return config.Run(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(config.Run)}), parsed


def rule_option(argument: str) -> str:
    """`--update.quorum` is written where the rule is chosen; its options are those of `rule`."""
    return f"--rule.{argument[9:]}" if argument.startswith("--update.") else argument


def _env_first(arguments: list[str]) -> list[str]:
    """Move the environment's id, given after options, to the front, where the preset is looked up."""
    known = flags(config.Run)
    i = 0
    while i < len(arguments):
        a = arguments[i]
        if not a.startswith("-"):
            return [a, *arguments[:i], *arguments[i + 1 :]]
        alone = "=" in a or a in known or any(part.startswith("no-") for part in a[2:].split("."))
        i += 1 if alone else 2
    raise ConfigError("train: which environment? Such as: slipstream train CartPole-v1")
