"""The server process of rule `server`: takes gradients from the workers' rings and makes versions of them.

All its state is in the store: it may be killed at any moment and started again.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import build
from slipstream.config import Run, module
from slipstream.counters import Counter, Phase
from slipstream.optimize import Stepper
from slipstream.store import Slot, Store, Word, count
from slipstream.transport import Message, Rings, ServerEnd


class Server:
    """Averages `quorum` gradients into each update, in the order in which it saw them arrive."""

    def __init__(self, store: Store, stepper: Stepper, rate: Any, decompress: Any, transport: ServerEnd) -> None:
        self.store, self.stepper, self.rate, self.decompress = store, stepper, rate, decompress
        self.transport, self.options = transport, stepper.options
        actors = store.layout.actors
        self.seen = store.current.applied.copy()  # number of the last message of each worker taken up or applied
        for worker in range(actors):
            transport.acknowledge(worker, int(self.seen[worker]))  # published by a server that died before it said so
        self.queue: list[tuple[int, int]] = []  # (worker, number) that have arrived, in order
        self.buffers: dict[int, NDArray[np.float32]] = {}

    def look(self) -> bool:
        """Note what has arrived; make an update if enough has. Returns whether anything was done."""
        for worker in range(len(self.seen)):
            while self.transport.arrived(worker, int(self.seen[worker])):
                self.seen[worker] += 1
                self.queue.append((worker, int(self.seen[worker])))
        if not self.queue or len(self.queue) < self.quorum():
            return False
        taken, self.queue = self.queue[: self.options.quorum], self.queue[self.options.quorum :]
        self.apply(taken)
        return True

    def quorum(self) -> int:
        """Gradients to wait for: those that can still come are no more than the workers free to send one.

        A worker is not free while it is paused, or waits for slower ones (`max_staleness`): waiting for it would
        be for ever.
        """
        store, control = self.store, self.store.control
        rows = store.rows[: store.layout.actors]
        active = rows[:, Counter.ACTIVE] == 1
        if not active.any():
            return 1
        free = active.copy()
        if control[Word.RESUME] < control[Word.PAUSE]:
            free &= rows[:, Counter.PAUSED] < control[Word.PAUSE]
        if self.options.max_staleness is not None:
            clocks = rows[:, Counter.CLOCK]
            free &= clocks - clocks[active].min() <= self.options.max_staleness
        waiting = np.zeros(len(rows), np.int64)
        for worker, _ in self.queue:
            waiting[worker] += 1
        free &= waiting < self.options.pipeline  # it waits for us
        return max(1, min(self.options.quorum, len(self.queue) + int(free.sum())))

    def apply(self, taken: list[tuple[int, int]]) -> None:
        """One transaction with these messages; each is acknowledged once that is published."""
        store, row = self.store, self.store.row
        with store.update() as slot:
            messages = self._new(slot, taken)
            version = slot.version
            contributions = [m.contribution for m in messages]
            self.stepper.apply(slot, contributions, self.rate)
            for m in messages:
                slot.applied[m.contribution.worker] = m.number
            store.note(slot, contributions)
            if store.control[Word.SAMPLE_WANTED] and contributions and contributions[0].gradient.size:
                store.gradients[-1] = contributions[0].gradient
                store.control[Word.SAMPLE_WANTED] = 0
        for c in contributions:
            if c.finite and self.stepper.dropped(version, c):
                row[Counter.DROPPED_STALE] += 1
            count(row, c, version - c.version)
        row[Counter.STEPS] = row[Counter.BYTES_UP] = 0.0  # the workers count their own
        for worker, number in taken:
            self.transport.acknowledge(worker, number)

    def _new(self, slot: Slot, taken: list[tuple[int, int]]) -> list[Message]:
        """The messages that are not in these weights yet, their gradients unpacked."""
        found: list[Message] = []
        for place, (worker, number) in enumerate(taken):
            m = self.transport.receive(worker, number)
            if number <= slot.applied[worker] or any(
                x.contribution.worker == worker and x.number >= number for x in found
            ):
                self.store.row[Counter.DUPLICATES] += 1
                continue
            if len(m.payload):
                m.contribution.gradient = self._unpack(place, m)
            found.append(m)
        return found

    def _unpack(self, place: int, m: Message) -> NDArray[np.float32]:
        if self.decompress is None:
            return m.payload.view(np.float32)
        out = self.buffers.setdefault(place, np.zeros(self.store.layout.weights, np.float32))
        self.decompress(m.payload, out)
        return out


def serve(run: Run, index: int, incarnation: int, store_path: str, directory: Path, moments: tuple[int, ...]) -> None:
    """The life of the server; what the supervisor starts.

    Args:
        run: what to do.
        index: its row of counters, after those of the workers.
        incarnation: how often it had been started before.
        store_path: where the parameter store is.
        directory: the run directory.
        moments: sizes of the parts of a slot's normalizer statistics.
    """
    from slipstream.record import Recorder
    from slipstream.watch.log import Log

    recorder = Recorder(directory / "schedule.bin") if run.record else None
    store = Store(store_path, index, recorder)
    row, control, log = store.row, store.control, Log(directory, worker=index)
    row[Counter.PHASE], row[Counter.INCARNATION] = Phase.STARTING, incarnation
    try:
        a = run.algo
        stepper = Stepper(store, a.optimizer, a.epsilon, a.rmsprop_decay, moments, run.rule)
        rate = partial(module("algos", run.algorithm).learning_rate, a, horizon=run.total_steps)
        packing = build.compressor(run, 0, 0, store.layout.weights)
        server = Server(store, stepper, rate, packing.decode if packing else None, Rings(store))
        log("info", "server started", incarnation=incarnation)
        while not control[Word.STOP]:
            row[Counter.BEAT] += 1
            if server.look():
                continue
            row[Counter.PHASE] = Phase.WAIT
            if control[Word.PAUSE] > row[Counter.PAUSED] and not server.queue and _all_paused(store):
                row[Counter.PAUSED] = control[Word.PAUSE]
            begun = perf_counter()
            server.transport.wait()
            row[Counter.T_IDLE] += perf_counter() - begun
        row[Counter.PHASE] = Phase.LEFT
    finally:
        store.close()
        log.close()
        if recorder is not None:
            recorder.close()


def _all_paused(store: Store) -> bool:
    rows = store.rows[: store.layout.actors]
    active = rows[rows[:, Counter.ACTIVE] == 1]
    return bool((active[:, Counter.PAUSED] >= store.control[Word.PAUSE]).all())
