"""Rule `server`: one process owns the weights; workers send it gradients, compressed if asked (serve.py).

A worker waits until its gradient is applied (`pipeline` allows more on the way), as in K-async SGD (Dutta et al. 2018,
arXiv 1803.01113). With `max_staleness=s` it waits besides while it is more than s rollouts ahead of the slowest
(stale-synchronous parallel, Ho et al. 2013): `quorum` = workers and s = 0 is `sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from slipstream.counters import Counter, Phase
from slipstream.optimize import Stepper
from slipstream.store import Contribution, Snapshot, Store, Word
from slipstream.transport import Ring, attach


class Rule:
    """The worker's side. Reads are whole: weights come from the store, which the server alone writes."""

    consistent = True

    def __init__(self, store: Store, stepper: Stepper, learning_rate: Callable[[int], float]) -> None:
        self.store, self.options, self.uplink = store, stepper.options, Ring(store, store.worker or 0)
        row = store.row
        clocks = [r[Counter.CLOCK] for r in store.rows[: store.layout.actors] if r[Counter.ACTIVE]]
        row[Counter.CLOCK] = min(clocks, default=0)  # who joins is the slowest, not behind everybody
        row[Counter.ACTIVE] = 1

    def pull(self, into: Snapshot) -> int:
        """Copy the newest version into `into`; returns its number."""
        attach(self.store, len(into.weights))
        self.store.row[Counter.BYTES] += into.weights.nbytes
        self.store.row[Counter.BYTES_DOWN] += into.weights.nbytes
        return self.store.read(into)

    def push(self, contribution: Contribution) -> None:
        """Send a gradient; returns when few enough are on the way and this worker is not too far ahead."""
        row, ring = self.store.row, self.uplink
        row[Counter.PHASE] = Phase.WAIT
        begun = perf_counter()
        self._wait(lambda: ring.full)  # what an earlier incarnation sent may still be there
        waited = perf_counter() - begun
        sent = ring.send(contribution)
        row[Counter.BYTES] += sent
        row[Counter.BYTES_UP] += sent
        row[Counter.STEPS] += contribution.samples
        begun = perf_counter()
        self._wait(lambda: ring.in_flight >= self.options.pipeline)
        row[Counter.CLOCK] += 1
        bound = self.options.max_staleness
        if bound is not None:
            for other in range(self.store.layout.actors):
                if other != contribution.worker:
                    self.store.bell.ring(other)  # it may have waited for this worker's clock
            self._wait(lambda: row[Counter.CLOCK] - self._slowest() > bound)
        waited += perf_counter() - begun
        row[Counter.T_WAIT] += waited
        row[Counter.T_BLOCKED] += waited

    def _wait(self, condition: Callable[[], bool]) -> None:
        row, control = self.store.row, self.store.control
        while condition() and not control[Word.STOP]:
            row[Counter.BEAT] += 1
            self.uplink.wait()

    def _slowest(self) -> float:
        rows = self.store.rows[: self.store.layout.actors]
        return float(np.min(rows[rows[:, Counter.ACTIVE] == 1, Counter.CLOCK]))

    def leave(self) -> None:
        """From now on nobody waits for this worker."""
        self.store.row[Counter.ACTIVE] = 0
