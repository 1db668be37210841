"""How gradients travel from workers to the server of rule `server`.

A worker's end has `send`, `applied` and `in_flight`; the server's end has `arrived`, `receive` and `acknowledge`.
Here both are a ring in the store's shared memory: nothing is pickled, and what is sent twice is one message. A
network transport offers the same two ends, and carries weights down besides, which here are read from the store.

Messages of a worker are numbered from 1. The number last applied is part of the weights (`Slot.applied`), so
a server that dies between publishing and acknowledging applies nothing twice, and none that was acknowledged is lost.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.store import LINE, Contribution, Store, view

NUMBERS = 16  # int64 of a message's head: see `send`


class WorkerEnd(Protocol):
    """What a worker needs of a transport."""

    @property
    def full(self) -> bool:
        """Whether nothing can be sent now."""

    @property
    def in_flight(self) -> int:
        """Messages sent that the server has not acknowledged."""

    def send(self, contribution: Contribution) -> int:
        """Hand over a gradient; returns the bytes sent for it. The caller waits while `full`."""

    def wait(self) -> None:
        """Return when the server has acknowledged something, and after a few milliseconds anyway."""


class ServerEnd(Protocol):
    """What the server needs of a transport."""

    def arrived(self, worker: int, after: int) -> bool:
        """Whether message `after + 1` of a worker is there."""

    def receive(self, worker: int, number: int) -> Message:
        """That message; its arrays are views that hold until it is acknowledged."""

    def acknowledge(self, worker: int, number: int) -> None:
        """Messages of a worker up to this number are in the published weights, or have been dropped."""

    def wait(self) -> None:
        """Return when something has arrived, and after a few milliseconds anyway."""


class Message(NamedTuple):
    """A contribution whose gradient may still be compressed."""

    number: int
    contribution: Contribution
    payload: NDArray[np.uint8]  # the gradient, as it was sent


def attach(store: Store, weights: int) -> None:
    """Refuse a worker whose weights are not those of the store.

    Raises:
        ConfigError: the numbers of parameters differ.
    """
    if weights != store.layout.weights:
        raise ConfigError(
            f"a worker with {weights} parameters cannot join a run whose server has {store.layout.weights}: its "
            "network, environment or configuration is another one (of an older run?)"
        )


class Ring:
    """Messages of one worker in shared memory; either end may be opened again at any time."""

    def __init__(self, store: Store, worker: int) -> None:
        self.store, self.worker, layout = store, worker, store.layout
        self.bell = store.bell
        self.depth, capacity, read = layout.uplink
        base = store.uplinks + worker * (2 * LINE + self.depth * layout.entry_bytes)
        memory = store.memory
        # number of the last message written (by the worker), and of the last acknowledged (by the server)
        self.head = view(np.frombuffer(memory, np.int64, 1, base))
        self.tail = view(np.frombuffer(memory, np.int64, 1, base + LINE))
        self.numbers: list[Any] = []
        self.prints: list[Any] = []
        self.moments: list[NDArray[np.float64]] = []
        self.payloads: list[NDArray[np.uint8]] = []
        self.reads: list[NDArray[np.float32]] = []
        for i in range(self.depth):
            at = base + 2 * LINE + i * layout.entry_bytes
            self.numbers.append(view(np.frombuffer(memory, np.int64, NUMBERS - 2, at)))
            self.prints.append(view(np.frombuffer(memory, np.float64, 2, at + 8 * (NUMBERS - 2))))
            self.moments.append(np.frombuffer(memory, np.float64, layout.moments, at + 8 * NUMBERS))
            at += -(-(8 * NUMBERS + 8 * layout.moments) // LINE) * LINE
            self.payloads.append(np.frombuffer(memory, np.uint8, capacity, at))
            self.reads.append(np.frombuffer(memory, np.float32, read, at + -(-capacity // LINE) * LINE))

    # -- the worker's end --------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Messages sent that the server has not acknowledged."""
        return int(self.head[0] - self.tail[0])

    @property
    def full(self) -> bool:
        """Whether nothing can be sent now."""
        return self.in_flight >= self.depth

    def send(self, c: Contribution) -> int:
        """Write a message and publish it by its number, last; a worker killed on the way has sent nothing."""
        number = int(self.head[0]) + 1
        i = number % self.depth
        sent = 0
        if c.finite and c.rows:
            payload = c.payload if c.payload is not None else c.gradient.view(np.uint8)
            sent = len(payload)
            self.payloads[i][:sent] = payload
            if c.read is not None:
                self.reads[i][:] = c.read
                sent += c.read.nbytes
        values = number, len(payload) if sent else 0, c.finite, c.samples, c.rows, c.tick, c.version, c.worker
        for j, value in enumerate((*values, c.incarnation, c.rollout)):
            self.numbers[i][j] = value
        self.prints[i][0], self.prints[i][1] = c.loss, c.norm
        self.moments[i][:] = c.moments
        self.store.fence()
        self.head[0] = number
        self.bell.ring(self.store.layout.actors)
        return sent

    def wait(self) -> None:
        """Return when the server has acknowledged something, and after a few milliseconds anyway."""
        self.bell.wait()

    # -- the server's end --------------------------------------------------------------------------

    def arrived(self, after: int) -> bool:
        """Whether the message after this number is there."""
        there = int(self.head[0]) > after
        if there:
            self.store.fence()
        return there

    def receive(self, number: int) -> Message:
        """A message that has arrived."""
        i = number % self.depth
        n: Any = self.numbers[i]
        if n[0] != number:
            raise ConfigError(f"message {number} of a worker is not where it was sent to (found {n[0]})")
        payload = self.payloads[i][: n[1]]
        c = Contribution(
            np.zeros(0, np.float32), bool(n[2]), n[3], n[5], n[6], n[7], n[8], n[9], self.moments[i],
            self.prints[i][0], self.prints[i][1], n[4], self.reads[i] if len(self.reads[i]) else None,
        )  # fmt: skip
        return Message(number, c, payload)

    def acknowledge(self, number: int) -> None:
        """Free the messages up to this number."""
        self.store.fence()
        self.tail[0] = max(int(self.tail[0]), number)
        self.bell.ring(self.worker)


class Rings:
    """The server's end of every worker's ring."""

    def __init__(self, store: Store) -> None:
        self.bell = store.bell
        self.rings = [Ring(store, w) for w in range(store.layout.actors)]

    def arrived(self, worker: int, after: int) -> bool:
        """Whether message `after + 1` of a worker is there."""
        return self.rings[worker].arrived(after)

    def receive(self, worker: int, number: int) -> Message:
        """That message; its arrays are views that hold until it is acknowledged."""
        return self.rings[worker].receive(number)

    def acknowledge(self, worker: int, number: int) -> None:
        """Messages of a worker up to this number are in the published weights, or have been dropped."""
        self.rings[worker].acknowledge(number)

    def wait(self) -> None:
        """Return when something has arrived, and after a few milliseconds anyway."""
        self.bell.wait()
