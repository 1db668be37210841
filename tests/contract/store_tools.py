"""Process bodies for the tests of the parameter store and of the update rules.

`run(how, bodies)` executes several bodies at once, each in a process or thread of its own, and returns what each
found. As a script, `python store_tools.py HOW < bodies.json`, it is the small single-threaded process that forks.

The pattern: version k has k in every element of weights, optimizer state and moments. Anything else is torn.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from slipstream import record
from slipstream import store as stores
from slipstream.cores import SINGLE_THREADED
from slipstream.counters import Counter, Phase
from slipstream.store import Contribution, Header, Layout, Segment, Slot, Snapshot, Store, Word

PATIENCE = 120.0  # seconds until a body that waits gives up: the machine may be busy
SAMPLES = 3  # environment steps of each update
BODIES: dict[str, Callable] = {}


class Stuck(Exception):
    """Something did not happen in time: a deadlock."""


# -- stores ------------------------------------------------------------------------------------------


def make(size: int, workers: int, moments: int = 5, place: str = "/dev/shm", state=(), **more) -> Segment:
    """A fresh store of `size` weights, all 0, with two pieces of optimizer state and the step count."""
    state = state or (("exp_avg", size), ("exp_avg_sq", size), ("step", 1))
    layout = Layout(size, tuple(state), moments, workers, **more)
    segment = Segment.create(layout.regions()[1], [place])
    stores.initialize(segment.path, layout, np.zeros(size, np.float32))
    return segment


def snapshot(store: Store) -> Snapshot:
    """A reader's own copy, as empty as can be told."""
    return Snapshot(np.full(store.layout.weights, np.nan, np.float32), store.layout.moments)


def fill(slot: Slot) -> None:
    """Make a slot the next version of the pattern, as an optimizer would: in place, piece by piece."""
    k = slot.version + 1
    slot.weights[:] = k
    for piece in slot.optimizer.values():
        piece[:] = k
    slot.moments[:] = k
    slot.header[Header.VERSION] = k
    slot.header[Header.STEPS] += SAMPLES


def faults(slot: Slot | Snapshot) -> list[str]:
    """In what a slot or snapshot differs from the pattern of its version."""
    k, found = slot.version, []
    pieces = {"weights": slot.weights, "moments": slot.moments}
    if isinstance(slot, Slot):
        pieces |= slot.optimizer
    for name, piece in pieces.items():
        if piece.size and not (piece.min() == piece.max() == k):
            found.append(f"version {k}: {name} from {piece.min()} to {piece.max()}")
    if slot.steps != SAMPLES * k:
        found.append(f"version {k}: {slot.steps} steps")
    return found


def contribution(worker: int, rollout: int, tick: int = 0) -> Contribution:
    """What a writer of the pattern puts on record."""
    empty = np.zeros(0)
    return Contribution(np.zeros(0, np.float32), True, SAMPLES, tick, 0, worker, os.getpid() % 65536, rollout, empty)


def until(done: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise Stuck(what)
        time.sleep(1e-4)


def meet(store: Store) -> None:
    """Begin together: wait until every worker is there."""
    store.row[Counter.BEAT] = 1
    until(lambda: bool((store.rows[: store.layout.actors, Counter.BEAT] > 0).all()), "not everybody came")


@contextmanager
def deadline(seconds: float = PATIENCE):
    """Turn a deadlock in a system call into `Stuck` (main thread of a process of ours only)."""

    def late(*_):
        raise Stuck("blocked")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- bodies ------------------------------------------------------------------------------------------


def body(function: Callable) -> Callable:
    """Make a function one that `run` finds by name; it takes and returns JSON values."""
    BODIES[function.__name__] = function
    return function


@body
def write(path, worker, updates, log=None, until_stop=False):
    """Make updates; before each, the copy of the current slot must be whole."""
    store = Store(path, worker, record.Recorder(log) if log else None)
    problems = []
    meet(store)
    made = 0
    while made < updates and not (until_stop and store.control[Word.STOP]):
        with store.update() as slot:
            problems += faults(slot)
            fill(slot)
            store.note(slot, [contribution(worker, made)])
        made += 1
        store.row[Counter.UPDATES] += 1
    return {"made": made, "problems": problems[:5]}


@body
def read(path, worker, last=None):
    """Read until version `last` (or STOP) is there: each read whole, its number right, none older than the one before.

    Also writes into its copy, which nobody else may notice.
    """
    store = Store(path, worker)
    into = snapshot(store)
    newest, reads, problems = 0, 0, []
    meet(store)
    end = time.monotonic() + PATIENCE
    while True:
        stopped = bool(store.control[Word.STOP])
        version = store.read(into)
        reads += 1
        problems += faults(into)
        if not version == into.version == into.tick:
            problems.append(f"read said {version}, header {into.version}, tick {into.tick}")
        if version < newest:
            problems.append(f"version {version} after {newest}")
        newest = version
        into.weights[:] = -1.0
        if time.monotonic() > end:
            raise Stuck(f"version {newest}")
        if stopped or version == last:
            break
    return {
        "reads": reads, "problems": problems[:5], "newest": newest,
        "retries": store.row[Counter.READ_RETRIES], "counted": store.row[Counter.READS],
    }  # fmt: skip


@body
def peek(path, worker, last):
    """The wrong way to read: copy slot 0 whatever happens. Returns whether one was a mixture, and stops all."""
    store = Store(path, worker)
    mixed = copies = 0
    meet(store)
    into = np.zeros(store.layout.weights, np.float32)
    while store.tick < last and not mixed:
        into[:] = store.slots[0].weights
        copies += 1
        mixed += bool(into.min() != into.max())
    store.control[Word.STOP] = 1
    return {"mixed": mixed, "copies": copies}


def spawn_victim(function: Callable[[], None]) -> int:
    """Fork a child that runs until it is killed; its exit code tells if it failed instead."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(3)


def kill(pid: int) -> int:
    """Kill a child of ours at once; returns how it ended (-9 is well)."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@body
def kill_writers(path, worker, kills, log, seed=0, alone=True, longest=2e-3):
    """Fork a writer, kill it at a random moment of its updates, look at what it left; again and again.

    `inside` counts those that held the lock when they died (known for certain only when `alone`), `halves` those
    whose half-written slot was found, unpublished.
    """
    store = Store(path, worker)
    row, counters = store.rows[worker], {"kills": 0, "inside": 0, "halves": 0}
    chance, problems = random.Random(seed), []

    def victim() -> None:
        mine = Store(path, worker, record.Recorder(log))
        rollout = 0
        while True:
            with mine.update() as slot:
                fill(slot)
                mine.note(slot, [contribution(worker, rollout)])
            mine.row[Counter.UPDATES] += 1
            rollout += 1

    meet(store)
    for _ in range(kills):
        before = row[Counter.UPDATES]
        pid = spawn_victim(victim)
        until(lambda: row[Counter.UPDATES] > before, "a writer made no update: deadlock")  # noqa: B023
        time.sleep(chance.uniform(0, longest))
        if (code := kill(pid)) != -signal.SIGKILL:
            problems.append(f"a writer ended by itself: {code}")
        counters["kills"] += 1
        counters["inside"] += int(store.control[Word.HOLDER] == worker + 1)
        with deadline():
            store.lock.acquire()  # the kernel must have released it
        tick = store.tick
        problems += faults(store.current)
        if store.current.version != tick:
            problems.append(f"version {store.current.version} at tick {tick}")
        after = store.slots[(tick + 1) % len(store.slots)]
        counters["halves"] += int(bool(after.weights.min() != after.weights.max()) or after.version != after.weights[0])
        store.control[Word.HOLDER] = 0
        store.lock.release()
        if len(problems) > 5:
            break
    if not alone:
        store.control[Word.STOP] = 1
    return {**counters, "problems": problems[:5]}


@body
def foreign(path):
    """A handle opened before a fork: closed in the child, where using it raises, and still good in the parent."""
    store = Store(path, 0)
    fd = store.lock.fd
    store.lock.acquire()

    def child():
        found = {"closed": store.lock.fd == -1}
        try:
            os.fstat(fd)
            found["descriptor"] = "open"
        except OSError:
            found["descriptor"] = "closed"
        for name, call in {"lock": store.lock.acquire, "update": lambda: store.update().__enter__()}.items():
            try:
                call()
                found[name] = "used"
            except RuntimeError as e:
                found[name] = str(e)
        own = stores.Lock(path)
        found["excluded"] = not _try(own.fd)
        return found

    found = in_child(child)
    found["still_held"] = not _try(stores.Lock(path).fd)  # the child's end did not release the parent's lock
    store.lock.release()
    found["free"] = _try(stores.Lock(path).fd)
    found["pid"] = os.getpid()
    return found


@body
def inherited(path):
    """Why a handle must not be used after fork: the kernel excludes nobody through an inherited descriptor."""
    fd = os.open(path, os.O_RDWR)  # not a Lock: nobody closes it in the child
    fcntl.flock(fd, fcntl.LOCK_EX)
    return in_child(lambda: {"same_descriptor": _try(fd), "own_descriptor": _try(os.open(path, os.O_RDWR))})


def _try(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@body
def interrupted(path):
    """A signal handler that raises while the lock is awaited leaves the handle as it was."""
    holder, store = Store(path, 0), Store(path, 1)
    holder.lock.acquire()
    blocked = False
    try:
        with deadline(0.2):
            store.lock.acquire()
    except Stuck:
        blocked = True
    holder.lock.release()
    with deadline():
        store.lock.acquire()
    return {"blocked": blocked, "mutex": store.lock.mutex.locked()}


@body
def shared_handle(path, worker, threads, updates):
    """Threads that share one handle: its mutex alone keeps them apart, for to the kernel they are one."""
    store = Store(path, worker)
    problems = []

    def one() -> None:
        for _ in range(updates):
            with store.update() as slot:
                problems.extend(faults(slot))
                fill(slot)
                time.sleep(0)  # let the others try

    together = [threading.Thread(target=one) for _ in range(threads)]
    for t in together:
        t.start()
    for t in together:
        t.join(PATIENCE)
    return {"problems": problems[:5], "alive": sum(t.is_alive() for t in together)}


@body
def leave_segment(place):
    """Make a segment with a name and die without giving it back."""
    segment = Segment.create(4096, [place], nameless=False)
    print(json.dumps([{"path": segment.path}]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


# -- rules -------------------------------------------------------------------------------------------
# torch is imported by those that need it: the others start in a tenth of the time


def rule_for(name: str, store: Store, rate, kind: str = "sgd", moment_sizes: tuple[int, ...] = (), **options):
    """An update rule over a handle, with a constant learning rate or a function of steps."""
    from slipstream.config import Rule, module
    from slipstream.optimize import Stepper

    stepper = Stepper(store, kind, 1e-5, 0.99, moment_sizes, Rule(**options))
    return module("rules", name).Rule(store, stepper, rate if callable(rate) else lambda _: rate)


def rule_store(name: str, size: int, workers: int, kind: str = "sgd", moments: int = 0, **more) -> Segment:
    """A store laid out for any rule: room for offers, and in place where a rule is not consistent."""
    from slipstream.config import module
    from slipstream.optimize import state_layout

    in_place = not module("rules", name).Rule.consistent
    if name == "server":  # a seat more, and rings
        workers, more = workers + 1, {"uplink": (4, 4 * size, 0), **more}
    return make(size, workers, moments, state=state_layout(kind, size), offers=True, in_place=in_place, **more)


class Host:
    """What some rules need besides workers: a server. Here a thread; nothing for the other rules."""

    def __init__(self, name: str, path: str, rate, kind: str = "sgd", moment_sizes: tuple[int, ...] = (), **options):
        self.thread, self.error = None, None
        if name == "server":
            from slipstream.config import Rule
            from slipstream.optimize import Stepper
            from slipstream.serve import Server
            from slipstream.transport import Rings

            self.store = Store(path, Store(path).layout.actors)
            stepper = Stepper(self.store, kind, 1e-5, 0.99, moment_sizes, Rule(**options))
            self.server = Server(
                self.store, stepper, rate if callable(rate) else lambda _: rate, None, Rings(self.store)
            )
            self.stopping = False
            self.thread = threading.Thread(target=self._run, daemon=True)
            self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stopping:
                if not self.server.look():
                    self.server.transport.wait()
        except BaseException as e:
            self.error = e

    def close(self) -> None:
        """Stop it; raises what went wrong in it."""
        if self.thread is not None:
            self.stopping = True
            self.thread.join(10)
            self.store.close()
            if self.error is not None:
                raise self.error


@body
def push_ones(path, worker, rule, pushes, rate, samples=8, log=None, bad_every=0):
    """Pull and push gradient 1 (every `bad_every`-th one not finite); each pull is held to what the rule declares."""
    import torch

    torch.set_num_threads(1)
    store = Store(path, worker, record.Recorder(log) if log else None)
    into = snapshot(store)
    into.weights[:] = 0
    meet(store)
    r = rule_for(rule, store, rate)
    ones, nan = np.ones(store.layout.weights, np.float32), np.full(store.layout.weights, np.nan, np.float32)
    newest, good, mixed, problems = 0, 0, 0, []
    for i in range(pushes):
        version = r.pull(into)
        low, high = float(into.weights.min()), float(into.weights.max())
        mixed += low != high
        if r.consistent and not low == high == -rate * version:
            problems.append(f"version {version}: weights {low} to {high}")
        if version < newest or version != into.version:
            problems.append(f"version {version} after {newest}, header {into.version}")
        newest = version
        finite = not bad_every or (i + 1) % bad_every != 0
        good += finite
        r.push(
            Contribution(
                ones if finite else nan, finite, samples, into.tick, version, worker, 0, i, np.zeros(0), 1.0, 1.0
            )
        )
    r.leave()
    store.row[Counter.PHASE] = Phase.LEFT
    return {"good": good, "steps": samples * pushes, "mixed": mixed, "problems": problems[:5]}


@body
def kill_pushers(path, worker, rule, kills, rate, kind="adam", seed=0, longest=2e-3, alone=True):
    """As `kill_writers`, with a rule: pushes of gradient 1; a dead one's row is set inactive, as by the supervisor."""
    store = Store(path, worker)
    row, problems, inside, halves = store.rows[worker], [], 0, 0
    chance = random.Random(seed)

    def victim() -> None:
        mine = Store(path, worker)
        r = rule_for(rule, mine, rate, kind)
        into, ones = Snapshot(np.zeros(mine.layout.weights, np.float32), 0), np.ones(mine.layout.weights, np.float32)
        while True:
            version = r.pull(into)
            r.push(Contribution(ones, True, SAMPLES, into.tick, version, worker, 0, 0, np.zeros(0)))

    meet(store)
    for _ in range(kills):
        before = row[Counter.UPDATES]
        pid = spawn_victim(victim)
        until(lambda: row[Counter.UPDATES] > before, "a worker made no update: deadlock")  # noqa: B023
        time.sleep(chance.uniform(0, longest))
        if (code := kill(pid)) != -signal.SIGKILL:
            problems.append(f"a worker ended by itself: {code}")
        inside += int(store.control[Word.HOLDER] == worker + 1)
        row[Counter.ACTIVE] = 0
        with deadline():
            store.lock.acquire()
        slot, tick = store.current, store.tick
        state = [*slot.optimizer.values(), slot.weights]
        if any(piece.min() != piece.max() for piece in state) or slot.optimizer["step"][0] != slot.version:
            problems.append(f"torn: {[(float(p.min()), float(p.max())) for p in state]} at version {slot.version}")
        after = store.slots[(tick + 1) % len(store.slots)]
        halves += int(any(p.min() != p.max() for p in [*after.optimizer.values(), after.weights]))
        store.control[Word.HOLDER] = 0
        store.lock.release()
        if len(problems) > 5:
            break
    if not alone:
        store.control[Word.STOP] = 1
    return {"inside": inside, "halves": halves, "problems": problems[:5]}


@body
def push_until_stop(path, worker, rule, rate, kind="adam"):
    """Pull and push gradient 1 until told to stop."""
    import torch

    torch.set_num_threads(1)
    store = Store(path, worker)
    r = rule_for(rule, store, rate, kind)
    into, ones = snapshot(store), np.ones(store.layout.weights, np.float32)
    meet(store)
    problems, made = [], 0
    while not store.control[Word.STOP]:
        version = r.pull(into)
        if into.weights.min() != into.weights.max():
            problems.append(f"version {version} torn")
        r.push(Contribution(ones, True, SAMPLES, into.tick, version, worker, 0, made, np.zeros(0)))
        made += 1
    r.leave()
    return {"made": made, "problems": problems[:5]}


# -- how they are run --------------------------------------------------------------------------------


def run(how: str, bodies: list[tuple[str, dict]], seconds: float = 2 * PATIENCE) -> list[dict]:
    """Execute bodies at once; returns what each returned, or raises with the traceback of one that failed.

    `how`: spawn (a fresh interpreter each), fork (children of one small process that has the store open already),
    thread (threads of one process), serial (one after another in one process).
    """
    jobs = [[b] for b in bodies] if how == "spawn" else [bodies]
    path = os.pathsep.join(p for p in sys.path if p)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "serial" if how == "spawn" else how], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )
        for _ in jobs
    ]  # fmt: skip
    try:
        for process, job in zip(processes, jobs, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(job))
            process.stdin.close()
            process.stdin = None  # sent
        end, found = time.monotonic() + seconds, []
        for process in processes:
            out, errors = process.communicate(timeout=max(1.0, end - time.monotonic()))
            assert out, f"{process.args} ended with {process.returncode}:\n{errors}"
            found += json.loads(out)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    for result in found:
        if "traceback" in result:
            raise AssertionError(result["traceback"])
    return found


class Family:
    """A process that has imported torch once and forks bodies again and again (it makes no tensor operation itself)."""

    def __init__(self) -> None:
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **SINGLE_THREADED, "PYTHONPATH": path},
        )  # fmt: skip

    def run(self, bodies: list[tuple[str, dict]]) -> list[dict]:
        """Execute bodies at once, each in a forked process; returns what each returned, or raises its traceback."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None  # noqa: PT018
        stdin.write(json.dumps(bodies) + "\n")
        stdin.flush()
        found = json.loads(stdout.readline())
        for result in found:
            if "traceback" in result:
                raise AssertionError(result["traceback"])
        return found

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def in_child(function: Callable[[], dict]) -> dict:
    """The result of a function in a forked child."""
    return _forked([function])[0]


def _forked(functions: list[Callable[[], dict]]) -> list[dict]:
    """The results of functions executed at once, each in a forked child; all are killed if one fails."""
    pipes, pids = [], []
    for function in functions:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(theirs, json.dumps(_guarded(function)).encode())
            os._exit(0)
        os.close(theirs)
        pipes.append(ours)
        pids.append(pid)
    found: list[dict] = []
    for pipe in pipes:
        with open(pipe, "rb") as file:
            data = file.read()
        found.append(json.loads(data) if data else {"traceback": "a forked process died"})
        if found[-1] and "traceback" in found[-1]:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return found


def _guarded(function: Callable[[], dict]) -> dict:
    try:
        return function()
    except BaseException:
        return {"traceback": traceback.format_exc()}


def _threaded(functions: list[Callable[[], dict]]) -> list[dict]:
    found: list[dict] = [{"traceback": "still running"} for _ in functions]

    def one(i: int) -> None:
        found[i] = _guarded(functions[i])

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(functions))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * PATIENCE)
    return found


def _calls(bodies: list) -> list[Callable[[], dict]]:
    return [lambda name=name, given=given: BODIES[name](**given) for name, given in bodies]


def main() -> None:
    """Run the bodies on standard input as `sys.argv[1]` says; print their results."""
    how = sys.argv[1]
    if how == "serve":
        import slipstream.optimize
        import slipstream.rules.lock  # noqa: F401

        for line in sys.stdin:
            print(json.dumps(_forked(_calls(json.loads(line)))), flush=True)
        return
    bodies = json.load(sys.stdin)
    calls = _calls(bodies)
    if how == "fork":
        paths = {given["path"] for _, given in bodies}
        kept = [Store(p) for p in paths]  # handles for the children to inherit  # noqa: F841
        found = _forked(calls)
    elif how == "thread":
        found = _threaded(calls)
    else:
        found = [_guarded(c) for c in calls]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
