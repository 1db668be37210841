"""Rule `server`: quorum, bounded staleness, exactly-once, full and empty rings, a server that dies; equivalences."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from store_tools import rule_store, until
from test_rules import RATE, Seat, table, together  # noqa: F401  (table is a fixture)

from slipstream import compress
from slipstream.counters import Counter
from slipstream.errors import ConfigError
from slipstream.optimize import Stepper
from slipstream.serve import Server
from slipstream.store import Snapshot, Store, Word
from slipstream.transport import Ring, Rings


class Bench:
    """A server made to look by hand, and what workers send it."""

    def __init__(self, workers: int = 2, size: int = 8, depth: int = 4, kind: str = "sgd", **options) -> None:
        from slipstream.config import Rule

        self.segment = rule_store("server", size, workers, kind, uplink=(depth, 4 * size, 0))
        self.options, self.kind = Rule(**options), kind
        self.seats = [Seat("server", self.segment.path, w, kind=kind, **options) for w in range(workers)]
        self.start()

    def start(self) -> Server:
        """A new server over what there is, as after a restart."""
        self.store = Store(self.segment.path, len(self.seats))
        stepper = Stepper(self.store, self.kind, 1e-5, 0.99, (), self.options)
        self.server = Server(self.store, stepper, lambda _: RATE, None, Rings(self.store))
        return self.server

    def send(self, worker: int, gradient=1.0, **more) -> None:
        """Send without waiting for the acknowledgement."""
        seat = self.seats[worker]
        seat.pull()
        Ring(seat.store, worker).send(seat.offer(gradient, **more))

    def drain(self) -> None:
        """Look until there is nothing to do."""
        while self.server.look():
            pass

    @property
    def weights(self) -> np.ndarray:
        return self.store.current.weights


@pytest.fixture
def bench():
    """A function that makes a bench."""
    made = []

    def make(*arguments, **more) -> Bench:
        made.append(Bench(*arguments, **more))
        return made[-1]

    yield make
    for b in made:
        b.segment.close()


# -- averaging -----------------------------------------------------------------------------------------


def test_a_quorum_is_averaged_into_one_version(bench):
    """Gradients 1 and 5 of 10 and 30 samples: 4, once."""
    b = bench(3, quorum=2)
    b.send(0, 1.0, samples=10)
    assert not b.server.look()  # two more may come
    b.send(1, 5.0, samples=30)
    b.drain()
    assert b.store.progress() == (1, 40)
    assert (b.weights == -4 * RATE).all()
    assert [Ring(b.store, w).in_flight for w in range(3)] == [0, 0, 0]


def test_the_quorum_shrinks_to_those_who_can_still_send(bench):
    b = bench(3, quorum=3)
    b.send(0), b.send(1)
    assert not b.server.look()
    b.store.rows[2, Counter.ACTIVE] = 0  # left, or found dead by the supervisor
    b.drain()
    assert b.store.progress()[0] == 1
    b.send(0)
    b.store.rows[1, Counter.PAUSED] = b.store.control[Word.PAUSE] = 1  # it is paused and sends nothing
    b.drain()
    assert b.store.progress()[0] == 2


@pytest.mark.parametrize(("stale", "expected"), [("accept", 2.0), ("scale", 1.5), ("drop", 1.0)])
def test_what_becomes_of_a_stale_gradient(stale, expected, bench):
    """Worker 1 pulled one version before: its 1 counts whole, half, or not at all."""
    b = bench(2, quorum=1, stale=stale)
    b.seats[1].pull()
    b.send(0)
    b.drain()
    Ring(b.seats[1].store, 1).send(b.seats[1].offer(1.0))
    b.drain()
    assert (b.weights == -expected * RATE).all()
    assert b.store.progress()[1] == 16  # its environment steps count in any case
    assert b.store.row[Counter.DROPPED_STALE] == (stale == "drop")


def test_a_staler_step_is_smaller(bench):
    """staleness_scaling: lr / (1 + 2)."""
    b = bench(2, staleness_scaling=True)
    b.seats[1].pull()
    b.send(0), b.drain(), b.send(0), b.drain()
    before = b.weights.copy()
    Ring(b.seats[1].store, 1).send(b.seats[1].offer(1.0))
    b.drain()
    np.testing.assert_allclose(before - b.weights, RATE / 3, rtol=1e-4)


# -- exactly once --------------------------------------------------------------------------------------


def test_a_gradient_that_arrives_twice_is_applied_once(bench):
    """The same message under the next number cannot come from a worker; the same number again is refused."""
    b = bench(1)
    b.send(0), b.drain()
    b.server.seen[0] = 0  # the server looks at message 1 again, as after losing its acknowledgement
    b.server.queue.append((0, 1))
    b.server.apply([(0, 1)])
    assert b.store.progress() == (1, 8)
    assert b.store.row[Counter.DUPLICATES] == 1
    assert (b.weights == -RATE).all()


@pytest.mark.parametrize("moment", ["before the update", "in the update", "before the acknowledgement"])
def test_a_server_that_dies_loses_and_doubles_nothing(moment, bench):
    b = bench(2, kind="adam")
    b.send(0), b.drain()
    b.send(1, 3.0)
    if moment == "in the update":
        with suppress(ZeroDivisionError), b.store.update() as slot:
            slot.weights[:] = 99.0  # half written
            raise ZeroDivisionError
    elif moment == "before the acknowledgement":
        b.server.transport.acknowledge = lambda worker, number: None
        b.drain()
        assert b.store.progress() == (2, 16)
        assert Ring(b.store, 1).in_flight == 1
    b.store.close()
    b.start()
    b.drain()
    assert b.store.progress() == (2, 16)
    assert [Ring(b.store, w).in_flight for w in range(2)] == [0, 0]
    other = bench(1, kind="adam")
    other.send(0), other.drain(), other.send(0, 3.0), other.drain()
    np.testing.assert_array_equal(b.weights, other.weights)


# -- rings ---------------------------------------------------------------------------------------------


def test_a_full_ring_holds_the_worker_back_and_says_so(bench):
    """A slow server: the worker waits in push, its waiting is booked, it stays alive to the supervisor."""
    b = bench(1, depth=2, pipeline=2)
    (seat,) = b.seats
    for _ in range(2):
        seat.pull()
        Ring(seat.store, 0).send(seat.offer(1.0))
    assert Ring(seat.store, 0).full
    done = threading.Event()
    pusher = threading.Thread(target=lambda: (seat.push(), done.set()), daemon=True)
    pusher.start()
    beat = seat.row[Counter.BEAT]
    until(lambda: seat.row[Counter.BEAT] > beat, "a worker that waits must be seen to live")
    time.sleep(0.05)
    assert not done.is_set()
    until(lambda: (b.drain(), done.is_set())[1], "it must go on when there is room")
    pusher.join(10)
    b.drain()
    assert seat.row[Counter.T_WAIT] > 0.04
    assert (b.weights == -3 * RATE).all()


def test_an_empty_ring_is_waited_for_without_turning_round(bench):
    """An idle server sleeps: some 200 looks a second at the most."""
    b = bench(1)
    begun, cpu, looks = time.perf_counter(), time.thread_time(), 0
    while time.perf_counter() - begun < 0.3:
        b.server.look()
        b.server.transport.wait()
        looks += 1
    assert looks < 150
    assert time.thread_time() - cpu < 0.15


def test_messages_go_round_the_ring_many_times(bench):
    b = bench(2, depth=3)
    for i in range(50):
        b.send(i % 2, float(i))
        b.drain()
    assert b.store.progress()[0] == 50
    assert (b.weights == -RATE * sum(range(50))).all()


def test_a_worker_of_another_network_is_refused(bench):
    """A wrong parameter count, as of an old run's configuration: a message, not a crash later."""
    b = bench(1, size=8)
    b.seats[0].into = Snapshot(np.zeros(9, np.float32), 0)
    with pytest.raises(ConfigError, match=r"9 parameters cannot join .* has 8"):
        b.seats[0].pull()


# -- bounded staleness ---------------------------------------------------------------------------------


def test_nobody_runs_further_ahead_than_allowed(table):  # noqa: F811
    """max_staleness 2: the fast one makes 3 pushes more than the slow, then waits for it, and books that."""
    fast, slow = table("server", 2, max_staleness=2)
    slow.pull()
    made = []

    def run() -> None:
        for i in range(5):
            fast.pull()
            fast.push()
            made.append(i)

    t = threading.Thread(target=run, daemon=True)
    t.start()
    until(lambda: len(made) == 2, "two pushes are allowed")
    time.sleep(0.1)
    assert len(made) == 2  # the third is applied, and waits
    assert fast.store.progress()[0] == 3
    for n in (3, 4, 5):
        slow.push(), slow.pull()
        until(lambda n=n: len(made) == n, "the slow one's push frees the fast one")
    t.join(10)
    assert fast.row[Counter.T_BLOCKED] > 0.08


def test_the_one_who_leaves_is_not_waited_for(table):  # noqa: F811
    a, b = table("server", 2, quorum=2, max_staleness=0)
    a.pull(), b.pull()
    together(lambda: a.push(1.0), lambda: b.push(3.0))
    assert (a.now.weights == -2 * RATE).all()
    a.pull()
    together(lambda: a.push(1.0), lambda: (time.sleep(0.05), b.rule.leave()))
    assert a.store.progress()[0] == 2


# -- equivalences --------------------------------------------------------------------------------------


def test_quorum_of_all_without_staleness_is_sync(table):  # noqa: F811
    rng = np.random.default_rng(7)
    gradients = rng.normal(size=(20, 3, 32)).astype(np.float32)
    samples = rng.integers(1, 40, size=(20, 3))
    found = []
    for name, options in (("sync", {}), ("server", {"quorum": 3, "max_staleness": 0})):
        seats = table(name, 3, kind="adam", rate=1e-2, **options)
        for i in range(20):
            for s in seats:
                s.pull()
            together(*(lambda w=w, s=s, i=i: s.push(gradients[i, w], samples=int(samples[i, w]))
                       for w, s in enumerate(seats)))  # fmt: skip
        slot = seats[0].now
        assert (slot.version, slot.steps) == (20, samples.sum())
        found.append([slot.weights.copy(), *(v.copy() for v in slot.optimizer.values())])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "rmsprop", "sgd"])
def test_one_worker_is_lock_with_one_worker(kind, table):  # noqa: F811
    """Bit for bit, weights and optimizer state."""
    found = []
    for name in ("lock", "server"):
        (seat,) = table(name, size=777, kind=kind, rate=1e-2)
        rng = np.random.default_rng(5)
        for _ in range(60):
            seat.pull()
            seat.push(rng.normal(size=777).astype(np.float32), samples=int(rng.integers(1, 50)))
        found.append([seat.now.weights.copy(), *(v.copy() for v in seat.now.optimizer.values())])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)


def test_the_compressor_none_is_no_compressor():
    c = compress.make("none", 100, np.random.SeedSequence(0))
    g = np.random.default_rng(0).normal(size=100).astype(np.float32)
    out = np.zeros(100, np.float32)
    c.decode(c.encode(g, 0), out)
    assert np.array_equal(g, out)
