"""Rule `lock`: each worker applies its own gradient, holding the lock (A3C)."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.counters import Counter
from slipstream.optimize import Stepper
from slipstream.store import Contribution, Snapshot, Store, Word, count


class Rule:
    """Updates are whole and in order; reads are whole and take no lock."""

    consistent = True

    def __init__(self, store: Store, stepper: Stepper, learning_rate: Callable[[int], float]) -> None:
        self.store, self.stepper, self.learning_rate = store, stepper, learning_rate

    def pull(self, into: Snapshot) -> int:
        """Copy the newest version into `into`; returns its number."""
        self.store.row[Counter.BYTES] += into.weights.nbytes
        self.store.row[Counter.BYTES_DOWN] += into.weights.nbytes
        return self.store.read(into)

    def push(self, contribution: Contribution) -> None:
        """Apply a gradient to the newest version, which may be later than the one it came from."""
        with self.store.update() as slot:
            staleness = slot.version - contribution.version
            self.stepper.apply(slot, [contribution], self.learning_rate)
            self.store.note(slot, [contribution])
            if self.store.control[Word.SAMPLE_WANTED]:
                self.store.gradients[-1] = contribution.gradient
                self.store.control[Word.SAMPLE_WANTED] = 0
        count(self.store.row, contribution, staleness)

    def leave(self) -> None:
        """Nobody waits for this worker: nothing to do."""
