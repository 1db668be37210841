"""The `slipstream` command: parses, calls the API, prints."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from slipstream import __version__, config
from slipstream.errors import ConfigError, Interrupted, SlipstreamError, nearest
from slipstream.launch import Launcher
from slipstream.options import parse, rule_option, train_options

USAGE = """slipstream: asynchronous deep reinforcement learning

  slipstream train ENV [options]    train a policy (ENV: a Gymnasium id, or module:Id)
  slipstream resume RUN [options]   go on with a run from its newest checkpoint
  slipstream eval RUN               measure a trained policy
  slipstream watch RUN              a video of a trained policy at play, or a window
  slipstream replay RUN             execute a recorded run again, bit for bit
  slipstream compare ENV            algorithms and update rules against each other: speed, cost, staleness
  slipstream tune-workers ENV       how many workers and environment copies: measured here
  slipstream envs [WORD]            environments installed here
  slipstream algos                  algorithms and update rules
  slipstream doctor                 what works on this machine, and what an extra would add

Each takes --help, and --json for one JSON object on standard output.
"""


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


def _train(arguments: list[str], launcher: Launcher | None) -> int:
    from slipstream.train import train

    options, parsed = train_options(arguments)
    show = "json" if parsed.json else parsed.show
    result = train(options=options, run=parsed.run, show=show, launcher=launcher)
    return _finished(result, parsed.json)


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
    parsed = parse(old, [old.env, *map(rule_option, arguments[1:])], "slipstream resume RUN")
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
class Watch:
    """Write a video of episodes played by a run's newest policy, or show them in a window."""

    run: tyro.conf.Positional[str]
    """A run directory, or a checkpoint in it."""
    episodes: int = 3
    """Whole episodes to play."""
    out: str | None = None
    """File, .mp4 or .gif; default: videos/<env>-step<steps>.mp4 in the run directory."""
    fps: float | None = None
    """Frames a second; default: what the environment asks for, else 30. A GIF has at most 50."""
    seed: int | None = None
    """Seed of the episodes; default: the run's."""
    stochastic: Annotated[bool, tyro.conf.arg(aliases=["--sample"])] = False
    """Sample actions instead of taking the most likely one."""
    max_steps: int = 100_000
    """Cut an episode after so many."""
    live: bool = False
    """Show a window instead of writing a file."""
    json: bool = False
    """Print one JSON object."""


def _watch(arguments: list[str]) -> int:
    a = tyro.cli(Watch, args=arguments, prog="slipstream watch")
    from slipstream.video import record_video

    v = record_video(
        a.run, a.episodes, out=a.out, fps=a.fps, deterministic=not a.stochastic, seed=a.seed,
        max_steps=a.max_steps, live=a.live,
    )  # fmt: skip
    if a.json:
        print(json.dumps(v.to_dict()))
        return 0
    how = "most likely actions" if v.deterministic else "sampled actions"
    print(f"{v.episodes} episodes, {how}, checkpoint {v.checkpoint} ({v.steps:,} steps)")
    for i, (total, length) in enumerate(zip(v.returns, v.lengths, strict=True)):
        print(f"episode {i + 1}  return {total:.2f}  length {length}")
    if v.cut:
        print(f"{v.cut} episodes did not end within the limit of steps")
    if v.file:
        print(f"{v.frames:,} frames, {v.fps:g} a second: {v.file}")
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


def _compare(arguments: list[str]) -> int:
    from slipstream import compare

    options = compare.parse(arguments)
    tell = sys.stderr if options.json else sys.stdout
    result = compare.compare(options, lambda line: print(line, file=tell, flush=True), lambda a: train_options(a)[0])
    if options.json:
        print(json.dumps(result.to_dict()))
    return 0


def _tune_workers(arguments: list[str]) -> int:
    from slipstream import tune
    from slipstream.train import train

    options, rest = tune.parse(arguments)
    tell = (lambda line: None) if options.json else (lambda line: print(line, flush=True))
    found = tune.command(options, train, config.check(train_options(rest)[0]), tell)
    if options.json:
        print(json.dumps(found))
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
    "watch": _watch,
    "replay": _replay,
    "compare": _compare,
    "tune-workers": _tune_workers,
    "envs": _envs,
    "algos": _algos,
    "doctor": _doctor,
}
