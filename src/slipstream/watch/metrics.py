"""What a run measures, read from the workers' rows: differences between two looks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.counters import RING, STALENESS_BINS, Counter
from slipstream.store import Store

MEANS = {
    "loss": Counter.LOSS,
    "policy_loss": Counter.POLICY_LOSS,
    "value_loss": Counter.VALUE_LOSS,
    "entropy": Counter.ENTROPY,
    "explained_variance": Counter.EXPLAINED_VARIANCE,
    "gradient_norm": Counter.GRADIENT_NORM,
    "gradient_norm_clipped": Counter.GRADIENT_NORM_CLIPPED,
    "clipped_share": Counter.CLIPPED,
}
OPTIONAL_MEANS = {"approx_kl": Counter.KL, "clip_fraction": Counter.CLIP_FRACTION}  # PPO's
SHARES = {
    "collect_share": Counter.T_COLLECT,
    "gradient_share": Counter.T_GRADIENT,
    "pull_share": Counter.T_PULL,
    "wait_share": Counter.T_WAIT,
    "apply_share": Counter.T_APPLY,
}
TOTALS = {
    "nonfinite_gradients": Counter.NONFINITE,
    "environment_failures": Counter.ENV_FAILURES,
    "reads_retried": Counter.READ_RETRIES,
    "reads_bad": Counter.READS_BAD,
    "gradients_dropped_stale": Counter.DROPPED_STALE,
    "bytes_down": Counter.BYTES_DOWN,
    "bytes_up": Counter.BYTES_UP,
}


@dataclass
class Episodes:
    """Finished episodes of all workers, in the order they ended.

    Only episodes that have ended are known, so the first numbers are of short ones; every mean is given with
    its count.
    """

    window: int
    returns: deque[float] = field(default_factory=deque)
    lengths: deque[int] = field(default_factory=deque)
    count: int = 0
    lost: int = 0  # overwritten in a ring before this process looked
    heads: NDArray[np.int64] | None = None
    solved_at: int | None = None
    solved_after: float | None = None  # seconds of perf_counter
    new_returns: list[float] = field(default_factory=list)
    new_lengths: list[int] = field(default_factory=list)

    def look(self, store: Store, target: float | None) -> None:
        """Take over what has ended since the last look; note where the target was first reached."""
        if self.heads is None:
            self.heads = np.zeros(store.layout.workers, np.int64)
        fresh: list[tuple[float, float, float, float]] = []
        for w in range(store.layout.workers):
            head = int(store.rows[w, Counter.EPISODE_HEAD])
            first = max(int(self.heads[w]), head - RING + 16)  # rows about to be overwritten are left out
            self.lost += first - int(self.heads[w])
            ring = store.rings[w]
            fresh += [tuple(ring[i % RING]) for i in range(first, head)]  # type: ignore[misc]
            self.heads[w] = head
        for total, length, steps, when in sorted(fresh, key=lambda e: e[3]):
            self.count += 1
            self.returns.append(total)
            self.lengths.append(int(length))
            self.new_returns.append(total)
            self.new_lengths.append(int(length))
            if len(self.returns) > self.window:
                self.returns.popleft()
                self.lengths.popleft()
            full = len(self.returns) == self.window
            if full and target is not None and self.solved_at is None and self.mean >= target:
                self.solved_at, self.solved_after = int(steps), when

    @property
    def mean(self) -> float:
        """Mean return of the last `window` episodes (fewer at the beginning)."""
        return sum(self.returns) / len(self.returns) if self.returns else float("nan")


class Meter:
    """Turns rows into one flat dictionary a look; names are those of metrics.jsonl and TensorBoard."""

    def __init__(self, store: Store, window: int) -> None:
        self.store = store
        self.episodes = Episodes(window)
        self.rows = store.rows.copy()
        self.started = self.last = time.perf_counter()
        self.version, self.steps = store.progress()

    def look(self) -> dict[str, Any]:
        """Metrics of the time since the last look."""
        store, now = self.store, time.perf_counter()
        rows, before, seconds = store.rows.copy(), self.rows, max(1e-9, now - self.last)
        actors = store.layout.actors
        version, steps = store.progress()
        delta = rows - before
        total = delta.sum(0)
        learned = max(1.0, total[Counter.LEARNED])
        e = self.episodes
        out: dict[str, Any] = {
            "steps": steps,
            "updates": version,
            "wall": round(now - self.started, 4),
            "steps_per_second": (steps - self.steps) / seconds,
            "updates_per_second": (version - self.version) / seconds,
            "episodes": e.count,
            "return": e.mean,
            "return_episodes": len(e.returns),
            "length": sum(e.lengths) / len(e.lengths) if e.lengths else float("nan"),
            "bytes_per_second": total[Counter.BYTES] / seconds,
        }
        if e.new_returns:
            out["return_interval"] = float(np.mean(e.new_returns))
            out["length_interval"] = float(np.mean(e.new_lengths))
            e.new_returns.clear()
            e.new_lengths.clear()
        if total[Counter.LEARNED]:
            out |= {name: float(total[c] / learned) for name, c in MEANS.items()}
            out |= {name: float(total[c] / learned) for name, c in OPTIONAL_MEANS.items() if total[c]}
        out |= {name: float(delta[:actors, c].sum() / seconds / actors) for name, c in SHARES.items()}
        if actors < len(rows):
            server = delta[actors]
            out["server_busy_share"] = float(1 - server[Counter.T_IDLE] / seconds)
            out["server_apply_share"] = float(server[Counter.T_APPLY] / seconds)
        out |= {name: int(rows[:, c].sum()) for name, c in TOTALS.items()}
        out |= staleness(total[Counter.HISTOGRAM : Counter.HISTOGRAM + STALENESS_BINS])
        out["staleness_max"] = int(rows[:, Counter.STALENESS_MAX].max())
        reads = total[Counter.READS]
        if store.layout.in_place:
            out["reads_overlapped_share"] = float(total[Counter.READS_OVERLAPPED] / reads) if reads else 0.0
        out["worker_steps_per_second"] = [float(s / seconds) for s in delta[:actors, Counter.STEPS]]
        self.rows, self.last, self.version, self.steps = rows, now, version, steps
        return out

    def totals(self) -> dict[str, Any]:
        """Figures of the whole run so far, for its summary."""
        rows, actors = self.store.rows, self.store.layout.actors
        total, seconds = rows.sum(0), max(1e-9, time.perf_counter() - self.started)
        histogram = total[Counter.HISTOGRAM : Counter.HISTOGRAM + STALENESS_BINS]
        phases = {name.removesuffix("_share"): float(rows[:actors, c].sum()) for name, c in SHARES.items()}
        if actors < len(rows):
            phases["server_apply"] = float(rows[actors, Counter.T_APPLY])
        busy = max(1e-9, sum(phases[name.removesuffix("_share")] for name in SHARES))
        out: dict[str, Any] = {
            "wait_share": phases["wait"] / busy,
            "phases": {k: round(v, 4) for k, v in phases.items()},
            "staleness_histogram": [int(n) for n in histogram],
            "bytes_trajectories": 0,  # workers act and learn in one place
            "bytes_per_second": float(total[Counter.BYTES] / seconds),
            "reads": int(total[Counter.READS]),
            **{name: int(total[c]) for name, c in TOTALS.items()},
            **staleness(histogram),
            "staleness_max": int(rows[:, Counter.STALENESS_MAX].max()),
            "worker_steps": [int(s) for s in rows[:actors, Counter.STEPS]],
        }
        if self.store.layout.in_place:
            out["reads_overlapped_share"] = float(total[Counter.READS_OVERLAPPED] / max(1, total[Counter.READS]))
        return out


def staleness(histogram: NDArray[np.float64]) -> dict[str, float]:
    """Mean and 99th percentile of staleness from its histogram (the last bin counts as its lower end)."""
    n = histogram.sum()
    if n <= 0:
        return {"staleness_mean": 0.0, "staleness_p99": 0.0}
    bins = np.arange(len(histogram))
    p99 = int(np.searchsorted(histogram.cumsum(), 0.99 * n))
    return {"staleness_mean": float((histogram * bins).sum() / n), "staleness_p99": float(p99)}
