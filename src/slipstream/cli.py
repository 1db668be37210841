"""The `slipstream` command: parses, calls the API, prints."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from slipstream import __version__, config
from slipstream.errors import ConfigError, Interrupted, SlipstreamError, nearest
from slipstream.launch import Launcher

USAGE = """slipstream: asynchronous deep reinforcement learning

  slipstream train ENV [options]    train a policy (ENV: a Gymnasium id, or module:Id)
  slipstream resume RUN [options]   go on with a run from its newest checkpoint
  slipstream eval RUN               measure a trained policy
  slipstream replay RUN             execute a recorded run again, bit for bit
  slipstream envs [WORD]            environments installed here
  slipstream algos                  algorithms and update rules
  slipstream doctor                 what works on this machine, and what an extra would add

Each takes --help, and --json for one JSON object on standard output.
"""


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


def run(arguments: list[str], launcher: Launcher | None = None) -> int:
    """Carry out a command; returns the exit code. Errors meant for the user are one message, no traceback."""
    try:
        return _dispatch(arguments, launcher)
    except SlipstreamError as e:
        print(f"slipstream: {e}", file=sys.stderr)
        return 143 if isinstance(e, Interrupted) and str(e).startswith("stopped by SIGTERM") else e.exit_code
    except KeyboardInterrupt as e:
        return 143 if "SIGTERM" in e.args else 130
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as e:  # what a user can mend; anything else is a fault of ours and keeps its traceback
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"slipstream: {e.strerror}" + (f": {e.filename}" if e.filename else ""), file=sys.stderr)
        return 1
    finally:
        if launcher is not None:
            launcher.close()


def _dispatch(arguments: list[str], launcher: Launcher | None) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("train", "resume"):
        return (_train if name == "train" else _resume)(rest, launcher)
    if name not in COMMANDS:
        close = nearest(name, [*COMMANDS, "train", "resume"])
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"no command {name!r}.{hint} `slipstream --help` lists them")
    return COMMANDS[name](rest)


# -- train and resume ------------------------------------------------------------------------------


def _parse(options: config.Run, arguments: list[str], prog: str) -> Any:
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


def _flags(cls: type, where: str = "") -> set[str]:
    """Every boolean option, by its name on the command line."""
    found: set[str] = {"--json"} if not where else set()
    for f in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls)[f.name]
        if hint is bool:
            found.add(f"--{where}{f.name}".replace("_", "-"))
        elif dataclasses.is_dataclass(hint):
            found |= _flags(typing.cast(type, hint), f"{where}{f.name}.")
        elif f.name == "algo" and not where:
            for algorithm in config.names("algos"):
                found |= _flags(config.hyperparameters(algorithm), "algo.")
    return found


def _plain_flags(arguments: list[str]) -> list[str]:
    """`--record false` as `--no-record`: a flag with a value means what it says."""
    flags, out, i = _flags(config.Run), [], 0
    while i < len(arguments):
        name, _, value = arguments[i].partition("=")
        plain = name.replace("_", "-")
        if plain in flags:
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
    if file is None and env is not None:
        values = config.preset(env)
    algorithm = _value_of(arguments, "--algorithm", "--algo")
    if algorithm is not None:
        if file is None and algorithm != values.get("algorithm", config.Run.algorithm):
            values.pop("algo", None)  # a preset's hyper-parameters are of its own algorithm
        values["algorithm"] = algorithm
    if env is not None:
        values["env"] = env
    return config.from_dict(values)


def _train(arguments: list[str], launcher: Launcher | None) -> int:
    from slipstream.train import train

    arguments = ["--algorithm" if a == "--algo" else _rule_option(a) for a in arguments]
    if arguments and arguments[0].startswith("-") and not {"-h", "--help", "--config"} & set(arguments):
        arguments = _env_first(arguments)
    elif not arguments:
        raise ConfigError("train: which environment? Such as: slipstream train CartPole-v1")
    parsed = _parse(_base(arguments), arguments, "slipstream train")
    options = config.Run(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(config.Run)})
    show = "json" if parsed.json else parsed.show
    result = train(options=options, run=parsed.run, show=show, launcher=launcher)
    return _finished(result, parsed.json)


def _rule_option(argument: str) -> str:
    """`--update.quorum` is written where the rule is chosen; its options are those of `rule`."""
    return f"--rule.{argument[9:]}" if argument.startswith("--update.") else argument


def _env_first(arguments: list[str]) -> list[str]:
    """Move the environment's id, given after options, to the front, where the preset is looked up."""
    flags = _flags(config.Run)
    i = 0
    while i < len(arguments):
        a = arguments[i]
        if not a.startswith("-"):
            return [a, *arguments[:i], *arguments[i + 1 :]]
        alone = "=" in a or a in flags or any(part.startswith("no-") for part in a[2:].split("."))
        i += 1 if alone else 2
    raise ConfigError("train: which environment? Such as: slipstream train CartPole-v1")


def _resume(arguments: list[str], launcher: Launcher | None) -> int:
    from slipstream.train import resume

    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            print("usage: slipstream resume RUN [any option of `slipstream train`]")
            return 0
        raise ConfigError("resume: which run? Such as: slipstream resume runs/CartPole-v1-a3c-…")
    directory = Path(arguments[0])
    if not (directory / "config.yaml").exists():
        raise ConfigError(f"{directory}: no run there{_near_run(directory)}")
    old = config.load(directory / "config.yaml")
    parsed = _parse(old, [old.env, *map(_rule_option, arguments[1:])], "slipstream resume RUN")
    changed: dict[str, Any] = {
        f.name: dataclasses.asdict(v) if dataclasses.is_dataclass(v := getattr(parsed, f.name)) else v  # type: ignore[arg-type]
        for f in dataclasses.fields(config.Run)
    }
    show = "json" if parsed.json else parsed.show
    return _finished(resume(directory, show=show, launcher=launcher, **changed), parsed.json)


def _near_run(directory: Path) -> str:
    room = directory.parent if directory.parent.is_dir() else Path("runs")
    there = [str(p) for p in room.iterdir() if (p / "config.yaml").exists()] if room.is_dir() else []
    close = nearest(str(directory), there)
    return f". Did you mean {close[0]}?" if close else ""


def _finished(result: Any, as_json: bool) -> int:
    s = result.summary
    if as_json:
        print(json.dumps(s))
        return 0
    over = f" ({s['steps'] - s['steps_asked']:,} over the budget: rollouts are finished)"
    print(
        f"\n{s['steps']:,} steps{over if s['steps'] > s['steps_asked'] else ''}, {s['updates']:,} updates in "
        f"{s['seconds']:.1f} s: {s['steps_per_second']:,.0f} steps/s; peak memory {s['peak_memory_mib']:.0f} MiB"
    )
    if s["solved_at"] is not None:
        print(
            f"solved: mean return {s['mean_return']:.1f} over {s['episodes_in_mean']} episodes at step "
            f"{s['solved_at']:,}, {s['seconds_to_solved']:.1f} s after the start"
        )
    elif s["episodes"]:
        print(f"mean return of the last {s['episodes_in_mean']} episodes: {s['mean_return']:.1f}")
    else:
        print("no episode has ended yet")
    lapped = s.get("reads_overlapped_share")
    torn = "" if lapped is None else f"; at most {100 * lapped:.2f} % of reads were torn (hogwild)"
    print(
        f"staleness: mean {s['staleness_mean']:.2f}, 99 % within {s['staleness_p99']:.0f}; waiting "
        f"{100 * s['wait_share']:.1f} % of the workers' time{torn}"
    )
    d = s["run"]
    again = f"  slipstream replay {d}\n" if (Path(d) / "schedule.bin").exists() else ""
    print(f"\nrun: {d}\nnext:\n  slipstream eval {d}\n{again}  tensorboard --logdir {d}")
    return 0


# -- the other commands ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Eval:
    """Measure a run's newest policy on environments of its own."""

    run: tyro.conf.Positional[str]
    """A run directory, or a checkpoint in it."""
    episodes: int = 100
    """Whole episodes to play."""
    sample: bool = False
    """Sample actions instead of taking the most likely one."""
    copies: int = 16
    """Environment copies."""
    seed: int | None = None
    """Seed of the episodes; default: the run's."""
    json: bool = False
    """Print one JSON object."""


def _eval(arguments: list[str]) -> int:
    a = tyro.cli(Eval, args=arguments, prog="slipstream eval")
    from slipstream.evaluate import evaluate

    e = evaluate(a.run, a.episodes, deterministic=not a.sample, copies=a.copies, seed=a.seed)
    if a.json:
        print(json.dumps(e.to_dict()))
        return 0
    how = "most likely actions" if e.deterministic else "sampled actions"
    print(f"{e.episodes} episodes, {how}, checkpoint {e.checkpoint} ({e.steps:,} steps)")
    print(f"return  mean {e.mean:.2f}  std {e.std:.2f}  min {e.minimum:.2f}  max {e.maximum:.2f}")
    print(f"IQM     {e.iqm:.2f}  (95 % bootstrap interval {e.iqm_low:.2f} to {e.iqm_high:.2f})")
    print(f"length  mean {e.length:.1f}")
    if e.cut:
        print(f"{e.cut} episodes did not end within the limit of steps and count as they stood")
    return 0


@dataclass(frozen=True)
class ReplayOptions:
    """Execute a recorded run again, one worker after another, and verify every loss and checksum."""

    run: tyro.conf.Positional[str]
    """A run directory."""
    until_update: int | None = None
    """Stop after this version."""
    json: bool = False
    """Print one JSON object."""


def _replay(arguments: list[str]) -> int:
    a = tyro.cli(ReplayOptions, args=arguments, prog="slipstream replay")
    from slipstream.replay_run import replay

    r = replay(a.run, until_update=a.until_update)
    if a.json:
        print(json.dumps(r.to_dict()))
        return 0
    print(
        f"identical: {r.contributions:,} contributions of {r.workers} workers made {r.updates:,} updates; each loss "
        f"and gradient norm, {r.checksums:,} checksums of the weights"
        f"{' and the final checkpoint' if r.compared_with_checkpoint else ''} were the same, bit for bit"
    )
    print(f"{r.steps:,} steps in {r.seconds:.1f} s; weights {r.final_checksum:016x}")
    return 0


@dataclass(frozen=True)
class Envs:
    """Environments installed here; a word narrows the list."""

    word: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="WORD")] = ""
    json: bool = False
    """Print one JSON object."""


def _envs(arguments: list[str]) -> int:
    a = tyro.cli(Envs, args=arguments, prog="slipstream envs")
    from slipstream.doctor import environments

    found = [e for e in environments() if a.word.lower() in e["id"].lower()]
    if a.json:
        print(json.dumps({"environments": found}))
        return 0
    for e in found:
        marks = ", ".join(w for w in ("preset" if e["preset"] else "", "vector form" if e["vector"] else "") if w)
        note = e["needs"] or marks
        print(f"{e['id']:<36} {note}".rstrip())
    if not found:
        print(f"no environment has {a.word!r} in its id")
    return 0


@dataclass(frozen=True)
class JsonOnly:
    """No options but --json."""

    json: bool = False
    """Print one JSON object."""


def _algos(arguments: list[str]) -> int:
    a = tyro.cli(JsonOnly, args=arguments, prog="slipstream algos", description="Algorithms and update rules.")
    from slipstream.doctor import catalogue

    found = catalogue()
    if a.json:
        print(json.dumps(found))
        return 0
    for title, rows in (
        ("algorithms (--algorithm)", found["algorithms"]),
        ("update rules (--update)", found["rules"]),
    ):
        print(title)
        for name, text in rows.items():
            print(f"  {name:<10} {text}")
    return 0


def _doctor(arguments: list[str]) -> int:
    a = tyro.cli(JsonOnly, args=arguments, prog="slipstream doctor", description="What works on this machine.")
    from slipstream.doctor import examine

    checks = examine()
    if a.json:
        print(json.dumps({"ok": all(c["ok"] for c in checks if c["needed"]), "checks": checks}))
    else:
        for c in checks:
            mark = "ok  " if c["ok"] else "FAIL" if c["needed"] else "-   "
            print(f"{mark} {c['name']:<22} {c['text']}")
    return 0 if all(c["ok"] for c in checks if c["needed"]) else 1


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "eval": _eval,
    "replay": _replay,
    "envs": _envs,
    "algos": _algos,
    "doctor": _doctor,
}
