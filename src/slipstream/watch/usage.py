"""Memory and CPU of a run's processes. Every value may be missing; none ever stops training."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

MIB = 2**20


def pss_mib(pids: list[int]) -> float | None:
    """Proportional set size of processes in MiB (shared pages counted once), or None where unknown."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except (OSError, ValueError):
            continue  # it has just ended
    return total / MIB if total else _rss_mib(pids)


def _rss_mib(pids: list[int]) -> float | None:
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total / MIB if total else None


class Usage:
    """CPU use between looks, and the peak of memory."""

    def __init__(self) -> None:
        self.peak = 0.0
        self.now: float | None = None
        self.last: tuple[float, dict[int, float]] | None = None

    def memory(self, pids: list[int]) -> float | None:
        """PSS of this process and `pids` now; keeps the peak."""
        self.now = pss_mib([os.getpid(), *pids])
        self.peak = max(self.peak, self.now or 0.0)
        return self.now

    def cores(self, pids: list[int]) -> float | None:
        """Cores kept busy by this process and `pids` since the last look; None at the first."""
        spent: dict[int, float] = {}
        for pid in [os.getpid(), *pids]:
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                spent[pid] = times.user + times.system
        now = time.monotonic()
        before, self.last = self.last, (now, spent)
        if before is None or now <= before[0]:
            return None
        busy = sum(t - before[1].get(pid, 0.0) for pid, t in spent.items())
        return busy / (now - before[0])
