"""`slipstream compare ENV`: the same task under a grid of algorithms and update rules, one run after another.

Each run is a fresh process of `slipstream train` (compare_run.py). The order goes seed by seed over the cells of the
grid, so a slow minute of the machine hits all of them. A finished run leaves `compare.json` in its directory; a
comparison that was killed goes on with the runs that lack one. What came of it is put together by compare_report.py.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from slipstream import compare_report, compress, config
from slipstream.checkpoint import write_file
from slipstream.compare_run import collect, execute, machine, read_json
from slipstream.compare_statistics import Comparison, Measured, require
from slipstream.errors import ConfigError, Interrupted, unknown

SYNCHRONOUS = ("a2c", "ppo")
GRID = (
    "a2c (a3c under sync) and ppo run under sync alone, as the synchronous baselines; other algorithms under each of "
    "--updates; compressions other than none under server alone, where gradients are sent"
)
Resolve = Callable[[list[str]], config.Run]


@dataclass(frozen=True)
class Options:
    """Run a grid of algorithms and update rules on one environment, one run after another, and tabulate the cost.

    Options after `--` go to every `slipstream train`. The same command again, or `--out DIR` alone, goes on with a
    comparison that was stopped.
    """

    env: tyro.conf.Positional[str] = ""
    """Gymnasium id, or `module:Id`; may be left out where --out holds a comparison."""
    algos: str = "a2c,ppo,a3c"
    """Algorithms. a2c (a3c under the rule sync) and ppo run under sync alone, others under each of --updates."""
    updates: str = "lock,hogwild,server"
    """Update rules; options are joined by +, as in server:quorum=2+max_staleness=4."""
    compress: str = "none"
    """Gradient compressions for the rule server, such as none,topk:0.01,topk:0.01+qsgd:8 (two entries with topk)."""
    seeds: int = 5
    """Seeds of each cell: 0, 1, 2 ..."""
    target: float | None = None
    """Mean return to reach; default: the one of the environment's preset."""
    total_steps: int | None = None
    """Environment steps after which a run has not reached the target; default: the preset's."""
    workers: int | None = None
    """Worker processes of each run; default: one for each usable core."""
    train: str = ""
    """Further options of `slipstream train` for every run, in one string; or put them after `--`."""
    out: str | None = None
    """Directory of the comparison; default: runs/compare-<env>-<mark of the options>."""
    json: bool = False
    """Print one JSON object on standard output; what is told meanwhile goes to standard error."""


def parse(arguments: list[str]) -> Options:
    """Options from a command line; what follows `--` is passed to every training."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = tyro.cli(Options, args=arguments[:split], prog="slipstream compare")
    more = shlex.join(arguments[split + 1 :])
    return dataclasses.replace(options, train=f"{options.train} {more}".strip())


# -- the grid --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One way of training: algorithm, update rule with its options, compression."""

    algo: str
    update: str
    rule: tuple[tuple[str, str], ...] = ()
    compress: str = "none"

    @property
    def algorithm(self) -> str:
        """The name of the algorithm for `slipstream train`."""
        return "a3c" if self.algo == "a2c" else self.algo

    @property
    def label(self) -> str:
        """What tables call it, such as `a3c server quorum=2 topk:0.01`; `sync` is understood for a2c and ppo."""
        words = [self.algo, "" if self.algo in SYNCHRONOUS else self.update, *(f"{k}={v}" for k, v in self.rule)]
        return " ".join(w for w in [*words, "" if self.compress == "none" else self.compress] if w)

    @property
    def slug(self) -> str:
        """The label as part of a file name."""
        return re.sub(r"[^\w.=,+]+", "-", self.label.replace(":", "="))

    def arguments(self) -> list[str]:
        """Its options of `slipstream train`."""
        out = ["--algorithm", self.algorithm, "--update", self.update]
        for name, value in self.rule:
            out += [f"--rule.{name.replace('_', '-')}", value]
        return out + ([] if self.compress == "none" else ["--compress", self.compress])


def entries(option: str, text: str) -> list[str]:
    """Split a list at its commas, each entry once; `+` joins the parts of an entry, and stands there for a comma.

    No entry is `name=value`: such a piece belongs to the entry before it, as in `server:quorum=2,pipeline=2,lock`.

    Raises:
        ConfigError: the list is empty.
    """
    found: list[str] = []
    for piece in (p.strip() for p in text.split(",")):
        if found and re.match(r"\w+=", piece):
            found[-1] += ("," if ":" in found[-1] else ":") + piece
        elif piece:
            found.append(piece.replace("+", ","))
    if not found:
        raise ConfigError(f"{option}: the list is empty")
    return list(dict.fromkeys(found))


def _update(entry: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """`server:quorum=2` as a name and options in a fixed order."""
    name, _, rest = entry.partition(":")
    if name not in config.names("rules"):
        raise unknown("updates", name, config.names("rules"))
    options = {}
    for piece in rest.split(",") if rest else []:
        key, _, value = piece.partition("=")
        if not (key and value):
            raise ConfigError(f"updates: {piece!r} of {entry!r} is not an option; write {name}:name=value")
        options[key.strip().replace("-", "_")] = value.strip()
    return name, tuple(sorted(options.items()))


def grid(algos: str, updates: str, compressions: str) -> list[Cell]:
    """The cells of a grid in the order asked for, each once; GRID says which are made.

    Raises:
        ConfigError: an empty list, an unknown name (with the nearest valid ones), or an entry that no cell has.
    """
    names, rules = entries("algos", algos), [_update(e) for e in entries("updates", updates)]
    ways = entries("compress", compressions)
    for name in names:
        if name not in ("a2c", *config.names("algos")):
            raise unknown("algos", name, ["a2c", *config.names("algos")])
    for way in ways:
        compress.check(way)
    cells: dict[Cell, None] = {}
    for algo in names:
        for update, rule in [("sync", ())] if algo in SYNCHRONOUS else rules:
            name = "a2c" if algo == "a3c" and update == "sync" else algo
            for way in ways if update == "server" else ["none"]:
                cells[Cell(name, update, rule, way)] = None
    for way in ways:
        if way != "none" and not any(c.compress == way for c in cells):
            raise ConfigError(f"compress: no cell of the grid would use {way!r}: it needs a3c among --algos "
                              "and server among --updates")  # fmt: skip
    return list(cells)


@dataclass(frozen=True)
class Job:
    """One run of the plan; `arguments` are those of `slipstream` without `--run`."""

    cell: Cell
    seed: int
    directory: Path
    arguments: list[str]


def plan(options: Options, out: Path) -> list[Job]:
    """Every run, seed by seed over the cells.

    Raises:
        ConfigError: an option makes no sense.
    """
    if options.seeds < 1:
        raise ConfigError(f"seeds: {options.seeds} is too small, the least is 1")
    common = []
    for name, value in (
        ("target-return", options.target), ("total-steps", options.total_steps), ("workers", options.workers),
    ):  # fmt: skip
        common += [] if value is None else [f"--{name}", str(value)]
    common += _split(options.train)
    return [
        Job(cell, seed, out / f"{cell.slug}-seed{seed}",
            ["train", options.env, "--json", "--seed", str(seed), *cell.arguments(), *common])
        for seed in range(options.seeds) for cell in grid(options.algos, options.updates, options.compress)
    ]  # fmt: skip


def _split(train: str) -> list[str]:
    try:
        return shlex.split(train)
    except ValueError as e:
        raise ConfigError(f"train: {train!r} cannot be split into options ({e})") from None


def check(job: Job, resolve: Resolve) -> config.Run:
    """What the run of a job will be: whatever `slipstream train` would refuse is refused before anything starts.

    Raises:
        ConfigError: names the cell, and the option as `slipstream train` names it.
    """
    cell = job.cell
    try:
        run = config.check(resolve(job.arguments[1:]))
    except ConfigError as e:
        raise ConfigError(f"{cell.label}: {e}") from None
    for name, ours in (("algorithm", cell.algorithm), ("update", cell.update), ("compress", cell.compress),
                       ("seed", job.seed)):  # fmt: skip
        if getattr(run, name) != ours:
            raise ConfigError(f"train: {name} is an option of the grid; leave it to slipstream compare")
    return run


# -- the comparison --------------------------------------------------------------------------------


def remembered(options: Options) -> Options:
    """`--out DIR` without an environment: the options of the comparison in it.

    Raises:
        ConfigError: there is none, or other options are given too.
    """
    if options.env:
        return options
    saved = read_json(Path(options.out) / "plan.json") if options.out else {}
    if not saved:
        raise ConfigError(
            f"out: {options.out} holds no comparison to go on with"
            if options.out
            else "compare: which environment? Such as: slipstream compare CartPole-v1"
        )
    if dataclasses.replace(options, out=None, json=False) != Options():
        raise ConfigError("compare: options of a comparison that exists are changed with its ENV given too")
    return Options(**{**saved["options"], "out": options.out, "json": options.json})


def directory_of(options: Options) -> Path:
    """Where a comparison lives: the same options lead to the same place, whatever the number of seeds."""
    if options.out:
        return Path(options.out)
    told = dataclasses.asdict(dataclasses.replace(options, seeds=0, json=False))
    mark = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"compare-{re.sub(r'[^A-Za-z0-9._-]+', '-', options.env.split(':')[-1])}-{mark}"


def command(options: Options) -> str:
    """The command line of a comparison."""
    words = ["slipstream", "compare", options.env]
    for f in dataclasses.fields(Options):
        value = getattr(options, f.name)
        if f.name not in ("env", "train", "json") and value != f.default:
            words += [f"--{f.name.replace('_', '-')}", str(value)]
    return shlex.join([*words, *(["--", *_split(options.train)] if options.train else [])])


@contextmanager
def claim(directory: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a directory for this process, waiting so many seconds for it.

    Raises:
        ConfigError: another process holds it.
    """
    fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ConfigError(f"out: another process works in {directory}; stop that first") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(fd)


def finished(job: Job) -> dict[str, Any] | None:
    """The record of a run that has ended, well or not, or None.

    Raises:
        ConfigError: the run there was made with other options.
    """
    record = read_json(job.directory / "compare.json")
    if record and record["arguments"] != job.arguments:
        raise ConfigError(
            f"out: {job.directory} was run with other options ({shlex.join(record['arguments'])}); choose another --out"
        )
    return record or None


def carry_out(job: Job) -> dict[str, Any]:
    """Start a run anew and record what came of it.

    Raises:
        ConfigError: it was refused, as its like would be: no result of training.
        Interrupted: somebody stopped it; it is not counted and starts anew next time.
    """
    if job.directory.exists():  # half done
        with claim(job.directory, 10.0):  # its processes die with the comparison that was killed, but not at once
            shutil.rmtree(job.directory)
    record = {"cell": job.cell.label, "seed": job.seed, "arguments": job.arguments, "machine": machine(),
              "date": time.strftime("%Y-%m-%d %H:%M:%S")}  # fmt: skip
    record |= execute([*job.arguments, "--run", str(job.directory)])
    if record["code"] == ConfigError.exit_code and not (job.directory / "metrics.jsonl").exists():
        shutil.rmtree(job.directory, ignore_errors=True)
        raise ConfigError(f"{job.cell.label}: {str(record['error']).removeprefix('slipstream: ')}")
    if record["code"] in (130, 143):
        raise Interrupted(f"stopped by {'SIGINT' if record['code'] == 130 else 'SIGTERM'} in {job.directory}")
    job.directory.mkdir(parents=True, exist_ok=True)
    write_file(job.directory / "compare.json", json.dumps(record, indent=1).encode())
    return record


def compare(options: Options, say: Callable[[str], None], resolve: Resolve) -> Comparison:
    """Run what is missing of a comparison, then write comparison.csv, .md, .html and .json into its directory.

    Args:
        options: the grid and what is common to its runs.
        say: takes one line of text: each run as it ends, then the table.
        resolve: the run that `slipstream train` would make of its arguments.

    Raises:
        ConfigError: an option makes no sense, an extra is missing, or a run was refused.
        Interrupted: Ctrl-C or SIGTERM; finished runs are kept.
    """
    from slipstream.envs.gym import find

    require()
    options = remembered(options)
    find(options.env)
    out = directory_of(options)
    jobs = plan(options, out)
    runs = [check(job, resolve) for job in jobs if job.seed == 0]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"out: cannot make {out}: {e.strerror}") from None
    if not (out / "plan.json").exists() and any(not p.name.startswith(".") for p in out.iterdir()):
        raise ConfigError(f"out: {out} is not empty and holds no comparison")
    with claim(out):
        for job in jobs:
            finished(job)
        write_file(out / "plan.json", json.dumps({"options": dataclasses.asdict(options)}, indent=1).encode())
        say(f"{len(runs)} ways x {options.seeds} seeds = {len(jobs)} runs in {out}\n({GRID})")
        try:
            measured = [_measure(job, f"[{n + 1}/{len(jobs)}]", say) for n, job in enumerate(jobs)]
        except (KeyboardInterrupt, Interrupted) as e:
            why = f"stopped by {e.args[0] if e.args else 'SIGINT'}" if isinstance(e, KeyboardInterrupt) else str(e)
            raise Interrupted(f"{why}; `slipstream compare --out {out}` goes on with the comparison") from None
        result = Comparison(
            env=options.env, target=runs[0].target_return, command=command(options), directory=str(out), grid=GRID,
            cells=[job.cell.label for job in jobs if job.seed == 0], runs=measured,
            machines=_machines([read_json(job.directory / "compare.json") for job in jobs]),
        )  # fmt: skip
        compare_report.write(result, out)
    for line in compare_report.text(result):
        say(line)
    return result


def _measure(job: Job, mark: str, say: Callable[[str], None]) -> Measured:
    before = finished(job)
    m = collect(job.directory, before or carry_out(job))
    if m.failure is not None:
        how = f"FAILED: {m.failure.splitlines()[-1]}"
    else:
        how = f"{'reached the target' if m.reached else 'did not reach the target'}: {m.steps:,.0f} steps, "
        how += f"{m.seconds:.1f} s, {m.figures['steps_per_second'] or 0:,.0f} steps/s"
    say(f"{mark} seed {m.seed}  {m.cell}  {how}{' (finished before)' if before else ''}")
    return m


def _machines(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The machines and versions the runs were made with, each with the first and last date."""
    found: dict[str, dict[str, Any]] = {}
    for r in sorted(records, key=lambda r: r["date"]):
        entry = found.setdefault(json.dumps(r["machine"], sort_keys=True), {**r["machine"], "first": r["date"]})
        entry["last"] = r["date"]
    return list(found.values())
