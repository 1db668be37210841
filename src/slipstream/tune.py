"""How many workers, and how many environment copies in each: measured here, not guessed.

`best_workers` is the quick form, behind `--workers auto`; `tune` is the full one, behind `slipstream tune-workers`.
Trials are real trainings of a few seconds. No trial is trained to a target, so what is compared is a proxy,
`Trial.progress`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from slipstream.config import Run
from slipstream.cores import usable_cores
from slipstream.errors import ConfigError, Interrupted
from slipstream.launch import Launcher

COPIES = (1, 2, 4, 8, 16, 32)
WARM_UP = 0.4  # seconds of a trial before its first metrics that count
EVERY = 0.2  # seconds between the metrics of a trial
NEAR = 0.95  # as good as the best: of two such, the smaller is recommended
PROXY = "steps_per_second / (1 + samples_per_update * (1 + staleness) / critical_batch)"
BAR = 40  # characters of the longest bar


def best_workers(measure: Callable[[int, float], float], budget: float = 6.0) -> int:
    """The number of workers with the most steps a second, from 1 to the cores this process may use.

    Args:
        measure: `(workers, seconds) -> steps per second` of a short training.
        budget: seconds of training to spend on all trials together (starting workers comes on top).
    """
    cores = usable_cores()
    counts = sorted({1, cores, *(2**i for i in range(1, 10) if 2**i < cores), max(1, cores - 1)})
    rates: dict[int, float] = {n: measure(n, max(1.0, budget / len(counts))) for n in counts}
    best = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= NEAR * best)  # fewer, where it is as fast


# -- a trial ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What a short training did, from when all its workers worked to when it was stopped."""

    workers: int
    copies: int
    steps_per_second: float
    updates_per_second: float
    wait_share: float
    """Share of the workers' time spent waiting: for the lock, for the others (`sync`) or for the server."""
    staleness: float
    """Mean over the updates."""
    critical_batch: float
    """Samples of the batch at which a sample is worth half of one in a tiny batch."""
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    """Every `*_share` of metrics.jsonl and the cores kept busy, mean over the time."""

    @property
    def samples(self) -> float:
        """Environment steps an update is made of."""
        return self.steps_per_second / self.updates_per_second if self.updates_per_second else 0.0

    @property
    def progress(self) -> float:
        """The proxy for time to target: steps/s, each worth 1 / (1 + batch / critical batch).

        That is the law of large batches (McCandlish et al. 2018, arXiv 1812.06162), with gradients of which none
        has seen another's update taken as one batch: samples x (1 + staleness). So four workers under `lock` count
        no more than four under `sync` with the same steps/s, which errs against the asynchronous rules.
        """
        return self.steps_per_second / (1 + self.samples * (1 + self.staleness) / self.critical_batch)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the derived ones included."""
        return {**dataclasses.asdict(self), "samples_per_update": self.samples, "progress_per_second": self.progress}


def read_trial(lines: list[dict[str, Any]], workers: int, copies: int, critical_batch: float) -> Trial | None:
    """The trial that wrote these lines of metrics.jsonl; None if too little of it was spent at work.

    What counts is from the first line after every worker had begun to the line before the last, which is written when
    the workers have been stopped.
    """
    begun: list[int] = []
    for w in range(workers):
        begun += [i for i, x in enumerate(lines) if x["worker_steps_per_second"][w] > 0][:1]
    begun += [i for i, x in enumerate(lines) if x["wall"] >= WARM_UP][:1]
    first = max(begun, default=0)
    if len(begun) <= workers or first > len(lines) - 4:
        return None
    used = list(zip(lines[first:-1], lines[first + 1 : -1], strict=False))
    start, end = lines[first], lines[-2]
    seconds, updates = end["wall"] - start["wall"], end["updates"] - start["updates"]
    spans = [(b, b["wall"] - a["wall"], b["updates"] - a["updates"]) for a, b in used]
    names = {k for x, _, _ in spans for k in x if k.endswith("_share") and k != "clipped_share"} | {"cores_busy"}
    shares = {k: sum(x.get(k, 0.0) * s for x, s, _ in spans) / seconds for k in sorted(names)}
    stale = sum(x["staleness_mean"] * u for x, _, u in spans) / max(1, updates)
    return Trial(
        workers, copies, (end["steps"] - start["steps"]) / seconds, updates / seconds, shares["wait_share"],
        stale, critical_batch, shares,
    )  # fmt: skip


def trial(
    train: Callable[..., Any], run: Run, seconds: float, critical_batch: float, launcher: Launcher, env: Any = None
) -> Trial:
    """Train with the options of `run` for some seconds in a directory that is removed.

    Args:
        train: `slipstream.train`, which lies above this file.
        run: what to train; its limits and what it writes are replaced.
        seconds: of training, after the start of the workers.
        critical_batch: see `Trial`.
        launcher: forks the workers; see `Kept`.
        env: a callable that makes the environment, where it has no name.

    Raises:
        ConfigError: the environment is so slow that a trial shows nothing.
    """
    for longer in (1, 3, 9):
        options = dataclasses.replace(
            run, target_return=None, total_steps=10**15, record=False,
            limits=dataclasses.replace(run.limits, max_seconds=longer * seconds + WARM_UP),
            watch=dataclasses.replace(
                run.watch, every=min(EVERY, seconds / 5), tensorboard=False, checkpoint_every=0.0
            ),
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="slipstream-tune-") as place:
            directory = Path(place) / "run"
            train(env, options=options, run=directory, show="none", launcher=launcher)
            lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        found = read_trial(lines, run.worker_count, run.copies, critical_batch)
        if found is not None and found.updates_per_second:
            return found
    raise ConfigError(
        f"seconds: {seconds} is too short, even {longer}-fold: {run.worker_count} workers with {run.copies} copies "
        "made no update that could be measured"
    )


class Kept(Launcher):
    """A launcher for one run after another: a run that closes it ends its jobs, but not the launcher."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[int] = set()  # jobs sent of which the launcher has not said that they ended

    def send(self, job: dict[str, Any]) -> None:
        """Ask for a job."""
        self.open.add(job["id"])
        super().send(job)

    def messages(self) -> list[dict[str, Any]]:
        """What the launcher has said since the last look."""
        found = super().messages()
        self.open -= {m["ended"] for m in found if "ended" in m}
        return found

    def close(self) -> None:
        """Kill what still runs and hear of its end: the next run numbers its jobs from 0 again."""
        deadline = time.monotonic() + 5
        while self.threads and time.monotonic() < deadline and self.process.poll() is None:
            self.messages()
            for pid in [self.started[j] for j in self.open if j in self.started]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.open:
                self.started.clear()
                return
            time.sleep(0.001)
        super().close()  # it has not even finished its imports

    def end(self) -> None:
        """End the launcher too."""
        super().close()


# -- the full form ---------------------------------------------------------------------------------


def worker_counts(most: int = 0, cores: int | None = None) -> list[int]:
    """Numbers of workers to try: up to `most`; 0: half more than there are cores, which may help or not."""
    cores = cores or usable_cores()
    most = most or cores + max(1, cores // 2)
    return sorted(n for n in {1, cores - 1, cores, most, *(2**i for i in range(10))} if 1 <= n <= most)


def critical_batch_of(run: Run) -> float:
    """Samples in flight in the run as it is configured, with a worker for each core: what its options are made for."""
    return float(usable_cores() * run.copies * getattr(run.algo, "rollout_steps", 1))


def recommend(trials: list[Trial]) -> Trial:
    """The trial with the most progress; of those as good, the one with the fewest workers, then copies."""
    best = max(t.progress for t in trials)
    return min((t for t in trials if t.progress >= NEAR * best), key=lambda t: (t.workers, t.copies))


def middle(trials: list[Trial]) -> Trial:
    """The median of repeats of one setting, number by number."""
    first = trials[0]
    numbers = ("steps_per_second", "updates_per_second", "wait_share", "staleness")
    found: dict[str, Any] = {n: median(getattr(t, n) for t in trials) for n in numbers}
    found["shares"] = {k: median(t.shares.get(k, 0.0) for t in trials) for k in first.shares}
    return dataclasses.replace(first, **found)


def tune(
    train: Callable[..., Any], run: Run, *, workers: Iterable[int], copies: Iterable[int] = COPIES,
    seconds: float = 2.0, repeats: int = 1, critical_batch: float | None = None,
    said: Callable[[Trial], None] = lambda _: None, env: Any = None,
) -> list[Trial]:  # fmt: skip
    """Try every number of workers with every number of copies; `said` hears of each as it is done.

    Raises:
        ConfigError: the options make no sense.
        Interrupted: Ctrl-C or SIGTERM; nothing is left.
    """
    workers, copies = sorted(set(workers)), sorted(set(copies))
    least = {"workers": min(workers, default=0), "copies": min(copies, default=0), "repeats": repeats}
    for name, value in least.items():
        if value < 1:
            raise ConfigError(f"{name}: {value} is too small, the least is 1")
    if not seconds > 0:
        raise ConfigError(f"seconds: {seconds} is not positive")
    critical = critical_batch if critical_batch is not None else critical_batch_of(run)
    if not critical > 0:
        raise ConfigError(f"critical_batch: {critical} is not positive")
    launcher, found = Kept(), []
    try:
        for n, c in itertools.product(workers, copies):
            times = []
            for _ in range(repeats):
                launcher = Kept() if launcher.closed else launcher
                options = dataclasses.replace(run, workers=n, copies=c)
                times.append(trial(train, options, seconds, critical, launcher, env))
            found.append(middle(times))
            said(found[-1])
    except Interrupted as e:
        raise Interrupted(f"{str(e).split(' at ')[0].split(' before ')[0]}; nothing is recommended") from None
    finally:
        launcher.end()
    return found


# -- the command -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Measure short trainings with several numbers of workers and of copies, and recommend. Takes every option of
    `slipstream train` too, such as --update sync or --algo.rollout-steps 32."""

    env: tyro.conf.Positional[str]
    """Gymnasium id, or `module:Id`."""
    max_workers: int = 0
    """Most workers to try; 0: half more than the usable cores."""
    copies: tuple[int, ...] = COPIES
    """Environment copies in each worker to try."""
    seconds: float = 2.0
    """Training of each trial."""
    repeats: int = 1
    """Trials of each setting; the table has their medians."""
    critical_batch: float | None = None
    """Samples of the batch at which a sample is worth half; default: cores x copies x steps of the run."""
    json: bool = False
    """Print one JSON object."""


def parse(arguments: list[str]) -> tuple[Options, list[str]]:
    """The options of `slipstream tune-workers`, and those of `slipstream train` among them.

    Raises:
        ConfigError: options that have no meaning here.
    """
    if not arguments or (arguments[0].startswith("-") and not {"-h", "--help"} & set(arguments)):
        raise ConfigError("tune-workers: which environment, first? Such as: slipstream tune-workers CartPole-v1")
    for a in arguments:
        if a.partition("=")[0] in ("--workers", "--run", "--show", "--record", "--no-record"):
            raise ConfigError(f"{a}: not an option of tune-workers, whose trials leave nothing (see --max-workers)")
    options, rest = tyro.cli(Options, args=arguments, prog="slipstream tune-workers", return_unknown_args=True)
    return options, [options.env, *rest]


def command(options: Options, train: Callable[..., Any], run: Run, tell: Callable[[str], None]) -> dict[str, Any]:
    """Tune, saying every line as it comes; returns what --json prints."""
    counts = worker_counts(options.max_workers)
    cores, settings = usable_cores(), len(counts) * len(set(options.copies)) * options.repeats
    steps = getattr(run.algo, "rollout_steps", None)
    rollouts = f"rollouts of {steps} steps, " if steps else ""
    tell(f"{run.env}: {run.algorithm}, {run.update}, {rollouts}{cores} cores; {settings} trials of {options.seconds} s")
    tell(HEAD)
    trials = tune(
        train, run, workers=counts, copies=options.copies, seconds=options.seconds, repeats=options.repeats,
        critical_batch=options.critical_batch, said=lambda t: tell(row(t)),
    )  # fmt: skip
    for line in ("", *curve(trials), *explain(trials, run.update)):
        tell(line)
    best = recommend(trials)
    return {
        "env": run.env, "algorithm": run.algorithm, "update": run.update, "cores": cores, "seconds": options.seconds,
        "repeats": options.repeats, "critical_batch": best.critical_batch, "proxy": PROXY,
        "trials": [t.to_dict() for t in trials], "recommended": {"workers": best.workers, "copies": best.copies},
        "options": f"--workers {best.workers} --copies {best.copies}",
    }  # fmt: skip


# -- what is shown ---------------------------------------------------------------------------------

HEAD = f"{'workers':>7} {'copies':>6} {'steps/s':>10} {'updates/s':>9} {'samples/update':>14} {'waiting':>8} "
HEAD += f"{'staleness':>9} {'progress/s':>10}"


def row(t: Trial) -> str:
    """One line of the table under `HEAD`."""
    return (
        f"{t.workers:>7} {t.copies:>6} {t.steps_per_second:>10,.0f} {t.updates_per_second:>9,.1f} {t.samples:>14,.0f} "
        f"{100 * t.wait_share:>6.1f} % {t.staleness:>9.2f} {t.progress:>10,.0f}"
    )


def curve(trials: list[Trial]) -> list[str]:
    """A bar of progress a line, and within it the part of `.` that a perfect batch would add in steps/s."""
    most = max(t.steps_per_second for t in trials)
    lines = []
    for t in trials:
        full, part = (round(BAR * x / most) for x in (t.steps_per_second, t.progress))
        lines.append(f"{t.workers:>4} x {t.copies:<4} {'#' * part}{'.' * (full - part)}")
    return lines


def explain(trials: list[Trial], update: str) -> list[str]:
    """What was recommended and why."""
    best, critical = recommend(trials), trials[0].critical_batch
    fastest = max(trials, key=lambda t: t.steps_per_second)
    waiting = {"sync": "for the other workers", "server": "for the server"}.get(update, "for the lock")
    return [
        f"# progress/s  . the rest of steps/s (longest: {fastest.steps_per_second:,.0f} steps/s)",
        "",
        "progress/s stands in for the time to a target, which no trial was trained to: steps/s / (1 + batch / critical",
        "batch). batch: samples/update x (1 + staleness), computed without seeing each other's updates. Critical",
        f"batch: {critical:,.0f} samples (--critical-batch; default: cores x copies x steps of the run as configured).",
        f"waiting: share of the workers' time {waiting}.",
        f"most steps/s: --workers {fastest.workers} --copies {fastest.copies}",
        f"recommended: --workers {best.workers} --copies {best.copies}",
    ]
