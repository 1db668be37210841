"""What came of a comparison as text, CSV, Markdown and one HTML page that needs nothing outside itself."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.compare_statistics import (
    FIGURES,
    MOVED,
    PHASES,
    TO_TARGET,
    Comparison,
    Measured,
    Statistic,
    curve,
    statistics,
)

Draw = Callable[[Any, list[Any]], None]
Table = tuple[str, list[list[str]]]
"""Title and rows; the first row is the head."""

TO_TARGET_FORMAT = {"steps": "{:,.0f}", "seconds": "{:,.1f}", "updates": "{:,.0f}"}
FIGURE_FORMAT: dict[str, tuple[str, float, str]] = {  # title, factor, format
    "peak_return": ("peak return", 1, "{:,.1f}"),
    "steps_per_second": ("steps/s", 1, "{:,.0f}"),
    **{f"bytes{k}_per_update": (what or "kB/update", 1e-3, "{:,.1f}") for k, what in MOVED.items()},
    **{f"gb{k}_per_hour": (what or "GB/hour", 1, "{:,.2f}") for k, what in MOVED.items()},
    "peak_memory_mib": ("peak memory (PSS), MiB", 1, "{:,.0f}"),
    "cpu": ("CPU %", 100, "{:.0f}"),
    "gpu": ("GPU %", 100, "{:.0f}"),
    "staleness_mean": ("staleness, mean", 1, "{:.2f}"),
    "staleness_p99": ("99th percentile", 1, "{:.0f}"),
    "dropped_stale": ("dropped as stale", 1, "{:,.0f}"),
    "wait_share": ("waiting (lock) %", 100, "{:.1f}"),
    "torn_share": ("torn reads at most %", 100, "{:.2f}"),
}
PARTS = (  # the table's parts after those to the target: figures of each, and whether with their intervals
    ("Return and speed", FIGURES[:2], True),
    ("Bytes moved: together; weights down, gradients up, trajectories", FIGURES[2:10], False),
    ("Machine and consistency", FIGURES[10:], False),
)


# -- tables ----------------------------------------------------------------------------------------


def tables(c: Comparison) -> list[Table]:
    """The parts of the table: one row a cell."""
    seeds = ", ".join(str(s) for s in sorted({r.seed for r in c.runs}))
    found = {cell: statistics(c, cell) for cell in c.cells}
    out: list[Table] = []
    for key, what in TO_TARGET.items():
        shape = TO_TARGET_FORMAT[key].format
        rows = [["", "reached", "failed", "median", "IQM", "95 % interval", f"seeds {seeds}"]]
        for cell in c.cells:
            runs, s = c.of(cell), found[cell][f"{key}_to_target"]
            reached = "-" if s is None else f"{sum(r.reached for r in runs)}/{len(runs)}"
            failed = str(sum(r.failure is not None for r in runs))
            rows.append([cell, reached, failed, *_spread(s, shape), " · ".join(_seed(r, key) for r in runs)])
        out.append((f"{what.capitalize()} to target", rows))
    for title, keys, wide in PARTS:
        rows = [["", *(FIGURE_FORMAT[k][0] for k in keys)]]
        for cell in c.cells:
            rows.append([cell, *(_figure(k, found[cell][k], len(c.of(cell)), wide) for k in keys)])
        out.append((title, rows))
    failed_runs = [[f"{r.cell}, seed {r.seed}", " ".join(str(r.failure).split())[-300:]] for r in c.runs if r.failure]
    return [*out, ("Failures", [["run", "why"], *failed_runs])] if failed_runs else out


def _spread(s: Statistic | None, shape: Callable[[float], str]) -> tuple[str, str, str]:
    """Median, interquartile mean and interval, each with its mark where it is a lower bound."""
    if s is None:
        return "-", "-", "-"
    ends = "-"
    if s.low is not None and s.high is not None:
        ends = f"{'> ' * s.open_low}{shape(s.low)} to {'> ' * s.open_high}{shape(s.high)}"
    return "> " * s.open_median + shape(s.median), "> " * s.open_iqm + shape(s.iqm), ends


def _seed(r: Measured, key: str) -> str:
    """A run's figure to the target: `>` where it was not reached, and failures named."""
    text = TO_TARGET_FORMAT[key].format(getattr(r, key))
    return ("" if r.reached else "> ") + text + ("" if r.failure is None else " (failed)")


def _figure(key: str, s: Statistic | None, runs: int, wide: bool) -> str:
    if s is None:
        return "-"
    _, factor, form = FIGURE_FORMAT[key]
    median, mean, ends = _spread(s, lambda v: form.format(v * factor))
    text = f"{median}; {mean} ({ends})" if wide and ends != "-" else median
    return text + (f" [{s.n} of {runs} runs]" if s.n < runs else "")


def title_of(c: Comparison) -> str:
    """One line that says what was compared."""
    aim = "no target" if c.target is None else f"to a mean return of {c.target:g}"
    return f"{c.env}, {aim}: {len(c.cells)} ways, {len({r.seed for r in c.runs})} seeds each"


def notes(c: Comparison) -> list[str]:
    """What must be known to judge the figures."""
    lines = [f"Command: {c.command}", f"Ways: {c.grid}."]
    for m in c.machines:
        versions = ", ".join(f"{k} {v}" for k, v in m["versions"].items())
        lines.append(f"{m['first']} to {m['last']}: {m['cpu']}, {m['cores']} usable cores, {m['system']}; {versions}")
    if len(c.machines) > 1:
        lines.append("The runs were NOT all made with the same machine and versions: ratios between them mislead.")
    return [
        *lines,
        "Every run counts. One that failed or did not reach the target counts to the target with what it used; > marks "
        "a figure that is only a lower bound because of it. Other figures are medians of the runs that have them, "
        "where two more follow: the interquartile mean (IQM) and its 95 % bootstrap interval.",
        "Seconds to target count from the start of the run, the start of its workers included. Memory is the peak of "
        "all its processes, CPU is of all usable cores, GPU of the busiest one, both from start to end.",
    ]  # fmt: skip


def text(c: Comparison) -> list[str]:
    """The table as aligned lines for a terminal."""
    lines = []
    for title, rows in tables(c):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["", title, *("  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in rows)]
    return [*lines, "", f"written: {c.directory}/comparison.csv, .md, .html, .json"]


def markdown(c: Comparison) -> str:
    """The whole comparison as Markdown."""
    lines = [f"# {title_of(c)}", "", *(f"- {n}" for n in notes(c))]
    for title, (head, *rows) in tables(c):
        lines += ["", f"## {title}", "", _marked(head), "| --- " * len(head) + "|", *map(_marked, rows)]
    return "\n".join([*lines, ""])


def _marked(row: list[str]) -> str:
    return "| " + " | ".join(x.replace("|", "\\|") for x in row) + " |"


def csv_text(c: Comparison) -> str:
    """One row a cell: counts, then for every figure the median, IQM, interval, runs counted and lower-bound marks."""
    rows: list[dict[str, Any]] = []
    for cell in c.cells:
        runs = c.of(cell)
        row: dict[str, Any] = {"cell": cell, "runs": len(runs), "reached": sum(r.reached for r in runs),
                               "failed": sum(r.failure is not None for r in runs)}  # fmt: skip
        for name, s in statistics(c, cell).items():
            for field in ("median", "iqm", "low", "high"):
                row[f"{name}_{field}"] = None if s is None else getattr(s, field)
                if name.endswith("_to_target"):
                    row[f"{name}_{field}_is_lower_bound"] = None if s is None else getattr(s, f"open_{field}")
            row[f"{name}_n"] = 0 if s is None else s.n
            row[f"{name}_seeds"] = " ".join(_plain(r, name) for r in runs)
        rows.append(row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _plain(r: Measured, name: str) -> str:
    """One run's figure, for a list by seed: `-` where unknown."""
    if name in r.figures:
        value = r.figures[name]
        return "-" if value is None else f"{value:.6g}"
    return ("" if r.reached else ">") + f"{getattr(r, name.removesuffix('_to_target')):.8g}"


# -- pictures --------------------------------------------------------------------------------------


def pictures(c: Comparison) -> list[tuple[str, str]]:
    """Title and SVG of each picture."""
    n = len(c.cells)
    return [
        ("Return against environment steps", _svg(_curves(c, "steps", "environment steps"), n)),
        ("Return against wall time", _svg(_curves(c, "wall", "seconds of training"), n)),
        ("Time spent per phase", _svg(_phases(c), n, 1.5 + 0.35 * n)),
        ("Staleness", _svg(_staleness(c), n)),
    ]


def _svg(draw: Draw, cells: int, height: float = 4.2) -> str:
    """An SVG element that refers to nothing outside itself."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    colours = matplotlib.colormaps["tab10" if cells <= 10 else "turbo"]
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(figure.subplots(), [colours(i if cells <= 10 else i / cells) for i in range(cells)])
        figure.savefig(out, format="svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :])  # HTML knows them
    return svg.replace("xlink:href", "href")


def _curves(c: Comparison, against: str, label: str) -> Draw:
    def draw(axes: Any, colours: list[Any]) -> None:
        for cell, colour in zip(c.cells, colours, strict=True):
            runs = c.of(cell)
            found, known = curve(runs, against), sum(bool(r.curve["return"]) for r in runs)
            if found is not None:
                x, middle, band = found
                name = cell + (f" [{known} of {len(runs)} runs]" if known < len(runs) else "")
                axes.plot(x, middle, color=colour, label=name, marker="." if x[0] == x[-1] else "")
                if band is not None:
                    axes.fill_between(x, *band, color=colour, alpha=0.2, linewidth=0)
        if c.target is not None:
            axes.axhline(c.target, color="0.5", linestyle=":", linewidth=1)
        axes.set(xlabel=label, ylabel="return (IQM over seeds, 95 % interval)")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")

    return draw


def _phases(c: Comparison) -> Draw:
    def draw(axes: Any, _: list[Any]) -> None:
        totals = {cell: sum(sum(r.phases.values()) for r in c.of(cell)) or 1.0 for cell in c.cells}
        left = np.zeros(len(c.cells))
        for name in PHASES:
            share = np.array([100 * sum(r.phases[name] for r in c.of(cell)) / totals[cell] for cell in c.cells])
            axes.barh(c.cells, share, left=left, label=name)
            left += share
        axes.invert_yaxis()
        axes.set(xlabel="% of the workers' time")
        axes.legend(fontsize="small", ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return draw


def _staleness(c: Comparison) -> Draw:
    def draw(axes: Any, colours: list[Any]) -> None:
        for cell, colour in zip(c.cells, colours, strict=True):
            rows = [r.staleness_histogram for r in c.of(cell)]
            total = np.zeros(max(map(len, rows), default=0))
            for row in rows:
                total[: len(row)] += row
            if total.any():
                total = total[: int(np.flatnonzero(total)[-1]) + 1]
                axes.step(np.arange(len(total)), 100 * total / total.sum(), where="mid", color=colour, label=cell,
                          marker=".")  # fmt: skip
        axes.set(xlabel="staleness (updates)", ylabel="% of gradients")
        if axes.lines:
            axes.legend(fontsize="small")

    return draw


STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}table{border-collapse:"
    "collapse;display:block;overflow-x:auto}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;text-align:left;"
    "white-space:nowrap}svg{max-width:100%;height:auto}"
)


def page(c: Comparison) -> str:
    """The whole comparison as one HTML page without references to anything outside it."""
    e = html.escape
    body = [f"<h1>{e(title_of(c))}</h1>", "<ul>", *(f"<li>{e(n)}</li>" for n in notes(c)), "</ul>"]
    for title, (head, *rows) in tables(c):
        marked = ["".join(f"<th>{e(x)}</th>" for x in head), *("".join(f"<td>{e(x)}</td>" for x in r) for r in rows)]
        body += [f"<h2>{e(title)}</h2>", "<table>", *(f"<tr>{m}</tr>" for m in marked), "</table>"]
    body += [f"<h2>{e(title)}</h2>\n{svg}" for title, svg in pictures(c)]
    top = f'<meta charset="utf-8"><title>{e(title_of(c))}</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{top}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def write(c: Comparison, out: Path) -> None:
    """Write comparison.csv, comparison.md, comparison.html and comparison.json."""
    (out / "comparison.csv").write_text(csv_text(c))
    (out / "comparison.md").write_text(markdown(c))
    (out / "comparison.html").write_text(page(c))
    (out / "comparison.json").write_text(json.dumps(c.to_dict(), indent=1, allow_nan=False))
