"""How many workers are fastest here: measured, not guessed."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.cores import usable_cores


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
    return min(n for n, rate in rates.items() if rate >= 0.95 * best)  # fewer, where it is as fast
