"""What a comparison has measured, and its statistics over seeds.

Statistics are those of Agarwal et al. 2021 (arXiv 2108.13264, "Deep RL at the edge of the statistical precipice"):
the interquartile mean and its stratified-bootstrap 95 % interval. The strata are the tasks; a comparison has one
environment, so the seeds of a cell are resampled within that cell. SciPy computes both.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError

Array = NDArray[np.float64]
FAR = 1e30  # stands for a target that was not reached: large, yet finite, so that quantiles can interpolate
RESAMPLES = 2000
PHASES = ("collect", "gradient", "pull", "wait", "apply")
MOVED = {"": "", "_down": "down", "_up": "up", "_trajectories": "trajectories"}  # what is moved: its short title
TO_TARGET = {"steps": "environment steps", "seconds": "wall seconds", "updates": "updates"}
FIGURES = (
    "peak_return", "steps_per_second", *(f"bytes{k}_per_update" for k in MOVED), *(f"gb{k}_per_hour" for k in MOVED),
    "peak_memory_mib", "cpu", "gpu", "staleness_mean", "staleness_p99", "dropped_stale", "wait_share", "torn_share",
)  # fmt: skip


def require() -> None:
    """Refuse before hours of runs what could not be tabulated after them.

    Raises:
        ConfigError: SciPy or matplotlib is not installed.
    """
    lacking = [p for p in ("scipy", "matplotlib") if importlib.util.find_spec(p) is None]
    if lacking:
        raise ConfigError(f"compare: needs {' and '.join(lacking)}: pip install 'slipstream-rl[compare]'")


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        reached: it ended well, at the target.
        failure: why it failed, or None.
        steps, seconds, updates: to the target; of a run that did not reach it, what it used.
        figures: numbers by the keys of FIGURES; None where unknown.
        curve: `steps`, `wall` (seconds of training) and `return`, of equal length.
        phases: seconds of each phase, all workers together.
    """

    cell: str
    seed: int
    directory: str
    reached: bool
    failure: str | None
    steps: float
    seconds: float
    updates: float
    figures: dict[str, float | None]
    curve: dict[str, list[float]]
    phases: dict[str, float]
    staleness_histogram: list[int]


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison and what they were made with."""

    env: str
    target: float | None
    command: str
    directory: str
    grid: str
    cells: list[str]
    runs: list[Measured]
    machines: list[dict[str, Any]]

    def of(self, cell: str) -> list[Measured]:
        """The runs of a cell, failed ones included."""
        return [r for r in self.runs if r.cell == cell]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: every run, and the statistics of every cell."""
        cells = {c: {k: s and dataclasses.asdict(s) for k, s in statistics(self, c).items()} for c in self.cells}
        return {**dataclasses.asdict(self), "statistics": cells}


@dataclass(frozen=True)
class Statistic:
    """Median, interquartile mean and its 95 % interval over `n` runs; `open_*`: only a lower bound is known."""

    n: int
    median: float
    iqm: float
    low: float | None
    high: float | None
    open_median: bool = False
    open_iqm: bool = False
    open_low: bool = False
    open_high: bool = False


def iqm(x: Any, axis: int = -1) -> Any:
    """Interquartile mean along an axis: the mean without the lowest and the highest quarter."""
    from scipy import stats

    return stats.trim_mean(x, 0.25, axis=axis)


def interval(x: Array) -> tuple[Any, Any] | None:
    """95 % percentile-bootstrap interval of the IQM over axis 0 of `x` `[runs, ...]`; None for a single run."""
    from scipy import stats

    if len(x) < 2:
        return None
    found = stats.bootstrap(
        (x,), iqm, n_resamples=RESAMPLES, vectorized=True, axis=0, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return found.low, found.high


def statistic(values: Sequence[float], censored: Sequence[bool] = ()) -> Statistic | None:
    """Statistics over runs, or None of no run.

    A censored run is one whose true value is known to be more than the one given. It is counted with that value;
    a statistic that would change were the true value beyond all bounds is marked open: it is a lower bound.
    """
    if not len(values):
        return None
    x = np.array(values, float)
    least = _all_of(x)
    most = _all_of(np.where(censored, FAR, x)) if any(censored) else least
    is_open = [a is not None and b is not None and bool(b > a * (1 + 1e-9) + 1e-9) for a, b in zip(least, most)]  # noqa: B905
    median, mean, low, high = least
    assert median is not None
    assert mean is not None
    return Statistic(len(x), median, mean, low, high, *is_open)


def _all_of(x: Array) -> list[float | None]:
    ends = interval(x) or (None, None)
    return [float(np.median(x)), float(iqm(x)), *(None if e is None else float(e) for e in ends)]


def statistics(c: Comparison, cell: str) -> dict[str, Statistic | None]:
    """Every statistic of a cell by key; those to the target are None where there is no target."""
    runs = c.of(cell)
    out: dict[str, Statistic | None] = {}
    for key in TO_TARGET:
        values = [getattr(r, key) for r in runs]
        out[f"{key}_to_target"] = None if c.target is None else statistic(values, [not r.reached for r in runs])
    for key in FIGURES:
        out[key] = statistic([v for r in runs if (v := r.figures.get(key)) is not None])
    return out


def curve(runs: Sequence[Measured], against: str, points: int = 100) -> tuple[Array, Array, Any] | None:
    """IQM of the return over runs on a common grid, and its interval; a run that has ended keeps its last return.

    Returns:
        Grid `[points]`, IQM `[points]`, and (low, high) or None; None if no run has a return.
    """
    known = [r.curve for r in runs if r.curve["return"]]
    if not known:
        return None
    grid = np.linspace(max(k[against][0] for k in known), max(k[against][-1] for k in known), points)
    returns = np.array([np.interp(grid, k[against], k["return"]) for k in known])
    return grid, iqm(returns, axis=0), interval(returns)
