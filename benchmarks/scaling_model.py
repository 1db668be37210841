"""The model of simulate_scaling.py: workers, cores, lock and server as processes of a discrete-event simulation."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import simpy

LIMIT = 1024
GRACE = 1e-7  # seconds a core waits for the process that had it
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
    slice: float = 3e-3  # seconds a process keeps a core that others want
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


@dataclass(eq=False)
class Job:
    """Work for one core, or what is left of it."""

    left: float
    done: simpy.Event
    since: float = 0.0  # when its time slice began
    finish: float = -1.0  # virtual time; below 0: it does not run


class Cpu:
    """Cores in time slices: who finds none free waits until one falls free or the oldest slice is over.

    All that run do so at one speed, so they finish by a virtual clock. Who waits for something else computes nothing.
    """

    def __init__(self, env: simpy.Environment, machine: Machine) -> None:
        self.env, self.machine = env, machine
        self.heap: list[tuple[float, int, Job]] = []  # running jobs by `finish`; with some that run no more
        self.turns: deque[tuple[float, Job]] = deque()  # the same by `since`
        self.queue: deque[Job] = deque()
        self.kept: deque[float] = deque()  # beginnings of the slices of cores that have just fallen free
        self.running, self.virtual, self.last = 0, 0.0, 0.0
        self.rate, self.plan, self.number = 1.0, -1, itertools.count()

    def work(self, seconds: float) -> simpy.Event:
        """Happens once the caller has had `seconds` of a core."""
        self._advance()
        job = Job(seconds, self.env.event())
        if self.kept:
            self._start(job, self.kept.popleft())
        elif self.running < self.machine.cores:
            self._start(job, self.env.now)
        else:
            self.queue.append(job)
        self._schedule()
        return job.done

    def _start(self, job: Job, since: float) -> None:
        job.since, job.finish = since, self.virtual + job.left
        self.running += 1
        heapq.heappush(self.heap, (job.finish, next(self.number), job))
        self.turns.append((since, job))

    def _stop(self, job: Job) -> None:
        job.left, job.finish = max(0.0, job.finish - self.virtual), -1.0
        self.running -= 1

    def _advance(self) -> None:
        self.virtual += (self.env.now - self.last) * self.rate
        self.last = self.env.now

    def _schedule(self) -> None:
        """Plan the next end of a job or slice, at the speed all have until then."""
        while self.heap and self.heap[0][2].finish != self.heap[0][0]:
            heapq.heappop(self.heap)
        while self.turns and (self.turns[0][1].finish < 0 or self.turns[0][1].since != self.turns[0][0]):
            self.turns.popleft()
        self.plan = next(self.number)
        if not self.heap:
            return
        m, n = self.machine, self.running
        crowd = max(0.0, min(m.cores, n + m.load) - 1) / max(1, m.cores - 1)
        self.rate = min(1.0, max(0.1, m.cores - m.load) / n) / (1 + (m.stretch - 1) * crowd)
        wait = (self.heap[0][0] - self.virtual) / self.rate
        if self.queue:
            wait = min(wait, self.turns[0][0] + m.slice - self.env.now)
        self.env.timeout(max(0.0, wait)).callbacks.append(partial(self._due, self.plan))

    def _due(self, plan: int, due: simpy.Event) -> None:
        if plan != self.plan:
            return  # somebody came meanwhile
        self._advance()
        while self.heap and self.heap[0][0] <= self.virtual + 1e-12:
            finish, _, job = heapq.heappop(self.heap)
            if job.finish == finish:
                self._stop(job)
                job.done.succeed()
                self.kept.append(job.since)
                self.env.timeout(GRACE).callbacks.append(self._give)
        if self.queue and self.turns and self.turns[0][0] + self.machine.slice <= self.env.now + 1e-12:
            since, oldest = self.turns.popleft()
            if oldest.finish >= 0 and oldest.since == since:
                self._stop(oldest)
                self.queue.append(oldest)
                self._start(self.queue.popleft(), self.env.now)
        self._schedule()

    def _give(self, due: simpy.Event) -> None:
        """Who had the core and goes on at once has done so: now others get it."""
        self._advance()
        if self.kept:
            self.kept.popleft()
        while self.queue and self.running + len(self.kept) < self.machine.cores:
            self._start(self.queue.popleft(), self.env.now)
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
        self.locked = False
        self.blocked: deque[simpy.Event] = deque()
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
        """Apply under the lock; it goes to who comes first when it is free, which may be one that did not wait."""
        self.wait(+1)
        while self.locked:
            free = self.env.event()
            self.blocked.append(free)
            yield free
            yield from self.awake()
        self.wait(-1)
        got, self.locked = self.env.now, True
        yield self.cpu.work(self.costs.apply)
        self.held += self.env.now - max(got, self.since)
        self.apply([version])
        self.locked = False
        if self.blocked:
            self.blocked.popleft().succeed()

    def awake(self) -> Steps:
        """Who has been woken has to be given a core before it knows."""
        yield self.env.timeout(self.costs.wake)
        yield self.cpu.work(0.0)

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
            yield from self.awake()
            self.wait(-1)
            return
        yield self.cpu.work(c.apply + others * c.contribution)
        self.held += self.env.now - max(begun, self.since)
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
        yield from self.awake()
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
            self.held += self.env.now - max(begun, self.since)
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
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if slow(middle) else (middle, high)
    return high
