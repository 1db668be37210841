"""Service times for simulate_scaling.py: real runs of one worker, and the parts that such a run cannot tell.

Times are seconds of a core (CPU time) where they can be had, so that what else the machine does at the moment is not
taken for work: a run's wall times are scaled by the share of a core its worker really got.
"""

from __future__ import annotations

import dataclasses
import mmap
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import compress, config
from slipstream import store as stores
from slipstream.config import Given, Run
from slipstream.cores import SINGLE_THREADED, usable_cores
from slipstream.counters import ROW, Counter
from slipstream.launch import Launcher
from slipstream.store import Contribution, Lock, Segment, Snapshot, Store
from slipstream.train import train
from slipstream.tune import Trial, trial

HOLD = 1e-3  # seconds a lock is held in the measurement of its hand-over
RINGS = 16  # rings the server's look is timed with


def run_of(env: str) -> Run:
    """The environment's preset, as trained by default."""
    return config.check(config.from_dict({"env": env, **config.preset(env)}))


# -- real runs -------------------------------------------------------------------------------------


class Watch:
    """CPU time of this process (it supervises) and of the whole machine, while a run goes on."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        import psutil

        while not self.over.wait(0.1):
            t = psutil.cpu_times()
            busy = t.user + t.system + t.nice + sum(getattr(t, k, 0.0) for k in ("irq", "softirq", "steal"))
            self.samples.append((time.perf_counter(), time.process_time(), busy))

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()

    def shares(self) -> tuple[float, float]:
        """Cores kept busy by this process and by all, in the middle of the run."""
        n = len(self.samples)
        if n < 5:
            return 0.0, 0.0
        (a, mine, all_), (b, mine_then, all_then) = self.samples[n // 3], self.samples[-2]
        return (mine_then - mine) / (b - a), (all_then - all_) / (b - a)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A real run: what it did, and what else went on."""

    trial: Trial
    parent: float  # cores the supervising process took
    others: float  # cores that processes of other people took


def real(run: Run, seconds: float, launcher: Launcher, **options: Any) -> Measured:
    """Train for some seconds."""
    import psutil

    with Watch() as watch:
        found = trial(train, dataclasses.replace(run, **options), seconds, 1.0, launcher)
    parent, everything = watch.shares()
    seen = psutil.cpu_count() == usable_cores()  # else the machine's figures are not of our share of it
    return Measured(found, parent, max(0.0, everything - found.shares["cores_busy"]) if seen else 0.0)


def median_of(runs: list[Measured]) -> Measured:
    """Median, number by number."""
    from slipstream.tune import middle

    parent, others = (statistics.median(getattr(r, k) for r in runs) for k in ("parent", "others"))
    return Measured(middle([r.trial for r in runs]), parent, others)


def fit(one: Measured, update: str, parts: dict[str, float], stretch: float) -> dict[str, float]:
    """Costs of simulate_scaling.py from a run of one worker, and the parts it cannot tell.

    They are those of a worker that has the machine to itself: what others slowed it down by `stretch` is taken out.
    """
    t, s = one.trial, one.trial.shares
    wait = s["wait_share"] if update == "server" else 0.0  # else it is the price of a free lock
    worked = 1 - wait + s.get("server_busy_share", 0.0)
    got = min(1.0, max(0.3, (s["cores_busy"] - one.parent) / worked))  # of a core
    others = min(usable_cores() - 1, one.parent + one.others) / max(1, usable_cores() - 1)
    got /= 1 + (stretch - 1) * max(0.0, others)
    each = got / t.updates_per_second  # a share of the time as seconds an update
    known = {k: s[f"{k}_share"] for k in ("collect", "gradient", "pull", "apply")}
    costs = {k: v * each for k, v in known.items()}
    costs |= {"samples": t.samples, "other": max(0.0, 1 - wait - sum(known.values())) * each}
    costs |= {k: parts[k] for k in ("contribution", "ring", "bytes_up", "bytes_down")}
    if update == "server":
        costs |= {"apply": s["server_apply_share"] * each, "look": parts["look"]}
        # a server that takes the worker's core when it is rung works while the worker seems to send
        least = costs["apply"] + costs["look"]
        hidden = min(costs["other"], max(0.0, least - wait * each))
        costs["other"] -= hidden
        costs["wake"] = max(0.0, wait * each + hidden - least) / 2
    elif update == "lock":
        costs["wake"] = parts["handover"]
    return costs


# -- parts by themselves ---------------------------------------------------------------------------


def cpu_seconds(work: Callable[[], Any], seconds: float = 0.25) -> float:
    """CPU time of a call: the median of batches."""
    work()
    begun = time.process_time()
    work()
    batch = max(1, int(2e-3 / max(1e-7, time.process_time() - begun)))
    turns: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(turns) < 3:
        begun = time.process_time()
        for _ in range(batch):
            work()
        turns.append((time.process_time() - begun) / batch)
    return statistics.median(turns)


def parts_of(run: Run, update: str, spec: str) -> dict[str, float]:
    """Single steps of a rule on a store of this run's size."""
    from slipstream import build
    from slipstream.optimize import Stepper
    from slipstream.serve import Server
    from slipstream.transport import Rings

    workers = RINGS if update == "server" else 5
    plain = dataclasses.replace(run, workers=workers, update=update)  # what is sent does not matter for a look
    layout, weights, described = build.layout(plain, Given())
    seen = described["observation_moments"]
    segment = Segment.create(layout.regions()[1], ["/dev/shm", tempfile.gettempdir()])
    stores.initialize(segment.path, layout, weights)
    store = Store(segment.path, 0)
    a, size, sizes = run.algo, len(weights), tuple(n for n in (seen, layout.moments - seen) if n)
    stepper = Stepper(store, a.optimizer, a.epsilon, a.rmsprop_decay, sizes, run.rule)
    gradients = np.random.default_rng(0).normal(size=(5, size)).astype(np.float32) * np.float32(1e-3)
    offers = [Contribution(g, True, 8, 0, 0, i, 0, 0, np.zeros(layout.moments)) for i, g in enumerate(gradients)]

    def apply(n: int) -> None:
        with store.update() as slot:
            stepper.apply(slot, offers[:n], lambda _: 1e-3)

    found = {"pull": cpu_seconds(partial(store.read, Snapshot(np.zeros(size, np.float32), layout.moments)))}
    one, five = cpu_seconds(lambda: apply(1)), cpu_seconds(lambda: apply(5))
    found |= {"apply": one, "contribution": max(0.0, five - one) / 4, "ring": cpu_seconds(lambda: store.bell.ring(1))}
    step = partial(stepper.step, store.slots[0], gradients[0], 1e-3)  # in place: what hogwild does
    found |= {
        "step": cpu_seconds(step),
        "encode": 0.0,
        "decode": 0.0,
        "look": 0.0,
        "bytes_up": 4.0 * size,
        "bytes_down": 4.0 * size,
    }
    if update == "server":
        found["look"] = cpu_seconds(Server(store, stepper, lambda _: 1e-3, None, Rings(store)).look) / RINGS
    if spec != "none":
        packing = compress.make(spec, size, np.random.SeedSequence(0))
        turns = iter(range(10**9))
        found["encode"] = cpu_seconds(lambda: packing.encode(gradients[next(turns) % 5], 0))
        payload = packing.encode(gradients[0], 0)
        found |= {"decode": cpu_seconds(lambda: packing.decode(payload, gradients[4])), "bytes_up": float(len(payload))}
        found["contribution"] += found["decode"]
    store.close()
    segment.close()
    return found


class Alone:
    """A worker without a run: rollouts and gradients, nothing pulled or pushed."""

    def __init__(self, run: Run) -> None:
        from slipstream.worker import Worker

        self.row = np.zeros(ROW)
        self.worker = Worker(run, Given(), 0, 0, self.row, lambda *a, **k: None, Path(tempfile.gettempdir()))

    def rollouts(self, seconds: float) -> list[float]:
        """CPU seconds of each rollout with its gradient."""
        found: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(found) < 4:
            begun = time.process_time()
            self.worker.compute()
            found.append(time.process_time() - begun)
        return found

    def split(self) -> float:
        """Share of the time that went into collecting."""
        collect, gradient = self.row[Counter.T_COLLECT], self.row[Counter.T_GRADIENT]
        return float(collect / (collect + gradient))


def of_size(run: Run, parameters: int) -> Run:
    """The run with two hidden layers so wide that the network has about so many parameters."""
    from slipstream import build

    width = max(1, int((parameters / 2) ** 0.5))
    for _ in range(6):
        run = dataclasses.replace(run, net=dataclasses.replace(run.net, hidden=(width, width)))
        width = max(1, round(width * (parameters / build.layout(run, Given())[2]["parameters"]) ** 0.5))
    return run


def _handover(path: str, seconds: float, barrier: Any) -> list[float]:
    """Take a lock in turn with others: seconds from when it was given back to when one that waited had it."""
    lock = Lock(path)
    gaps: list[float] = []
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        given = memoryview(memory).cast("d")  # when, by the clock that all processes have
        barrier.wait()
        end = time.monotonic() + seconds
        while (asked := time.monotonic()) < end:
            lock.acquire()
            got = time.monotonic()
            if asked < given[0]:
                gaps.append(got - given[0])
            while time.monotonic() - got < HOLD:
                pass
            given[0] = time.monotonic()
            lock.release()
            time.sleep(HOLD / 10)  # leaves its core to whom it has woken
        given.release()
    lock.close()
    return gaps


def _spin(seconds: float, barrier: Any, out: Any) -> None:
    """How long this process runs between two interruptions by others that want the core."""
    found: list[float] = []
    barrier.wait()
    begun = last = time.perf_counter()
    end = begun + seconds
    while last < end:
        now = time.perf_counter()
        if now - last > 0.4e-3:
            found.append(last - begun)
            begun = now
        last = now
    out.put([x for x in found if x > 0.4e-3])


def time_slice() -> float:
    """Median time slice of processes of which there are twice as many as cores."""
    n, spawn = 2 * usable_cores(), multiprocessing.get_context("spawn")
    barrier, out = spawn.Barrier(n), spawn.Queue()
    children = [spawn.Process(target=_spin, args=(1.0, barrier, out), daemon=True) for _ in range(n)]
    for c in children:
        c.start()
    found = [x for _ in children for x in out.get(timeout=60)]
    for c in children:
        c.join()
    return min(0.02, statistics.median(found)) if found else 3e-3  # nobody interrupts anybody here


def _child(index: int, run: Run, parameters: int, seconds: float, barrier: Any, lock: str, out: Any) -> None:
    """One of as many processes as there are cores; the first does alone what needs no other."""
    import torch

    torch.set_num_threads(1)
    me = Alone(run)
    found: dict[str, Any] = {}
    alone = [1.0]
    me.rollouts(0.5)
    barrier.wait()
    if index == 0:
        alone = me.rollouts(seconds)
        cut = np.quantile(alone, np.linspace(0.01, 0.99, 99))
        found["spread"] = [float(x) for x in cut / cut.mean()]
        for update, spec in (("lock", "none"), ("sync", "none"), ("server", "none"), ("server", "topk:0.01")):
            found[f"{update} {spec}"] = parts_of(run, update, spec)
        big = of_size(run, parameters)
        worker = Alone(big)
        whole = statistics.median(worker.rollouts(2 * seconds)[1:])
        found["big"] = {"collect": whole * worker.split(), "gradient": whole * (1 - worker.split())}
        for update, spec in (("lock", "none"), ("server", "none"), ("server", "topk:0.01")):
            found[f"big {update} {spec}"] = parts_of(big, update, spec)
    barrier.wait()
    together = statistics.median(me.rollouts(seconds))
    gaps = _handover(lock, 0.5, barrier)
    out.put((index, together / statistics.median(alone), gaps, found))


def parts(run: Run, parameters: int, seconds: float) -> dict[str, Any]:
    """What is measured without a run: `stretch`, `slice`, `handover`, `spread`, and the parts of each scheme."""
    cores = usable_cores()
    processes = max(2, cores)
    os.environ.update(SINGLE_THREADED)
    spawn = multiprocessing.get_context("spawn")
    barrier, out = spawn.Barrier(processes), spawn.Queue()
    with tempfile.NamedTemporaryFile() as lock:
        lock.write(bytes(8))
        lock.flush()
        shared = run, parameters, seconds, barrier, lock.name, out
        children = [spawn.Process(target=_child, args=(i, *shared), daemon=True) for i in range(processes)]
        for c in children:
            c.start()
        told = sorted(out.get(timeout=300) for _ in children)
        for c in children:
            c.join()
    found: dict[str, Any] = told[0][3]
    found["slice"] = time_slice()
    found["stretch"] = max(1.0, told[0][1]) if cores > 1 else 1.0
    found["handover"] = statistics.median([x for t in told for x in t[2]] or [0.0])
    return found
