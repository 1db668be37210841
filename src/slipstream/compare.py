"""`slipstream compare ENV`: the same task under a grid of algorithms and update rules, one run after another.

Each run is a fresh process of `slipstream train`, watched from here to its end: memory and CPU are measured alike
for all. The order goes seed by seed over the cells of the grid, so a slow minute of the machine hits all of them.
A finished run leaves `compare.json` in its directory; a comparison that was killed goes on with the runs that lack
one. What came of it is put together by compare_report.py.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
import yaml

from slipstream import __version__, compare_report, config
from slipstream.checkpoint import write_file
from slipstream.compare_report import Comparison, Measured
from slipstream.cores import usable_cores
from slipstream.errors import ConfigError, Interrupted, unknown
from slipstream.launch import die_with_parent
from slipstream.watch.usage import pss_mib

SAMPLE_EVERY = 0.25  # seconds between looks at the processes of a run
GPU_EVERY = 2.0
PHASES = ("collect", "gradient", "pull", "wait", "apply")


@dataclass(frozen=True)
class Options:
    """Run a grid of algorithms and update rules on one environment and tabulate what each cost.

    Options after `--` go to every `slipstream train`. The same command again, or `--out DIR` alone, goes on with a
    comparison that was stopped.
    """

    env: tyro.conf.Positional[str] = ""
    """Gymnasium id, or `module:Id`; may be left out where --out holds a comparison."""
    algos: str = "a2c,ppo,a3c"
    """Algorithms. a2c is a3c under the rule sync; ppo runs under sync; others under each of --updates."""
    updates: str = "lock,hogwild"
    """Update rules, each with options if any: lock,server:quorum=2,max_staleness=4."""
    compress: str = "none"
    """Gradient compressions, such as none,topk:0.01; others than none are for the rule server alone."""
    seeds: int = 5
    """Seeds of each cell: 0, 1, 2 ..."""
    target: float | None = None
    """Mean return to reach; default: the one of the environment's preset."""
    total_steps: int | None = None
    """Environment steps after which a run has not reached the target; default: the preset's."""
    workers: int | None = None
    """Worker processes of each run; default: one for each usable core."""
    copies: int | None = None
    """Environment copies in each worker; default: the preset's."""
    train: str = ""
    """Further options of `slipstream train` for every run, in one string; or put them after `--`."""
    out: str | None = None
    """Directory of the comparison; default: runs/compare-<env>-<mark of the options>."""
    json: bool = False
    """Print one JSON object."""


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
        words = [self.algo, "" if self.update == "sync" else self.update, *(f"{k}={v}" for k, v in self.rule)]
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


def entries(text: str) -> list[str]:
    """Split a list at its commas; a piece `k=v` belongs to the entry before it: `a:x=1,y=2,b` has two entries."""
    found: list[str] = []
    for piece in (p.strip() for p in text.split(",")):
        if found and "=" in piece and ":" not in piece.split("=")[0]:
            found[-1] += ("," if ":" in found[-1] else ":") + piece
        elif piece:
            found.append(piece)
    return found


def _update(entry: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """`server:quorum=2` as a name and options in a fixed order."""
    name, _, rest = entry.partition(":")
    if name not in config.names("rules"):
        raise unknown("updates", name, config.names("rules"))
    options = {}
    for piece in rest.split(",") if rest else []:
        key, equals, value = piece.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"updates: {piece!r} of {entry!r} is not an option; write {name}:name=value")
        options[key.strip().replace("-", "_")] = value.strip()
    return name, tuple(sorted(options.items()))


def grid(algos: str, updates: str, compress: str) -> list[Cell]:
    """The cells of a grid in the order asked for, each once.

    `a3c` under `sync` is a2c and gets its name. A compression multiplies the cells of the rule `server` only.

    Raises:
        ConfigError: an empty list or an unknown name, with the nearest valid ones.
    """
    rules, ways, valid = [_update(e) for e in entries(updates)], entries(compress), ["a2c", *config.names("algos")]
    for way in ways:
        if way.split(":")[0] not in ("none", *config.names("compress")):
            raise unknown("compress", way.split(":")[0], ["none", *config.names("compress")])
    for name, given in (("algos", entries(algos)), ("updates", rules), ("compress", ways)):
        if not given:
            raise ConfigError(f"{name}: the list is empty")
    cells: dict[Cell, None] = {}
    for algo in entries(algos):
        if algo not in valid:
            raise unknown("algos", algo, valid)
        for update, rule in [("sync", ())] if algo in ("a2c", "ppo") else rules:
            name = "a2c" if algo == "a3c" and update == "sync" else algo
            for way in dict.fromkeys(ways) if update == "server" else ["none"]:
                cells[Cell(name, update, rule, way)] = None
    return list(cells)


def check(cell: Cell, options: Options) -> None:
    """Refuse before anything runs what `slipstream train` would refuse.

    Raises:
        ConfigError: names the cell, and the option as `slipstream train` names it.
    """
    preset = config.preset(options.env)
    values = {**preset, "env": options.env, "update": cell.update, "compress": cell.compress}
    values["rule"] = {**preset.get("rule", {}), **{k: yaml.safe_load(v) for k, v in cell.rule}}
    if cell.algorithm != values.get("algorithm", config.Run.algorithm):
        values.pop("algo", None)
    values["algorithm"] = cell.algorithm
    for name in ("total_steps", "workers", "copies"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    try:
        run = config.from_dict(values)
        if not options.train:  # which could make it right
            config.check(run)
    except ConfigError as e:
        raise ConfigError(f"{cell.label}: {e}") from None


@dataclass(frozen=True)
class Job:
    """One run of the plan; `arguments` are those of `slipstream` without `--run`."""

    cell: Cell
    seed: int
    directory: Path
    arguments: list[str]


def plan(options: Options, out: Path) -> list[Job]:
    """Every run, seed by seed over the cells, after all checks that can be made now.

    Raises:
        ConfigError: an option makes no sense.
    """
    from slipstream.envs.gym import find

    if options.seeds < 1:
        raise ConfigError(f"seeds: {options.seeds} is too small, the least is 1")
    cells = grid(options.algos, options.updates, options.compress)
    for cell in cells:
        check(cell, options)
    find(options.env)
    common = ["--target-return", str(target(options))]
    for name in ("total_steps", "workers", "copies"):
        if getattr(options, name) is not None:
            common += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    common += _split(options.train)
    return [
        Job(cell, seed, out / f"{cell.slug}-seed{seed}",
            ["train", options.env, "--json", "--seed", str(seed), *cell.arguments(), *common])
        for seed in range(options.seeds) for cell in cells
    ]  # fmt: skip


def _split(train: str) -> list[str]:
    try:
        return shlex.split(train)
    except ValueError as e:
        raise ConfigError(f"train: {train!r} cannot be split into options ({e})") from None


def target(options: Options) -> float | None:
    """The return to reach: asked for, or of the environment's preset, or none."""
    value = config.preset(options.env).get("target_return") if options.target is None else options.target
    return None if value is None else float(value)


# -- one run ---------------------------------------------------------------------------------------


class Tree:
    """Peak memory, CPU seconds and GPU use of a process and its descendants, from looks at them."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak_mib = pid, 0.0
        self.cpu: dict[int, float] = {}
        self.gpu: list[float] = []
        self.next_gpu = time.monotonic() if shutil.which("nvidia-smi") else float("inf")

    def look(self) -> None:
        """Take a sample."""
        pids = []
        with suppress(psutil.Error):
            root = psutil.Process(self.pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self.cpu[process.pid] = times.user + times.system
                    pids.append(process.pid)
        self.peak_mib = max(self.peak_mib, pss_mib(pids) or 0.0)
        if time.monotonic() >= self.next_gpu:
            self.next_gpu = time.monotonic() + GPU_EVERY
            query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
            with suppress(OSError, ValueError, subprocess.SubprocessError):
                said = subprocess.run(query, capture_output=True, text=True, timeout=2, check=True).stdout
                self.gpu.append(max(float(line) for line in said.split()) / 100)  # the busiest


def execute(arguments: list[str]) -> dict[str, Any]:
    """Carry out `slipstream <arguments>` in a fresh process that does not outlive this one, and watch it to its end.

    Returns:
        code: exit code (minus the signal that killed it); error: the end of what it wrote there; wall: seconds from
        start to end; cpu_seconds: user and system time of the whole tree; peak_memory_mib: PSS of the tree (RSS where
        the kernel does not tell); gpu: mean use of the busiest GPU, or none.
    """
    parent, begun = os.getpid(), time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors, preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
        try:
            status, used, tree = _watch(process.pid)
        except BaseException:
            _end(process)
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - begun
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-4000:].strip()
    reaped = used.ru_utime + used.ru_stime  # lacks descendants nobody has waited for; the samples lack the last moment
    return {
        "code": process.returncode, "error": said if process.returncode else None, "wall": wall,
        "cpu_seconds": max(reaped, sum(tree.cpu.values())), "peak_memory_mib": round(tree.peak_mib, 1),
        "gpu": float(np.mean(tree.gpu)) if tree.gpu else None,
    }  # fmt: skip


def _watch(pid: int) -> tuple[int, Any, Tree]:
    """Wait for a child; returns its status, its resource usage and what was sampled."""
    tree, due = Tree(pid), 0.0
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, used, tree
        if time.monotonic() >= due:
            tree.look()
            due = time.monotonic() + SAMPLE_EVERY
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def machine() -> dict[str, Any]:
    """What the figures depend on: cores, CPU, system and versions."""
    cpu = platform.processor()
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = found.group(1) if found else cpu
    versions = {"slipstream": __version__, "python": platform.python_version()}
    for package in ("torch", "gymnasium", "numpy", "scipy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"cpu": cpu or platform.machine(), "cores": usable_cores(), "system": platform.platform(), **versions}


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


def run(job: Job) -> dict[str, Any]:
    """Start a run anew and record what came of it.

    Raises:
        ConfigError: it was refused: so would be the others of its cell.
        Interrupted: somebody stopped it; it is not counted and starts anew next time.
    """
    if job.directory.exists():  # half done
        with claim(job.directory, 10.0):
            pass
        shutil.rmtree(job.directory)
    record = {"cell": job.cell.label, "seed": job.seed, "arguments": job.arguments, "machine": machine(),
              "date": time.strftime("%Y-%m-%d %H:%M:%S")}  # fmt: skip
    record |= execute([*job.arguments, "--run", str(job.directory)])
    if record["code"] == ConfigError.exit_code and not (job.directory / "metrics.jsonl").exists():
        shutil.rmtree(job.directory, ignore_errors=True)
        raise ConfigError(f"{job.cell.label}: {record['error'].removeprefix('slipstream: ')}")
    if record["code"] in (130, 143):
        raise Interrupted(f"run {job.directory} was stopped; the same command goes on with the comparison")
    job.directory.mkdir(parents=True, exist_ok=True)
    write_file(job.directory / "compare.json", json.dumps(record, indent=1).encode())
    return record


# -- what a run left -------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a broken last line, as a killed run leaves it, is passed over."""
    found = []
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def collect(directory: Path, record: dict[str, Any]) -> Measured:
    """The figures of a run from its directory and its record; what the run did not write is None."""
    summary, lines = read_json(directory / "summary.json"), read_lines(directory / "metrics.jsonl")
    last: dict[str, Any] = lines[-1] if lines else {}
    failure = _failure(record, summary)
    solved = summary.get("solved_at") if failure is None else None
    steps, updates = summary.get("steps", last.get("steps", 0)), summary.get("updates", last.get("updates", 0))
    wall = record["wall"]
    if solved is not None:
        updates = float(np.interp(solved, [m["steps"] for m in lines] or [0], [m["updates"] for m in lines] or [0]))
        steps, wall = solved, summary["seconds_to_solved"]
    known = [m for m in lines if m.get("return") is not None]
    return Measured(
        cell=record["cell"], seed=record["seed"], reached=solved is not None, failure=failure, steps=float(steps),
        seconds=float(wall), updates=float(updates), figures=_figures(summary, last, known, record),
        curve={k: [float(m[k]) for m in known] for k in ("steps", "wall", "return")}, phases=_phases(summary, lines),
        staleness_histogram=[int(n) for n in summary.get("staleness_histogram", [])],
    )  # fmt: skip


def _failure(record: dict[str, Any], summary: dict[str, Any]) -> str | None:
    if record["code"] < 0:
        return f"killed by signal {-record['code']}"
    if record["code"]:
        return str(record["error"] or f"exit code {record['code']}")
    return None if summary else "it left no summary.json"


def _figures(
    summary: dict[str, Any], last: dict[str, Any], known: list[dict[str, Any]], record: dict[str, Any]
) -> dict[str, float | None]:
    """Everything that is one number a run; keys as in compare_report.FIGURES."""
    full = max((m["return_episodes"] for m in known), default=0)  # means over few episodes are of short ones
    seconds, updates = summary.get("seconds", last.get("wall")), summary.get("updates", last.get("updates"))
    moved = {k: summary.get(f"bytes_{k}") for k in ("down", "up", "trajectories")}
    parts = [b for b in moved.values() if b is not None]
    total = sum(parts) if parts else None
    if total is None and "bytes_per_second" in summary and seconds is not None:
        total = summary["bytes_per_second"] * seconds
    per_second = _ratio(total, seconds)
    return {
        "peak_return": max((float(m["return"]) for m in known if m["return_episodes"] == full), default=None),
        "steps_per_second": summary.get("steps_per_second", _ratio(last.get("steps"), last.get("wall"))),
        **{f"bytes_{k}_per_update": _ratio(b, updates) for k, b in moved.items()},
        "bytes_per_update": _ratio(total, updates),
        "gb_per_hour": None if per_second is None else per_second * 3600 / 1e9,
        "peak_memory_mib": record["peak_memory_mib"] or None,
        "cpu": record["cpu_seconds"] / record["wall"] / record["machine"]["cores"], "gpu": record["gpu"],
        "staleness_mean": summary.get("staleness_mean"), "staleness_p99": summary.get("staleness_p99"),
        "dropped_stale": summary.get("dropped_stale"), "wait_share": summary.get("wait_share"),
        "torn_share": summary.get("reads_overlapped_share"),
    }  # fmt: skip


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _phases(summary: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each phase, all workers together; a run that did not sum them has their shares in its metrics."""
    if "phases" in summary:
        return {k: float(summary["phases"].get(k, 0.0)) for k in PHASES}
    out, before = dict.fromkeys(PHASES, 0.0), 0.0
    for m in lines:
        for k in PHASES:
            out[k] += m.get(f"{k}_share", 0.0) * (m["wall"] - before) * len(m.get("worker_steps_per_second", []))
        before = m["wall"]
    return out


# -- the comparison --------------------------------------------------------------------------------


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


def remembered(options: Options) -> Options:
    """`--out DIR` without an environment: the options of the comparison in it."""
    if options.env:
        return options
    saved = read_json(Path(options.out) / "plan.json") if options.out else {}
    if not saved:
        raise ConfigError("compare: which environment? Such as: slipstream compare CartPole-v1")
    only = dataclasses.replace(options, env="", out=None, json=False)
    if only != Options():
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


def compare(options: Options, say: Callable[[str], None]) -> Comparison:
    """Run what is missing of a comparison, then write comparison.csv, .md, .html and .json into its directory.

    Args:
        options: the grid and what is common to its runs.
        say: takes one line of text: each run as it ends, then the table.

    Raises:
        ConfigError: an option makes no sense, a run was refused, or an extra is missing.
        Interrupted: a run was stopped from outside.
    """
    compare_report.require()
    options = remembered(options)
    out = directory_of(options)
    jobs = plan(options, out)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "plan.json").exists())):
        raise ConfigError(f"out: {out} is not empty and holds no comparison")
    out.mkdir(parents=True, exist_ok=True)
    with claim(out):
        write_file(out / "plan.json", json.dumps({"options": dataclasses.asdict(options)}, indent=1).encode())
        say(f"comparison of {len(jobs)} runs in {out}")
        records = [finished(job) for job in jobs]
        runs = []
        for n, (job, record) in enumerate(zip(jobs, records, strict=True)):
            measured = collect(job.directory, record or run(job))
            say(f"[{n + 1}/{len(jobs)}] {_told(measured)}{' (finished before)' if record else ''}")
            runs.append(measured)
        result = Comparison(
            env=options.env, target=target(options), command=command(options), directory=str(out),
            cells=list(dict.fromkeys(job.cell.label for job in jobs)), runs=runs,
            machines=_distinct([read_json(job.directory / "compare.json") for job in jobs]),
        )  # fmt: skip
        compare_report.write(result, out)
    for line in compare_report.text(result):
        say(line)
    return result


def _distinct(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The machines and versions the runs were made with, each with the first and last date."""
    found: dict[str, dict[str, Any]] = {}
    for r in sorted(records, key=lambda r: r["date"]):
        entry = found.setdefault(json.dumps(r["machine"], sort_keys=True), {**r["machine"], "first": r["date"]})
        entry["last"] = r["date"]
    return list(found.values())


def _told(m: Measured) -> str:
    if m.failure is not None:
        return f"seed {m.seed}  {m.cell}  FAILED: {m.failure.splitlines()[-1]}"
    speed = m.figures["steps_per_second"]
    how = "reached the target" if m.reached else "did not reach the target"
    return f"seed {m.seed}  {m.cell}  {how}: {m.steps:,.0f} steps, {m.seconds:.1f} s, {speed or 0:,.0f} steps/s"
