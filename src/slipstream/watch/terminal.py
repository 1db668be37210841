"""What a person sees while a run goes on: a live view on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, TextIO

BARS = "▁▂▃▄▅▆▇█"


def spark(values: list[float]) -> str:
    """A line of bars, lowest to highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1))] for v in values)


def duration(seconds: float) -> str:
    """`75` -> `1:15`."""
    s = int(seconds)
    return f"{s // 3600}:{s % 3600 // 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


def number(n: float) -> str:
    """`12345` -> `12,345`."""
    return f"{n:,.0f}"


class Plain:
    """One line every few seconds, without control characters: for pipes and log files."""

    def __init__(self, stream: TextIO, total_steps: int, every: float = 2.0) -> None:
        self.stream, self.total, self.every, self.last = stream, total_steps, every, 0.0

    def show(self, m: dict[str, Any], last: bool = False) -> None:
        """Print the metrics of a look, if it is time."""
        now = time.monotonic()
        if now - self.last < self.every and not last:
            return
        self.last = now
        mean = f"{m['return']:.1f} (last {m['return_episodes']})" if m["return_episodes"] else "-"
        print(
            f"steps {number(m['steps'])}/{number(self.total)}  {number(m['steps_per_second'])}/s  return {mean}  "
            f"updates {number(m['updates'])}  staleness {m['staleness_mean']:.2f}  "
            f"wait {100 * m['wait_share']:.1f} %",
            file=self.stream, flush=True,
        )  # fmt: skip

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class Live:
    """A table that is redrawn in place (rich)."""

    def __init__(self, stream: TextIO, title: str, total_steps: int) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self.console = Console(file=stream)
        self.title, self.total = title, total_steps
        self.returns: deque[float] = deque(maxlen=40)
        self.rates: deque[float] = deque(maxlen=10)
        self.live = RichLive(console=self.console, auto_refresh=False)
        self.live.start()

    def show(self, m: dict[str, Any], last: bool = False) -> None:
        """Draw the metrics of a look."""
        from rich.table import Table

        if m["return_episodes"]:
            self.returns.append(m["return"])
        self.rates.append(m["steps_per_second"])
        rate = max(1e-9, sum(self.rates) / len(self.rates))
        table = Table(show_header=False, box=None, padding=(0, 2), title=self.title, title_justify="left")
        done = min(1.0, m["steps"] / max(1, self.total))
        rows = [
            ("steps", f"{number(m['steps'])} of {number(self.total)}  ({100 * done:.0f} %)"),
            (
                "speed",
                f"{number(m['steps_per_second'])} steps/s   {number(m['updates_per_second'])} updates/s",
            ),
            (
                "return",
                f"{m['return']:.1f}  {spark(list(self.returns))}  mean of {m['return_episodes']} episodes"
                if m["return_episodes"]
                else "no episode has ended yet",
            ),
            ("staleness", f"mean {m['staleness_mean']:.2f}   99 %: {m['staleness_p99']:.0f}"),
            ("waiting", f"{100 * m['wait_share']:.1f} % of the workers' time"),
            ("time left", f"at most {duration(max(0, self.total - m['steps']) / rate)}"),
        ]
        if "reads_overlapped_share" in m:
            rows.insert(4, ("torn reads", f"at most {100 * m['reads_overlapped_share']:.2f} % (hogwild: by design)"))
        for name, text in rows:
            table.add_row(f"[dim]{name}[/dim]", text)
        self.live.update(table, refresh=True)

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the last picture on the screen."""
        self.live.stop()


class Silent:
    """Shows nothing."""

    def show(self, m: dict[str, Any], last: bool = False) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def view(mode: str, title: str, total_steps: int) -> Plain | Live | Silent:
    """The view for `mode`: `auto`, `plain` or `none`. Standard output is left to results."""
    stream = sys.stderr if mode == "json" else sys.stdout
    if mode in ("none", "json"):
        return Silent()
    if mode == "auto" and stream.isatty():
        return Live(stream, title, total_steps)
    return Plain(stream, total_steps)
