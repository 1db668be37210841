"""Rule `sync`: all workers meet; the mean of their gradients, weighted by samples, is applied once (A2C).

Whoever completes the round applies it. A worker that leaves or dies is not waited for, and one that
joins takes part from the round it has pulled.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from slipstream.counters import Counter, Phase
from slipstream.optimize import Stepper
from slipstream.store import Contribution, Snapshot, Store, Word, count


class Rule:
    """One update a round; staleness is 0."""

    consistent = True

    def __init__(self, store: Store, stepper: Stepper, learning_rate: Callable[[int], float]) -> None:
        self.store, self.stepper, self.learning_rate, self.bell = store, stepper, learning_rate, store.bell
        store.lock.acquire()  # a round is either over before this worker joins, or waits for it
        store.row[Counter.OFFERED] = 0
        store.row[Counter.ACTIVE] = 1
        store.lock.release()

    def pull(self, into: Snapshot) -> int:
        """Copy the newest version into `into`; returns its number."""
        self.store.row[Counter.BYTES] += into.weights.nbytes
        self.store.row[Counter.BYTES_DOWN] += into.weights.nbytes
        return self.store.read(into)

    def push(self, contribution: Contribution) -> None:
        """Offer a gradient to the round and wait until that is applied."""
        store, row = self.store, self.store.row
        mine = store.worker or 0
        store.gradients[mine] = contribution.gradient
        c = contribution
        store.offers["numbers"][mine] = (
            c.finite, c.samples, c.tick, c.version, c.worker, c.incarnation, c.rollout, c.weight,
        )  # fmt: skip
        store.offers["prints"][mine] = c.loss, c.norm
        store.offers["moments"][mine] = c.moments
        store.fence()
        row[Counter.OFFERED] = c.tick + 1
        row[Counter.PHASE] = Phase.WAIT
        begun, applying = perf_counter(), row[Counter.T_APPLY]
        while store.tick == c.tick:
            if self._complete(c.tick):
                self._apply(c.tick)
            else:
                row[Counter.BEAT] += 1
                self.bell.wait()
        waited = perf_counter() - begun - (row[Counter.T_APPLY] - applying)
        row[Counter.T_WAIT] += waited
        row[Counter.T_BLOCKED] += waited
        row[Counter.BYTES] += c.gradient.nbytes
        count(row, c, 0)

    def _complete(self, tick: int) -> bool:
        rows = self.store.rows
        return bool((rows[rows[:, Counter.ACTIVE] == 1, Counter.OFFERED] == tick + 1).all())

    def _apply(self, tick: int) -> None:
        """Apply the round, unless another worker has meanwhile or somebody joined."""
        store = self.store
        store.lock.acquire()
        try:
            if store.tick != tick or not self._complete(tick):
                return
            store.control[Word.HOLDER] = (store.worker or 0) + 1
            store.row[Counter.PHASE] = Phase.APPLY
            begun = perf_counter()
            offered = [self._offered(int(w)) for w in np.flatnonzero(store.rows[:, Counter.ACTIVE] == 1)]
            with store.transaction() as slot:
                self.stepper.apply(slot, offered, self.learning_rate)
                store.note(slot, offered)
                if store.control[Word.SAMPLE_WANTED]:
                    store.gradients[-1] = offered[0].gradient
                    store.control[Word.SAMPLE_WANTED] = 0
            store.row[Counter.T_APPLY] += perf_counter() - begun
        finally:
            store.control[Word.HOLDER] = 0
            store.lock.release()
        for c in offered:
            if c.worker != store.worker:
                self.bell.ring(c.worker)

    def _offered(self, worker: int) -> Contribution:
        finite, samples, tick, version, index, incarnation, rollout, weight = (
            int(n) for n in self.store.offers["numbers"][worker]
        )
        loss, norm = (float(x) for x in self.store.offers["prints"][worker])
        return Contribution(
            self.store.gradients[worker], bool(finite), samples, tick, version, index, incarnation, rollout,
            self.store.offers["moments"][worker], loss, norm, weight,
        )  # fmt: skip

    def leave(self) -> None:
        """From now on no round waits for this worker."""
        self.store.lock.acquire()
        self.store.row[Counter.ACTIVE] = 0
        self.store.lock.release()
