"""The model of simulate_scaling.py: workers, cores, lock and server as processes of a discrete-event simulation."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import simpy

LIMIT = 1024
Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Scheme:
    """An update rule with its options; `half`: the server averages the gradients of half of the workers."""

    name: str
    update: str
    half: bool = False
    compress: str = "none"
    network: bool = False  # over a network: not to be had in this version, so predicted only

    def quorum(self, workers: int) -> int:
        """Gradients in an update of the server."""
        return max(1, workers // 2) if self.half else 1


SCHEMES = (
    Scheme("lock", "lock"), Scheme("hogwild", "hogwild"), Scheme("sync", "sync"), Scheme("server", "server"),
    Scheme("server, quorum N/2", "server", half=True), Scheme("server, topk:0.01", "server", compress="topk:0.01"),
    Scheme("server over network", "server", network=True),
    Scheme("server over network, topk:0.01", "server", compress="topk:0.01", network=True),
)  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Measured service times of one worker under one scheme: seconds of a core where nothing else is said."""

    samples: float  # environment steps of a rollout
    collect: float
    gradient: float
    apply: float  # an update of one gradient (decoding included)
    pull: float = 0.0
    other: float = 0.0  # everything else in a turn of the loop (packing included)
    contribution: float = 0.0  # each further gradient in an update
    look: float = 0.0  # the server: a look at its rings, per worker
    wake: float = 0.0  # seconds from an event to the process that waited for it
    ring: float = 0.0  # waking one process
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    spread: tuple[float, ...] = (1.0,)  # rollouts as they came, over their mean


@dataclass(frozen=True)
class Machine:
    """What the workers run on: cores, and the network of a server that is elsewhere."""

    cores: int
    load: float = 0.0  # cores that the supervising process and others got
    stretch: float = 1.0  # how much longer everything takes with all cores busy
    bandwidth: float = math.inf  # bytes/s each way of the server
    latency: float = 0.0  # seconds


@dataclass(frozen=True)
class Outcome:
    """Means over the time after the warm-up."""

    steps_per_second: float
    updates_per_second: float
    wait_share: float  # of the workers' time: for the lock, the others or the server
    staleness: float
    busy: float  # share of time in which the lock is held, or the server works
    gradients: int  # offered in that time
    applied: int  # gradients in the updates of that time


class Cpu:
    """Cores shared equally by whoever computes: the limit of short time slices. Who waits computes nothing."""

    def __init__(self, env: simpy.Environment, machine: Machine) -> None:
        self.env, self.machine = env, machine
        self.jobs: list[tuple[float, int, simpy.Event]] = []  # by the virtual time at which they are done
        self.virtual = self.last = 0.0
        self.rate, self.plan, self.number = 1.0, -1, itertools.count()

    def work(self, seconds: float) -> simpy.Event:
        """Happens once the caller has had `seconds` of a core."""
        self._advance()
        done = self.env.event()
        heapq.heappush(self.jobs, (self.virtual + seconds, next(self.number), done))
        self._schedule()
        return done

    def _advance(self) -> None:
        self.virtual += (self.env.now - self.last) * self.rate
        self.last = self.env.now

    def _schedule(self) -> None:
        """Plan to end the job that is done first, at the speed all have until then."""
        m, n = self.machine, len(self.jobs)
        share = max(0.1, m.cores - m.load) / n
        crowd = max(0.0, min(m.cores, n + m.load) - 1) / max(1, m.cores - 1)
        self.rate = min(1.0, share) / (1 + (m.stretch - 1) * crowd)
        self.plan = next(self.number)
        due = self.env.timeout(max(0.0, (self.jobs[0][0] - self.virtual) / self.rate))
        due.callbacks.append(partial(self._due, self.plan))

    def _due(self, plan: int, _: simpy.Event) -> None:
        if plan != self.plan:
            return  # somebody came meanwhile
        self._advance()
        while self.jobs and self.jobs[0][0] <= self.virtual + 1e-12:
            heapq.heappop(self.jobs)[2].succeed()
        if self.jobs:
            self._schedule()


class World:
    """Workers of one scheme on one machine, until `updates` gradients were offered."""

    def __init__(self, costs: Costs, scheme: Scheme, workers: int, machine: Machine, rollouts: int, seed: int) -> None:
        self.costs, self.scheme, self.workers, self.machine = costs, scheme, workers, machine
        self.env = simpy.Environment()
        self.cpu = Cpu(self.env, machine)
        self.rng = np.random.default_rng(seed)
        self.version, self.offered, self.quorum = 0, 0, scheme.quorum(workers)
        turns = -(-rollouts // workers)  # whole turns of all workers, or a round of sync would be cut
        self.warm, self.end, self.over = -(-turns // 4) * workers, (turns + -(-turns // 4)) * workers, self.env.event()
        self.since = self.waited = self.held = self.looked = 0.0
        self.waiting = 0  # workers that wait now
        self.updates = self.applied = self.stale = self.gradients = 0
        self.lock = simpy.Resource(self.env)
        self.round, self.met = self.env.event(), 0
        self.mail: list[tuple[int, simpy.Event]] = []  # (version it came from, what tells the worker)
        self.bell = self.env.event()
        self.up, self.down = simpy.Resource(self.env), simpy.Resource(self.env)
        push: Callable[[int], Steps] = getattr(self, f"with_{scheme.update}")
        for _ in range(workers):
            self.env.process(self.worker(push))
        if scheme.update == "server":
            self.env.process(self.server())

    def worker(self, push: Callable[[int], Steps]) -> Steps:
        """THE LOOP: pull, collect, gradient, push."""
        c, spread, random = self.costs, self.costs.spread, self.rng.random
        fixed, scheme = c.pull + c.other, self.scheme
        if self.workers > 1 and scheme.update != "sync":  # they do not begin as one
            yield self.env.timeout(self.rng.uniform(0, c.collect + c.gradient + fixed))
        while True:
            if scheme.network:
                yield from self.transfer(self.down, c.bytes_down)
            version = self.version
            yield self.cpu.work(fixed + (c.collect + c.gradient) * spread[int(random() * len(spread))])
            if scheme.network:
                yield from self.transfer(self.up, c.bytes_up)
            yield from push(version)
            self.count()

    def wait(self, change: int) -> None:
        """So many workers more wait from now on; sums up the time of those that have."""
        self.waited += self.waiting * (self.env.now - self.looked)
        self.looked, self.waiting = self.env.now, self.waiting + change

    def count(self) -> None:
        """A gradient has been offered; measuring begins after the warm-up."""
        self.offered += 1
        self.gradients += 1
        if self.offered == self.warm:
            self.wait(0)
            self.since, self.waited, self.held = self.env.now, 0.0, 0.0
            self.updates = self.applied = self.stale = self.gradients = 0
        elif self.offered == self.end:
            self.over.succeed()

    def apply(self, versions: list[int]) -> None:
        """An update with gradients of these versions has been published."""
        self.stale += sum(self.version - v for v in versions)
        self.applied += len(versions)
        self.updates += 1
        self.version += 1

    def with_lock(self, version: int) -> Steps:
        """Apply under the lock."""
        begun = self.env.now
        with self.lock.request() as mine:
            self.wait(+1)
            yield mine
            if self.env.now > begun:
                yield self.env.timeout(self.costs.wake)
            self.wait(-1)
            got = self.env.now
            yield self.cpu.work(self.costs.apply)
            self.held += self.env.now - got
            self.apply([version])

    def with_hogwild(self, version: int) -> Steps:
        """Apply at once."""
        yield self.cpu.work(self.costs.apply)
        self.apply([version])

    def with_sync(self, version: int) -> Steps:
        """Wait for the slowest; who comes last applies the mean and wakes the others one by one."""
        self.met += 1
        begun, c, others = self.env.now, self.costs, self.workers - 1
        if self.met < self.workers:
            self.wait(+1)
            yield self.round
            yield self.env.timeout(c.wake)
            self.wait(-1)
            return
        yield self.cpu.work(c.apply + others * c.contribution)
        self.held += self.env.now - begun
        self.met = 0
        self.apply([version] * self.workers)
        over, self.round = self.round, self.env.event()
        over.succeed()
        if others:
            yield self.cpu.work(others * c.ring)

    def with_server(self, version: int) -> Steps:
        """Send the gradient and wait until it is applied."""
        applied = self.env.event()
        self.mail.append((version, applied))
        if not self.bell.triggered:
            self.bell.succeed()
        self.wait(+1)
        yield applied
        yield self.env.timeout(self.costs.wake)
        self.wait(-1)

    def server(self) -> Steps:
        """Make an update of the gradients that came first, as soon as there are enough."""
        c = self.costs
        while True:
            while len(self.mail) < self.quorum:
                self.bell = self.env.event()
                yield self.bell
                yield self.env.timeout(c.wake)
            begun = self.env.now
            yield self.cpu.work(c.look * self.workers)
            taken, self.mail = self.mail[: self.quorum], self.mail[self.quorum :]
            yield self.cpu.work(c.apply + (len(taken) - 1) * c.contribution)
            self.held += self.env.now - begun
            self.apply([version for version, _ in taken])
            for _, applied in taken:
                applied.succeed()
            yield self.cpu.work(len(taken) * c.ring)

    def transfer(self, link: simpy.Resource, size: float) -> Steps:
        """Bytes through the server's link, which carries one message at a time."""
        with link.request() as mine:
            yield mine
            yield self.env.timeout(size / self.machine.bandwidth)
        yield self.env.timeout(self.machine.latency)


def simulate(
    costs: Costs, scheme: Scheme, workers: int, machine: Machine, rollouts: int | None = None, seed: int = 0
) -> Outcome:
    """The same arguments give the same outcome."""
    world = World(costs, scheme, workers, machine, rollouts or max(1200, 5 * workers), seed)
    world.env.run(until=world.over)
    world.wait(0)
    seconds = world.env.now - world.since
    return Outcome(
        world.gradients * costs.samples / seconds, world.updates / seconds, world.waited / seconds / workers,
        world.stale / max(1, world.applied), world.held / seconds, world.gradients, world.applied,
    )  # fmt: skip


def stops_at(costs: Costs, scheme: Scheme, machine: Callable[[int], Machine]) -> int | None:
    """The least number of workers whose steps/s each are below half of one worker's; None up to the limit."""
    alone = simulate(costs, scheme, 1, machine(1)).steps_per_second

    def slow(n: int) -> bool:
        return simulate(costs, scheme, n, machine(n)).steps_per_second / n < alone / 2

    high: int | None = next((n for n in (2, 4, 8, 16, 32, 64, 128, 256, 512, LIMIT) if slow(n)), None)
    if high is None:
        return None
    low = high // 2
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (low, middle) if slow(middle) else (middle, high)
    return high
