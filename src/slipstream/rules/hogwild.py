"""Rule `hogwild`: each worker steps the one slot in place, with no lock (Niu et al. 2011, arXiv 1106.5730).

By design a pull may mix versions, updates of one element may be lost, and increments of Adam's shared step
count too. What happens is measured: pulls during which another worker was writing are counted.
Normalizer moments alone are merged under the lock: a torn mean is not a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.counters import Counter, Phase
from slipstream.moments import merge
from slipstream.optimize import Stepper
from slipstream.store import Contribution, Snapshot, Store, Word, count


class Rule:
    """In place and lock-free; `version` is the number of pushes of all workers."""

    consistent = False

    def __init__(self, store: Store, stepper: Stepper, learning_rate: Callable[[int], float]) -> None:
        self.store, self.stepper, self.learning_rate = store, stepper, learning_rate
        # a worker killed while writing left its own count open
        store.row[Counter.WRITES_DONE] = store.row[Counter.WRITES_BEGUN]

    def _writes(self) -> tuple[float, float]:
        rows = self.store.rows
        return float(rows[:, Counter.WRITES_BEGUN].sum()), float(rows[:, Counter.WRITES_DONE].sum())

    def pull(self, into: Snapshot) -> int:
        """Copy the weights as they are; counts the pull if anybody was writing meanwhile."""
        store, slot = self.store, self.store.slots[0]
        version, steps = store.progress()
        begun, done = self._writes()
        into.weights[:] = slot.weights
        into.moments[:] = slot.moments
        into.header[:3] = version, version, steps
        store.row[Counter.READS] += 1
        store.row[Counter.BYTES] += into.weights.nbytes
        store.row[Counter.BYTES_DOWN] += into.weights.nbytes
        if begun != done or self._writes()[0] != begun:
            store.row[Counter.READS_OVERLAPPED] += 1
        return version

    def push(self, contribution: Contribution) -> None:
        """Step the weights where they are."""
        store, slot, row = self.store, self.store.slots[0], self.store.row
        version, steps = store.progress()
        if contribution.finite:
            row[Counter.PHASE] = Phase.APPLY
            row[Counter.WRITES_BEGUN] += 1
            if contribution.rows:
                staleness = version - contribution.version
                gradient = self.stepper.compensated(slot, contribution) if staleness else contribution.gradient
                self.stepper.step(slot, gradient, self.stepper.slower(self.learning_rate(steps), staleness))
            row[Counter.WRITES_DONE] += 1
            row[Counter.BYTES] += 2 * slot.bytes.nbytes
            self._merge(contribution)
        if store.control[Word.SAMPLE_WANTED]:
            store.gradients[-1] = contribution.gradient
            store.control[Word.SAMPLE_WANTED] = 0
        count(row, contribution, version - contribution.version)

    def _merge(self, contribution: Contribution) -> None:
        if not contribution.moments.size:
            return
        self.store.lock.acquire()
        try:
            at = 0
            for size in self.stepper.moment_sizes:
                part = slice(at, at + size)
                merge(self.store.slots[0].moments[part], contribution.moments[part])
                at += size
        finally:
            self.store.lock.release()

    def leave(self) -> None:
        """Nobody waits for this worker: nothing to do."""
