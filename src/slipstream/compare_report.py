"""What came of a comparison: statistics over seeds, the table as text, CSV and Markdown, and one HTML page.

Statistics are those of Agarwal et al. 2021 (arXiv 2108.13264, "Deep RL at the edge of the statistical precipice"):
the interquartile mean and its stratified-bootstrap 95 % interval. The strata are the tasks; a comparison has one
environment, so the seeds of a cell are resampled within that cell. SciPy computes both.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import importlib
import importlib.util
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError

Array = NDArray[np.float64]
FAR = 1e30  # stands for a target that was not reached: large, yet finite, so that quantiles can interpolate
RESAMPLES = 2000

TO_TARGET = {"steps": ("steps", "{:,.0f}"), "seconds": ("wall s", "{:,.1f}"), "updates": ("updates", "{:,.0f}")}
FIGURES = {  # key: (title, scale, format)
    "peak_return": ("peak return", 1, "{:,.1f}"),
    "steps_per_second": ("steps/s", 1, "{:,.0f}"),
    "bytes_per_update": ("kB/update", 1e-3, "{:,.1f}"),
    "bytes_down_per_update": ("weights down, kB/update", 1e-3, "{:,.1f}"),
    "bytes_up_per_update": ("gradients up, kB/update", 1e-3, "{:,.1f}"),
    "bytes_trajectories_per_update": ("trajectories, kB/update", 1e-3, "{:,.1f}"),
    "gb_per_hour": ("GB/h", 1, "{:,.2f}"),
    "peak_memory_mib": ("peak PSS MiB", 1, "{:,.0f}"),
    "cpu": ("CPU %", 100, "{:.0f}"),
    "gpu": ("GPU %", 100, "{:.0f}"),
    "staleness_mean": ("staleness mean", 1, "{:.2f}"),
    "staleness_p99": ("staleness p99", 1, "{:.0f}"),
    "dropped_stale": ("dropped as stale", 1, "{:,.0f}"),
    "wait_share": ("lock wait %", 100, "{:.1f}"),
    "torn_share": ("torn reads at most %", 100, "{:.2f}"),
}
WITH_INTERVAL = ("peak_return", "steps_per_second")


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


def require() -> None:
    """Refuse before hours of runs what could not be tabulated after them.

    Raises:
        ConfigError: SciPy or matplotlib is not installed.
    """
    for package in ("scipy", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"compare: {package} is not installed: pip install 'slipstream-rl[compare]'")


# -- statistics ------------------------------------------------------------------------------------


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
    return importlib.import_module("scipy.stats").trim_mean(x, 0.25, axis=axis)


def interval(x: Array) -> tuple[Any, Any] | None:
    """95 % percentile-bootstrap interval of the IQM over axis 0 of `x` `[runs, ...]`; None for a single run."""
    if len(x) < 2:
        return None
    found = importlib.import_module("scipy.stats").bootstrap(
        (x,), iqm, n_resamples=RESAMPLES, vectorized=True, axis=0, method="percentile", rng=np.random.default_rng(0)
    )
    return found.confidence_interval.low, found.confidence_interval.high


def statistic(values: Sequence[float], censored: Sequence[bool] | None = None) -> Statistic | None:
    """Statistics over runs, or None of no run.

    A censored run is one whose true value is known to be more than the one given. It is counted with that value;
    a statistic that would change were the true value beyond all bounds is marked open: it is a lower bound.
    """
    if not len(values):
        return None
    x, cut = np.array(values, float), np.array(censored if censored is not None else [False] * len(values), bool)

    def all_of(v: Array) -> list[float | None]:
        bounds = interval(v)
        ends = [None, None] if bounds is None else [float(bounds[0]), float(bounds[1])]
        return [float(np.median(v)), float(iqm(v)), *ends]

    least = all_of(x)
    most = all_of(np.where(cut, FAR, x)) if cut.any() else least
    is_open = [a is not None and b is not None and not np.isclose(a, b, rtol=1e-9) for a, b in zip(least, most)]  # noqa: B905
    return Statistic(len(x), least[0] or 0.0, least[1] or 0.0, least[2], least[3], *is_open)


def statistics(c: Comparison, cell: str) -> dict[str, Statistic | None]:
    """Every statistic of a cell by key; those to the target are None where there is no target."""
    runs = c.of(cell)
    out: dict[str, Statistic | None] = {}
    for key in TO_TARGET:
        values = [getattr(r, key) for r in runs]
        out[key] = None if c.target is None else statistic(values, [not r.reached for r in runs])
    for key in FIGURES:
        out[key] = statistic([v for r in runs if (v := r.figures.get(key)) is not None])
    return out


# -- tables ----------------------------------------------------------------------------------------


def _shown(s: Statistic | None, shape: Callable[[float], str], runs: int, wide: bool) -> str:
    if s is None:
        return "-"
    text = ("> " if s.open_median else "") + shape(s.median)
    if wide and s.low is not None and s.high is not None:
        low, high = ("> " * s.open_low) + shape(s.low), ("> " * s.open_high) + shape(s.high)
        text += f"; {'> ' * s.open_iqm}{shape(s.iqm)} [{low}, {high}]"
    return text + (f" ({s.n} of {runs} runs)" if s.n < runs else "")


def tables(c: Comparison) -> list[tuple[str, list[list[str]]]]:
    """Titles and rows (the first is the header) of the table's parts: one row a cell."""
    keys = list(FIGURES)
    parts: list[tuple[str, list[str]]] = [
        ("To the target", [*TO_TARGET, "peak_return", "steps_per_second"]),
        ("Cost", keys[2:10]), ("Consistency", keys[10:]),
    ]  # fmt: skip
    out = []
    for title, columns in parts:
        first = title == "To the target"
        names = [TO_TARGET[k][0] + " to target" if k in TO_TARGET else FIGURES[k][0] for k in columns]
        rows = [["", *(["reached", "failed"] if first else []), *names]]
        for cell in c.cells:
            runs, found = c.of(cell), statistics(c, cell)
            reached = "-" if c.target is None else f"{sum(r.reached for r in runs)}/{len(runs)}"
            counts = [reached, str(sum(r.failure is not None for r in runs))] if first else []
            cells = [
                _shown(found[k], _shape(k), len(runs), k in TO_TARGET or k in WITH_INTERVAL) for k in columns
            ]  # fmt: skip
            rows.append([cell, *counts, *cells])
        out.append((title, rows))
    return out


def _shape(key: str) -> Callable[[float], str]:
    if key in TO_TARGET:
        return TO_TARGET[key][1].format
    _, scale, shape = FIGURES[key]
    return lambda v: shape.format(v * scale)


def seeds(c: Comparison, cell: str, key: str) -> str:
    """One figure to the target of every run of a cell, by seed: `>` where it was not reached, and failures named."""
    shape = _shape(key)
    return " · ".join(
        ("" if r.reached else "> ") + shape(getattr(r, key)) + ("" if r.failure is None else " (failed)")
        for r in c.of(cell)
    )


def notes(c: Comparison) -> list[str]:
    """What must be known to judge the figures."""
    lines = [f"Command: `{c.command}`"]
    for m in c.machines:
        versions = ", ".join(f"{k} {m[k]}" for k in ("slipstream", "python", "torch", "gymnasium", "numpy", "scipy")
                             if k in m)  # fmt: skip
        lines.append(f"{m['first']} to {m['last']}: {m['cpu']}, {m['cores']} usable cores, {m['system']}; {versions}")
    if len(c.machines) > 1:
        lines.append("The runs were NOT all made with the same machine and versions: ratios between them mislead.")
    lines += [
        "Median over seeds; where it follows, the interquartile mean with its bootstrap 95 % interval. A run that failed "
        "or did not reach the target is counted with what it used; `>` marks a lower bound because of it.",
        "Seconds to the target count from the start of the run, workers' start included; CPU is of all usable cores, "
        "GPU of the busiest one; memory is the peak PSS of the process tree.",
    ]
    return lines


def text(c: Comparison) -> list[str]:
    """The table as aligned lines for a terminal."""
    lines = []
    for title, rows in tables(c):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["", title, *("  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in rows)]
    return [*lines, "", f"written: {c.directory}/comparison.csv, .md, .html, .json"]


def title_of(c: Comparison) -> str:
    """One line that says what was compared."""
    aim = "no target" if c.target is None else f"to a mean return of {c.target:g}"
    return f"{c.env}, {aim}: {len(c.cells)} ways, {len({r.seed for r in c.runs})} seeds each"


def markdown(c: Comparison) -> str:
    """The whole comparison as Markdown."""
    escaped = lambda row: "| " + " | ".join(x.replace("|", "\\|") for x in row) + " |"  # noqa: E731
    lines = [f"# {title_of(c)}", "", *(f"- {n}" for n in notes(c))]
    for title, rows in tables(c):
        lines += ["", f"## {title}", "", escaped(rows[0]), "| --- " * len(rows[0]) + "|", *map(escaped, rows[1:])]
    lines += ["", f"## Every seed ({', '.join(str(s) for s in sorted({r.seed for r in c.runs}))})", ""]
    for cell in c.cells:
        lines += [f"- {cell}, {TO_TARGET[k][0]} to target: {seeds(c, cell, k)}" for k in TO_TARGET]
    failed = [r for r in c.runs if r.failure is not None]
    lines += ["", "## Failures", ""] if failed else []
    lines += [f"- {r.cell}, seed {r.seed}: {' '.join(str(r.failure).split())[-300:]}" for r in failed]
    return "\n".join([*lines, ""])


def csv_text(c: Comparison) -> str:
    """One row a cell: counts, then for every figure the median, IQM, interval, runs counted and lower-bound marks."""
    rows: list[dict[str, Any]] = []
    for cell in c.cells:
        runs = c.of(cell)
        row: dict[str, Any] = {"cell": cell, "runs": len(runs), "reached": sum(r.reached for r in runs),
                               "failed": sum(r.failure is not None for r in runs)}  # fmt: skip
        for key, s in statistics(c, cell).items():
            name = f"{key}_to_target" if key in TO_TARGET else key
            for field in ("median", "iqm", "low", "high", "n"):
                row[f"{name}_{field}"] = None if s is None else getattr(s, field)
            if key in TO_TARGET:
                row[f"{name}_median_is_lower_bound"] = None if s is None else s.open_median
                row[f"{name}_iqm_is_lower_bound"] = None if s is None else s.open_iqm
                row[f"{name}_seeds"] = " ".join(("" if r.reached else ">") + f"{getattr(r, key):.6g}" for r in runs)
        rows.append(row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


# -- pictures --------------------------------------------------------------------------------------


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


def _figure(draw: Callable[[Any, list[Any]], None], cells: int, height: float = 4.2) -> str:
    """An SVG element that refers to nothing outside itself."""
    matplotlib = importlib.import_module("matplotlib")
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, height), layout="constrained")
    colours = matplotlib.colormaps["tab10" if cells <= 10 else "turbo"]
    many = [colours(i if cells <= 10 else i / cells) for i in range(cells)]
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(figure.subplots(), many)
        figure.savefig(out, format="svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    return svg[svg.index("<svg") :].replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:", "")


def pictures(c: Comparison) -> list[tuple[str, str]]:
    """Title and SVG of each picture."""

    def curves(against: str, label: str) -> Callable[[Any, list[Any]], None]:
        def draw(axes: Any, colours: list[Any]) -> None:
            for cell, colour in zip(c.cells, colours, strict=True):
                found = curve(c.of(cell), against)
                if found is not None:
                    axes.plot(found[0], found[1], color=colour, label=cell)
                    if found[2] is not None:
                        axes.fill_between(found[0], *found[2], color=colour, alpha=0.2, linewidth=0)
            if c.target is not None:
                axes.axhline(c.target, color="0.5", linestyle=":", linewidth=1)
            axes.set(xlabel=label, ylabel="return")
            axes.legend(fontsize="small")

        return draw

    def phases(axes: Any, colours: list[Any]) -> None:
        left = np.zeros(len(c.cells))
        for name in ("collect", "gradient", "pull", "wait", "apply"):
            totals = [max(1e-9, sum(sum(r.phases.values()) for r in c.of(cell))) for cell in c.cells]
            width = np.array([sum(r.phases.get(name, 0) for r in c.of(cell)) for cell in c.cells]) / totals
            axes.barh(c.cells, 100 * width, left=100 * left, label=name)
            left += width
        axes.invert_yaxis()
        axes.set(xlabel="% of the workers' time")
        axes.legend(fontsize="small", ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    def staleness(axes: Any, colours: list[Any]) -> None:
        for cell, colour in zip(c.cells, colours, strict=True):
            rows = [r.staleness_histogram for r in c.of(cell)]
            total = np.zeros(max(map(len, rows), default=0))
            for row in rows:
                total[: len(row)] += row
            if total.sum() > 0:
                total = total[: int(np.flatnonzero(total)[-1]) + 1]
                axes.step(
                    range(len(total)), 100 * total / total.sum(), where="mid", color=colour, label=cell, marker="."
                )
        axes.set(xlabel="staleness (updates)", ylabel="% of gradients")
        if axes.lines:
            axes.legend(fontsize="small")

    n = len(c.cells)
    return [
        ("Return against environment steps", _figure(curves("steps", "environment steps"), n)),
        ("Return against wall time", _figure(curves("wall", "seconds of training"), n)),
        ("Time spent per phase", _figure(phases, n, 1.5 + 0.35 * n)), ("Staleness", _figure(staleness, n)),
    ]  # fmt: skip


STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}table{border-collapse:"
    "collapse;display:block;overflow-x:auto}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left;"
    "white-space:nowrap}svg{max-width:100%;height:auto}"
)


def page(c: Comparison) -> str:
    """The whole comparison as one HTML page without references to anything outside it."""
    e = html.escape
    body = [f"<h1>{e(title_of(c))}</h1>", "<ul>", *(f"<li>{e(n)}</li>" for n in notes(c)), "</ul>"]
    every = [["", *(f"{TO_TARGET[k][0]} to target, by seed" for k in TO_TARGET)]]
    every += [[cell, *(seeds(c, cell, k) for k in TO_TARGET)] for cell in c.cells]
    failed = [[f"{r.cell}, seed {r.seed}", str(r.failure)] for r in c.runs if r.failure is not None]
    more = [("Every seed", every), *([("Failures", [["run", "why"], *failed])] if failed else [])]
    for title, rows in [*tables(c), *more]:
        marked = ["".join(f"<{t}>{e(x)}</{t}>" for x in r) for t, r in zip(["th"] + ["td"] * len(rows), rows)]  # noqa: B905
        body += [f"<h2>{e(title)}</h2>", "<table>", *(f"<tr>{m}</tr>" for m in marked), "</table>"]
    body += [f"<h2>{e(title)}</h2>\n{svg}" for title, svg in pictures(c)]
    head = f'<meta charset="utf-8"><title>{e(title_of(c))}</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def write(c: Comparison, out: Path) -> None:
    """Write comparison.csv, comparison.md, comparison.html and comparison.json."""
    (out / "comparison.csv").write_text(csv_text(c))
    (out / "comparison.md").write_text(markdown(c))
    (out / "comparison.html").write_text(page(c))
    (out / "comparison.json").write_text(json.dumps(c.to_dict(), indent=1))
