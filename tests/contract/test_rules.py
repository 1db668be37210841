"""Every update rule, held to what it declares. Rules are found by listing: a new file in rules/ is tested unasked.

Gradients are 1 and the learning rate a power of two, so that weights tell exactly what was applied.
"""

from __future__ import annotations

import inspect
import threading
import time

import numpy as np
import pytest
import torch
from store_tools import SAMPLES, Family, Host, make, push_ones, rule_for, rule_store, snapshot, until

from slipstream import moments, record
from slipstream.config import module, names
from slipstream.counters import STALENESS_BINS, Counter
from slipstream.optimize import Stepper, state_layout
from slipstream.store import Contribution, Slot, Snapshot, Store, Word

RULES = names("rules")
CONSISTENT = [r for r in RULES if module("rules", r).Rule.consistent]
RATE = 2.0**-10


class Seat:
    """One worker of a rule, in this process: a handle on the store, a rule and a snapshot."""

    def __init__(self, name: str, path: str, worker=0, rate=RATE, kind="sgd", sizes=(), **options) -> None:
        self.store = Store(path, worker)
        self.worker, self.pushes = worker, 0
        self.rule = rule_for(name, self.store, rate, kind, sizes, **options)
        self.into = Snapshot(np.zeros(self.store.layout.weights, np.float32), self.store.layout.moments)

    def pull(self) -> int:
        return self.rule.pull(self.into)

    def offer(self, gradient, samples: int = 8, finite: bool = True, seen=None) -> Contribution:
        """A contribution computed from what was pulled last."""
        n = self.store.layout.weights
        flat = np.full(n, gradient, np.float32) if np.isscalar(gradient) else gradient
        seen = np.zeros(self.store.layout.moments) if seen is None else seen
        self.pushes += 1
        return Contribution(
            flat, finite, samples, self.into.tick, self.into.version, self.worker, 0, self.pushes - 1, seen
        )

    def push(self, gradient=1.0, **more) -> None:
        self.rule.push(self.offer(gradient, **more))

    @property
    def row(self):
        """Counters of this worker."""
        return self.store.rows[self.worker]

    @property
    def book(self):
        """Counters of whoever applies what this worker pushes."""
        return self.store.rows[self.store.layout.actors] if self.store.layout.uplink[0] else self.row

    @property
    def now(self) -> Slot:
        return self.store.slots[0] if self.store.layout.in_place else self.store.current


@pytest.fixture(scope="module")
def family():
    """The process that forks workers."""
    f = Family()
    yield f
    f.close()


@pytest.fixture
def table():
    """A function that makes a store for a rule and seats so many workers at it; the server has its own."""
    opened = []

    def lay(
        name: str, workers: int = 1, size: int = 32, kind: str = "sgd", count=None, sizes=(), rate=RATE, asked=None,
        **options,
    ) -> list[Seat]:  # fmt: skip
        segment = rule_store(name, size, workers, kind, sum(sizes))
        rates = rate if asked is None else lambda steps: asked.append(steps) or rate
        opened.extend((Host(name, segment.path, rates, kind, sizes, **options), segment))
        seated = workers if count is None else count
        return [Seat(name, segment.path, w, rates, kind, sizes, **options) for w in range(seated)]

    yield lay
    for o in opened:
        o.close()


@pytest.fixture
def shared():
    """A function that makes a store for a rule; returns its path."""
    opened = []

    def create(name: str, size: int, workers: int, kind: str = "sgd") -> str:
        segment = rule_store(name, size, workers, kind)
        opened.extend((Host(name, segment.path, RATE, kind), segment))
        return segment.path

    yield create
    for o in opened:
        o.close()


def together(*calls, seconds: float = 60) -> None:
    """Execute calls at once, each in a thread; all must come back."""
    errors = []

    def one(call) -> None:
        try:
            call()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=one, args=(c,), daemon=True) for c in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join(seconds)
    assert not any(t.is_alive() for t in threads), "deadlock"
    if errors:
        raise errors[0]


# -- what every rule offers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_contract(name):
    rule = module("rules", name).Rule
    assert isinstance(rule.consistent, bool)
    for method in ("pull", "push", "leave"):
        assert callable(getattr(rule, method))
        assert inspect.getdoc(getattr(rule, method))
    assert list(inspect.signature(rule.pull).parameters) == ["self", "into"]
    assert len(inspect.signature(rule.push).parameters) == 2
    assert inspect.getdoc(module("rules", name)).startswith(f"Rule `{name}`")


@pytest.mark.parametrize("name", RULES)
def test_one_worker(name, table):
    """Pull 0, push, pull 1 …: weights, versions, steps, ticks; bytes and updates are booked."""
    (seat,) = table(name)
    for k in range(20):
        assert seat.pull() == seat.into.version == k
        assert seat.into.steps == 8 * k
        assert (seat.into.weights == -RATE * k).all()
        before = seat.row[Counter.BYTES]
        seat.push()
        assert seat.row[Counter.BYTES] >= before + seat.into.weights.nbytes
        assert seat.store.progress() == (k + 1, 8 * (k + 1))
    assert seat.book[Counter.UPDATES] == 20
    assert seat.row[Counter.STEPS] == 160
    assert seat.row[Counter.READS] == 20
    assert seat.row[Counter.BYTES] >= 40 * seat.into.weights.nbytes
    assert seat.book[Counter.STALENESS] == seat.book[Counter.STALENESS_MAX] == 0
    assert seat.book[Counter.HISTOGRAM] == 20
    assert seat.now.optimizer["step"][0] == 20
    seat.rule.leave()


@pytest.mark.parametrize("name", RULES)
def test_what_was_pulled_is_a_copy(name, table):
    (seat,) = table(name)
    seat.pull()
    seat.push()
    assert (seat.into.weights == 0).all()
    seat.into.weights[:] = 5.0
    assert seat.pull() == 1
    assert (seat.into.weights == -RATE).all()


@pytest.mark.parametrize("name", RULES)
def test_the_gradient_is_applied_as_it_was_pushed(name, table):
    """FAULTS 2, catalogue 1: overwriting it afterwards changes nothing."""
    (seat,) = table(name)
    gradient = np.ones(32, np.float32)
    for _ in range(3):
        seat.pull()
        gradient[:] = 1.0
        seat.push(gradient)
        assert (gradient == 1).all()  # nor does the rule change it
        gradient[:] = 1000.0
    seat.pull()
    assert (seat.into.weights == -3 * RATE).all()


@pytest.mark.parametrize("name", RULES)
def test_gradients_not_finite_change_no_weight(name, table):
    (seat,) = table(name, kind="adam")
    state = lambda: [seat.now.weights.copy(), *(s.copy() for s in seat.now.optimizer.values())]  # noqa: E731
    seat.pull()
    seat.push()
    before = state()
    for i in range(5):
        assert seat.pull() == 1
        seat.push(np.full(32, np.nan, np.float32), finite=False)
        assert seat.store.progress() == (1, 8 * (2 + i))
    for now, then in zip(state(), before, strict=True):
        assert (now == then).all()
    assert seat.pull() == 1
    assert seat.into.steps == 48
    seat.push()
    assert seat.store.progress() == (2, 56)
    assert seat.book[Counter.UPDATES] == 2
    assert seat.row[Counter.STEPS] == 56


@pytest.mark.parametrize("name", RULES)
def test_a_sample_of_the_gradient_is_left_when_wanted(name, table):
    (seat,) = table(name)
    seat.pull()
    seat.push(3.0)
    assert (seat.store.gradients[-1] == 0).all()
    seat.store.control[Word.SAMPLE_WANTED] = 1
    seat.pull()
    seat.push(7.0)
    assert seat.store.control[Word.SAMPLE_WANTED] == 0
    assert (seat.store.gradients[-1] == 7).all()
    seat.pull()
    seat.push(2.0)
    assert (seat.store.gradients[-1] == 7).all()


@pytest.mark.parametrize("name", RULES)
def test_moments_are_merged(name, table):
    """Statistics of all pushes together, each of two normalizers by itself; those of dropped gradients are not."""
    sizes = (moments.size(3), moments.size(1))
    (seat,) = table(name, sizes=sizes)
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(n, 3)), rng.normal(size=(n, 1))) for n in (4, 1, 7)]
    for i, (a, b) in enumerate(rows):
        seat.pull()
        seen = np.concatenate([moments.of_batch(a), moments.of_batch(b)])
        seat.push(1.0, finite=i != 1, seen=seen)
    seat.pull()
    parts = (np.concatenate([rows[0][j], rows[2][j]]) for j in (0, 1))
    np.testing.assert_allclose(seat.into.moments, np.concatenate([moments.of_batch(p) for p in parts]), rtol=1e-12)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["adam", "rmsprop", "sgd"])
def test_one_worker_equals_the_bare_optimizer(name, kind, table):
    """Also FAULTS 8: with one worker all rules give bit-identical weights, for they all equal this."""
    (seat,) = table(name, size=1000, kind=kind, rate=3e-3)
    gradients = np.random.default_rng(1).normal(size=(100, 1000)).astype(np.float32)
    p = torch.nn.Parameter(torch.zeros(1000))
    optimizer = {
        "adam": lambda: torch.optim.Adam([p], lr=3e-3, eps=1e-5, fused=True),
        "rmsprop": lambda: torch.optim.RMSprop([p], lr=3e-3, alpha=0.99, eps=1e-5, foreach=False),
        "sgd": lambda: torch.optim.SGD([p], lr=3e-3, foreach=False),
    }[kind]()
    for g in gradients:
        seat.pull()
        seat.push(g)
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
    seat.pull()
    assert np.array_equal(seat.into.weights, p.detach().numpy())


def test_lock_and_sync_are_bit_identical_with_one_worker(table):
    """FAULTS 8, as the issue states it: 100 updates, weights and optimizer state."""
    found = []
    for name in ("lock", "sync"):
        (seat,) = table(name, size=777, kind="adam", rate=1e-2)
        rng = np.random.default_rng(5)
        for _ in range(100):
            seat.pull()
            seat.push(rng.normal(size=777).astype(np.float32), samples=int(rng.integers(1, 50)))
        found.append(seat.now.bytes[64:].copy())
    assert np.array_equal(*found)


@pytest.mark.parametrize("name", [r for r in RULES if r != "sync"])  # whose workers push together: see its own tests
@pytest.mark.parametrize("kind", ["adam", "rmsprop"])
def test_optimizer_state_is_everybodys(name, kind, table):
    """FAULTS 3, catalogue 2 and 3: workers that push in turn equal one that pushes all."""
    several, (one,) = table(name, 4, kind=kind), table(name, kind=kind)
    for i in range(12):
        for seat in (several[i % 4], one):
            seat.pull()
            seat.push(1.0)
    for a, b in zip(
        [several[0].now.weights, *several[0].now.optimizer.values()],
        [one.now.weights, *one.now.optimizer.values()], strict=True,
    ):  # fmt: skip
        assert np.array_equal(a, b)
    if kind == "adam":  # constant gradients move Adam by the learning rate each time, if its count is right
        np.testing.assert_allclose(one.now.weights, -12 * RATE, rtol=1e-4)
    assert one.now.optimizer["step"][0] == 12


@pytest.mark.parametrize("name", ["lock", "hogwild"])
def test_staleness(name, table):
    """A pulls, B pulls and pushes twice, A pushes: 2 versions late. Then a very late one."""
    a, b = table(name, 2)
    a.pull()
    b.pull()
    b.push()  # 0 late
    b.push()  # 1 late: it has not pulled since
    a.push()  # 2 late
    assert list(b.row[Counter.HISTOGRAM :][:3]) == [1, 1, 0]
    assert list(a.row[Counter.HISTOGRAM :][:3]) == [0, 0, 1]
    assert (a.row[Counter.STALENESS], a.row[Counter.STALENESS_MAX]) == (2, 2)
    assert (b.row[Counter.STALENESS], b.row[Counter.STALENESS_MAX]) == (1, 1)
    a.pull()
    for _ in range(STALENESS_BINS + 10):
        b.pull()
        b.push()
    a.push(np.full(32, np.nan, np.float32), finite=False)  # dropped: no staleness booked
    assert a.row[Counter.STALENESS_MAX] == 2
    a.push()
    assert a.row[Counter.STALENESS_MAX] == STALENESS_BINS + 10
    assert a.row[Counter.HISTOGRAM + STALENESS_BINS - 1] == 1  # the last bin holds the rest
    assert a.row[Counter.HISTOGRAM :].sum() == a.row[Counter.UPDATES] == 2
    assert a.store.progress()[0] == 3 + STALENESS_BINS + 10 + 1


def test_the_learning_rate_is_that_of_the_global_steps(table):
    """FAULTS 12: two workers, one schedule."""
    for name in RULES:
        asked = []
        seats = table(name, 2, count=2 if name != "sync" else 1, rate=0.5, asked=asked)
        for i in range(4):
            seat = seats[i % len(seats)]
            seat.pull()
            seat.push(samples=5 + i)
        assert asked == [0, 5, 11, 18], name


# -- many processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_workers_in_processes(name, shared, family):
    """Weights are exactly what the counted updates imply, pulls are what the rule declares, steps are exact."""
    workers, pushes = 3, 150
    size = 20_000 if name in CONSISTENT else 300_000
    path = shared(name, size, workers)
    bodies = [("push_ones", {"path": path, "worker": w, "rule": name, "pushes": pushes, "rate": RATE, "bad_every": 7})
              for w in range(workers)]  # fmt: skip
    found = family.run(bodies)
    assert [f["problems"] for f in found] == [[]] * workers
    store = Store(path)
    version, steps = store.progress()
    good = sum(f["good"] for f in found)
    assert steps == sum(f["steps"] for f in found) == workers * pushes * 8
    rows = store.rows
    assert rows[:, Counter.STEPS].sum() == steps
    assert rows[:, Counter.UPDATES].sum() == good
    assert rows[:, Counter.READS].sum() == workers * pushes
    assert max(f["good"] for f in found) <= version <= good
    assert store.control[Word.HOLDER] == 0
    if name in CONSISTENT:
        slot = store.current
        assert (slot.weights == -RATE * version).all()
        assert slot.version == version == slot.optimizer["step"][0]
        assert sum(f["mixed"] for f in found) == 0
        assert rows[:, Counter.READS_OVERLAPPED].sum() == 0
    else:
        applied = -store.slots[0].weights / RATE
        assert version == good
        assert applied.max() <= version  # updates may be lost, but none is made up
        assert applied.min() > 0
        overlapped = rows[:, Counter.READS_OVERLAPPED].sum()
        assert 0 < overlapped <= workers * pushes  # the measured rate that the rule reports
        assert (rows[:, Counter.WRITES_BEGUN] == rows[:, Counter.WRITES_DONE]).all()
        assert rows[:, Counter.WRITES_DONE].sum() == good
    if name == "lock":
        assert version == store.tick - (workers * pushes - good) == good
        assert (rows[:, Counter.T_APPLY] > 0).all()
        assert (rows[:, Counter.T_WAIT] > 0).all()


@pytest.mark.parametrize("name", RULES)
def test_workers_in_threads(name, shared):
    """The thread backend: the same code, a handle each."""
    workers, pushes = 3, 60
    path = shared(name, 3000, workers)
    found = [{} for _ in range(workers)]
    together(
        *(lambda w=w: found[w].update(push_ones(path, w, name, pushes, RATE, bad_every=5)) for w in range(workers))
    )
    assert [f["problems"] for f in found] == [[]] * workers
    store = Store(path)
    version, steps = store.progress()
    assert steps == workers * pushes * 8
    if name in CONSISTENT:
        assert (store.current.weights == -RATE * version).all()


@pytest.mark.parametrize(("name", "kills", "alone"), [("lock", 100, True), ("lock", 20, False), ("sync", 20, False)])
def test_workers_killed_in_their_push(name, kills, alone, shared, family):
    """FAULTS 4: weights and Adam's state stay of one version, nobody waits for the dead, the rest is bit-exact."""
    size, others = 4096, [] if alone else [1]
    path = shared(name, size, 1 + len(others), "adam")
    given = {"path": path, "rule": name, "rate": RATE}
    found = family.run(
        [
            ("kill_pushers", {**given, "worker": 0, "kills": kills, "alone": alone}),
            *(("push_until_stop", {**given, "worker": w}) for w in others),
        ],
    )
    assert [f["problems"] for f in found] == [[]] * (1 + len(others))
    if alone:
        assert found[0]["inside"] >= kills // 10, found
    store = Store(path)
    slot = store.current
    assert slot.optimizer["step"][0] == slot.version
    if name == "lock":
        assert slot.version == store.tick
        assert slot.steps == SAMPLES * slot.version
    segment = make(size, 1, 0, state=state_layout("adam", size))
    reference = Store(segment.path)
    stepper = Stepper(reference, "adam", 1e-5, 0.99)
    ones = np.ones(size, np.float32)
    for _ in range(slot.version):
        stepper.step(reference.slots[0], ones, RATE)
    for a, b in zip([slot.weights, *slot.optimizer.values()],
                    [reference.slots[0].weights, *reference.slots[0].optimizer.values()], strict=True):  # fmt: skip
        assert np.array_equal(a, b)
    segment.close()


def test_lock_books_its_waiting(table):
    (seat,) = table("lock")
    holder = Store(seat_path(seat), None)
    seat.pull()
    holder.lock.acquire()
    threading.Timer(0.08, holder.lock.release).start()
    seat.push()
    assert 0.04 < seat.row[Counter.T_WAIT] < 30
    assert seat.row[Counter.T_APPLY] > 0
    assert seat.row[Counter.T_BLOCKED] == 0


def seat_path(seat: Seat) -> str:
    """A path by which to open a seat's store once more."""
    return f"/proc/self/fd/{seat.store.lock.fd}"


# -- hogwild -------------------------------------------------------------------------------------------


def test_hogwild_counts_pulls_that_overlap_a_write(table):
    a, b = table("hogwild", 2)
    a.pull()
    assert a.row[Counter.READS_OVERLAPPED] == 0
    b.row[Counter.WRITES_BEGUN] += 1  # B is writing
    a.pull()
    assert a.row[Counter.READS_OVERLAPPED] == 1
    b.row[Counter.WRITES_DONE] += 1
    a.pull()
    assert a.row[Counter.READS_OVERLAPPED] == 1

    class Slow(np.ndarray):
        """Weights that take so long to copy that B writes meanwhile."""

        def __setitem__(self, key, value) -> None:
            b.row[Counter.WRITES_BEGUN] += 1
            b.row[Counter.WRITES_DONE] += 1
            super().__setitem__(key, value)

    a.into.weights = a.into.weights.view(Slow)
    a.pull()
    assert a.row[Counter.READS_OVERLAPPED] == 2


def test_hogwild_after_a_worker_died_in_its_write(table):
    """Its successor closes the write that was left open: not every later pull is counted as overlapped."""
    a, b = table("hogwild", 2)
    b.row[Counter.WRITES_BEGUN] += 1
    b.row[Counter.UPDATES] += 3
    again = Seat("hogwild", seat_path(b), 1)
    a.pull()
    assert a.row[Counter.READS_OVERLAPPED] == 0
    again.pull()
    again.push()
    assert a.store.progress()[0] == 4  # the row goes on


# -- sync ----------------------------------------------------------------------------------------------


def test_sync_applies_the_weighted_mean_once(table):
    """Gradients 1 and 5 of 10 and 30 samples: 4."""
    a, b = table("sync", 2, rate=1.0)
    for k in range(3):
        assert a.pull() == b.pull() == k
        together(lambda: a.push(1.0, samples=10), lambda: b.push(5.0, samples=30))
        assert (a.now.weights == -4.0 * (k + 1)).all()
        assert a.store.tick == k + 1
        assert a.store.progress() == (k + 1, 40 * (k + 1))
        assert a.now.optimizer["step"][0] == k + 1
    assert a.row[Counter.UPDATES] == b.row[Counter.UPDATES] == 3
    assert (a.row[Counter.STEPS], b.row[Counter.STEPS]) == (30, 90)
    assert a.row[Counter.STALENESS_MAX] == b.row[Counter.STALENESS_MAX] == 0
    assert a.row[Counter.HISTOGRAM] == b.row[Counter.HISTOGRAM] == 3


def test_sync_equals_one_worker_with_all_the_samples(table):
    """Catalogue 144 and 13: two with 10 and 30 samples equal one with the 40, to 1e-6; the mean is taken once."""
    rng = np.random.default_rng(2)
    per_sample = rng.normal(size=(40, 32)).astype(np.float32)
    a, b = table("sync", 2, kind="adam")
    (one,) = table("sync", 1, kind="adam")
    for _ in range(5):
        for seat in (a, b, one):
            seat.pull()
        together(
            lambda: a.push(per_sample[:10].mean(0), samples=10), lambda: b.push(per_sample[10:].mean(0), samples=30)
        )
        one.push(per_sample.mean(0), samples=40)
    np.testing.assert_allclose(a.now.weights, one.now.weights, atol=1e-6)
    np.testing.assert_allclose(a.now.optimizer["exp_avg"], one.now.optimizer["exp_avg"], atol=1e-6)


def test_sync_order_of_arrival_does_not_matter(table):
    """The sum goes by worker, not by who came first: a run is reproducible."""
    rng = np.random.default_rng(3)
    gradients = rng.normal(size=(3, 32)).astype(np.float32)
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        seats = table("sync", 3, kind="rmsprop")
        for s in seats:
            s.pull()
        calls = []
        for place, w in enumerate(order):

            def late(w=w, place=place, seats=seats) -> None:
                time.sleep(0.05 * place)
                seats[w].push(gradients[w], samples=w + 1)

            calls.append(late)
        together(*calls)
        found.append(seats[0].now.weights.copy())
    assert np.array_equal(*found)


def test_sync_waits_and_books_it(table):
    a, b = table("sync", 2)
    a.pull(), b.pull()

    def late() -> None:
        time.sleep(0.1)
        assert a.store.tick == 0  # a waits
        beat = a.row[Counter.BEAT]
        until(lambda: a.row[Counter.BEAT] > beat, "a worker at the barrier must be seen to live")
        b.push(3.0)

    together(lambda: a.push(1.0), late)
    assert a.row[Counter.T_WAIT] >= 0.08
    assert a.row[Counter.T_BLOCKED] >= 0.08
    assert b.row[Counter.T_WAIT] < a.row[Counter.T_WAIT]
    assert (a.now.weights == -2 * RATE).all()


@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_sync_does_not_wait_for_those_gone(how, table):
    """Whether one leaves or the supervisor finds it dead, before it offers or after."""
    a, b, c = table("sync", 3)
    for s in (a, b, c):
        s.pull()

    def go() -> None:
        time.sleep(0.1)
        if how == "leaves":
            c.rule.leave()
        else:
            a.store.rows[2, Counter.ACTIVE] = 0

    together(lambda: a.push(1.0), lambda: b.push(3.0), go)
    assert a.store.progress() == (1, 16)
    assert (a.now.weights == -2 * RATE).all()
    a.pull()
    b.rule.leave()
    a.push(1.0)  # alone now
    assert a.store.progress() == (2, 24)
    assert (a.now.weights == -3 * RATE).all()


def test_sync_does_not_use_an_old_offer(table):
    """A worker that died after its round was applied has its gradient still lying there: it is not taken again."""
    a, b = table("sync", 2)
    a.pull(), b.pull()
    together(lambda: a.push(1.0), lambda: b.push(3.0))
    a.pull()
    passed = threading.Event()

    def die() -> None:
        time.sleep(0.1)
        assert not passed.is_set()  # a waits for b, whose old offer does not count
        a.store.rows[1, Counter.ACTIVE] = 0

    together(lambda: (a.push(1.0), passed.set()), die)
    assert (a.now.weights == -3 * RATE).all()


def test_sync_one_may_join(table):
    """It takes part from the round it has pulled; the round under way waits for it."""
    (a,) = table("sync", 2, count=1)
    a.pull()
    a.push(1.0)
    a.pull()
    b = Seat("sync", seat_path(a), 1)
    assert b.row[Counter.ACTIVE] == 1

    def join() -> None:
        time.sleep(0.1)
        assert a.store.tick == 1  # a has offered and waits
        assert b.pull() == 1
        b.push(3.0)

    together(lambda: a.push(1.0), join)
    assert a.store.progress() == (2, 24)
    assert (a.now.weights == -3 * RATE).all()


def test_sync_a_replaced_worker_starts_clean(table):
    """Its predecessor's offer of this very round is forgotten: it may have been half written."""
    a, b = table("sync", 2)
    a.pull(), b.pull()
    b.store.gradients[1] = 99.0
    b.row[Counter.OFFERED] = b.into.tick + 1  # offered, then killed
    again = Seat("sync", seat_path(a), 1)
    assert again.row[Counter.OFFERED] == 0
    again.pull()
    together(lambda: a.push(1.0), lambda: again.push(3.0))
    assert (a.now.weights == -2 * RATE).all()


def test_sync_drops_what_is_not_finite(table):
    """In a mean, too: the others' gradients count by their samples; if none is finite there is no version."""
    a, b, c = table("sync", 3)
    nan = np.full(32, np.inf, np.float32)
    for s in (a, b, c):
        s.pull()
    together(
        lambda: a.push(1.0, samples=10), lambda: b.push(nan, samples=20, finite=False), lambda: c.push(5.0, samples=30)
    )
    assert (a.now.weights == -4 * RATE).all()
    assert a.store.progress() == (1, 60)
    for s in (a, b, c):
        assert s.pull() == 1
    together(*(lambda s=s: s.push(nan, samples=2, finite=False) for s in (a, b, c)))
    assert a.store.tick == 2
    assert a.store.progress() == (1, 66)
    assert (a.now.weights == -4 * RATE).all()
    assert [s.row[Counter.UPDATES] for s in (a, b, c)] == [1, 0, 1]
    assert [s.row[Counter.STEPS] for s in (a, b, c)] == [12, 22, 32]


def test_sync_a_round_of_resets_alone(table):
    """Rollouts without a valid step, in every worker at once: a mean over 0 samples is no update, and no NaN."""
    a, b = table("sync", 2, kind="adam")
    for _ in range(2):
        a.pull(), b.pull()
        together(lambda: a.push(0.0, samples=0), lambda: b.push(0.0, samples=0))
    assert np.isfinite(a.now.weights).all()
    assert (a.now.weights == 0).all()
    assert a.store.progress() == (0, 0)
    assert a.store.tick == 2


def test_sync_unequal_numbers_of_pushes(shared, family):
    """FAULTS 14, with processes: those with more to do go on when the others have left."""
    path = shared("sync", 500, 3)
    pushes = (5, 9, 14)
    bodies = [("push_ones", {"path": path, "worker": w, "rule": "sync", "pushes": n, "rate": RATE})
              for w, n in enumerate(pushes)]  # fmt: skip
    found = family.run(bodies)
    assert [f["problems"] for f in found] == [[]] * 3
    store = Store(path)
    version, steps = store.progress()
    assert steps == 8 * sum(pushes)
    assert max(pushes) <= version <= sum(pushes)  # as many as the rounds they met in
    assert (store.current.weights == -RATE * version).all()
    assert (store.rows[:, Counter.ACTIVE] == 0).all()
    assert store.rows[:, Counter.UPDATES].tolist() == list(pushes)


def test_sync_records_a_round(tmp_path):
    """One entry a contribution, in the order of the sum."""
    segment = rule_store("sync", 32, 2)
    log = tmp_path / "schedule.bin"
    seats = [Seat("sync", segment.path, w) for w in range(2)]
    for s in seats:
        s.store.recorder = record.Recorder(log)
        s.pull()
    together(lambda: seats[0].push(1.0, samples=4), lambda: seats[1].push(1.0, samples=6, finite=False))
    entries = record.read(log, 2)
    assert entries["worker"].tolist() == [0, 1]
    assert entries["tick"].tolist() == [1, 1]
    assert entries["steps"].tolist() == [10, 10]
    assert entries["kind"].tolist() == [record.Kind.APPLIED, record.Kind.DROPPED]
    segment.close()


def test_lock_records_each_push(tmp_path):
    segment = rule_store("lock", 32, 2)
    log = tmp_path / "schedule.bin"
    a, b = (Seat("lock", segment.path, w) for w in range(2))
    for s in (a, b):
        s.store.recorder = record.Recorder(log)
        s.pull()
    b.push(1.0, samples=3)
    a.push(1.0, samples=4)
    b.push(np.full(32, np.nan, np.float32), finite=False, samples=5)
    entries = record.read(log, 3)
    assert entries["worker"].tolist() == [1, 0, 1]
    assert entries["pulled"].tolist() == [0, 0, 0]
    assert entries["tick"].tolist() == [1, 2, 3]
    assert entries["version"].tolist() == [1, 2, 2]
    assert entries["steps"].tolist() == [3, 7, 12]
    assert entries["rollout"].tolist() == [0, 0, 1]
    assert entries["kind"].tolist() == [1, 1, 2]
    segment.close()


@pytest.mark.parametrize("name", CONSISTENT)
def test_checked_reads_of_a_rule(name):
    """`--check-reads` finds nothing wrong where nothing is, and something where something is."""
    segment = rule_store(name, 200, 1, checksums=True)
    host, seat = Host(name, segment.path, RATE), Seat(name, segment.path)
    for _ in range(10):
        seat.pull()
        seat.push(np.random.default_rng(0).normal(size=200).astype(np.float32))
    assert seat.row[Counter.READS] == 10
    assert seat.row[Counter.READS_BAD] == 0
    into = snapshot(seat.store)
    seat.now.weights[3] += 1
    seat.rule.pull(into)
    assert seat.row[Counter.READS_BAD] == 1
    host.close()
    segment.close()
