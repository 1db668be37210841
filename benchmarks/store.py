"""What the parameter store costs, against the same work done bare; both sides in one run, in turn.

    python benchmarks/store.py              the whole table
    python benchmarks/store.py --quick      fewer and shorter repeats
    python benchmarks/store.py --reads 10_000_000   the torn-read proof at full length
    python benchmarks/store.py --json       one JSON object

- update: a push of rule `lock` with Adam, against `torch.optim.Adam(fused=True).step()` on a flat parameter
  plus a copy of as many bytes as a slot has. Target: 1.5 times at most.
- read: `Store.read` against NumPy's copy of the same weights to the same place. Target: 1.3 times at most.
- rates: reads/s and updates/s of 1 to 4 processes together.
- proof: readers check that every element of what they read has one value, the version's, while a writer writes.
Every number is the median of the repeats, with their least and greatest in brackets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import store as stores
from slipstream.cores import SINGLE_THREADED
from slipstream.counters import Counter
from slipstream.store import Contribution, Header, Layout, Segment, Snapshot, Store, Word

SIZES = (10_000, 1_700_000)
TARGETS = {"update": 1.5, "read": 1.3}
PATTERN = 1 << 20  # the proof writes versions modulo this: exact in float32


def make(size: int, workers: int, state: tuple[tuple[str, int], ...], slots: int = 4) -> Segment:
    """A fresh store."""
    layout = Layout(size, state, 0, workers, slots)
    segment = Segment.create(layout.regions()[1], ["/dev/shm", tempfile.gettempdir()])
    stores.initialize(segment.path, layout, np.zeros(size, np.float32))
    return segment


def aligned(size: int) -> NDArray[np.float32]:
    """Zeros where torch would put them (a multiple of 64 bytes): elsewhere a copy may take 20 times as long."""
    raw = np.zeros(4 * size + 64, np.uint8)
    at = -raw.ctypes.data % 64
    return raw[at : at + 4 * size].view(np.float32)


def adam(store: Store) -> Callable[[], None]:
    """One pull-and-push of rule `lock` with Adam, as a worker makes it."""
    from slipstream.optimize import Stepper
    from slipstream.rules.lock import Rule

    rule = Rule(store, Stepper(store, "adam", 1e-5, 0.99), lambda _: 1e-3)
    size = store.layout.weights
    gradient = aligned(size)
    gradient[:] = np.random.default_rng(0).normal(size=size)
    c = Contribution(gradient, True, 8, 0, 0, store.worker or 0, 0, 0, np.zeros(0))

    def push() -> None:
        c.version = c.tick = store.tick
        rule.push(c)

    return push


# -- one process, in turn ------------------------------------------------------------------------------


def timed(sides: dict[str, Callable[[], Any]], repeats: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds a call of each side, per repeat.

    Within a repeat the sides take short turns, in changing order, and each side's number is the median of its
    turns: what else the machine does hits few turns, and all sides alike.
    """
    calls = {}
    for name, f in sides.items():
        f()
        begun = time.perf_counter()
        f()
        calls[name] = max(1, int(1e-3 / max(1e-7, time.perf_counter() - begun)))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        turns: dict[str, list[float]] = {name: [] for name in sides}
        order, end = list(sides), time.perf_counter() + seconds
        while time.perf_counter() < end or len(turns[order[-1]]) < 5:
            order.append(order.pop(0))
            for name in order:
                f, n = sides[name], calls[name]
                begun = time.perf_counter()
                for _ in range(n):
                    f()
                turns[name].append((time.perf_counter() - begun) / n * 1e6)
        for name, all_turns in turns.items():
            found[name].append(statistics.median(all_turns))
    return found


def against_bare(size: int, repeats: int, seconds: float) -> dict[str, Any]:
    """Update and read of a store of `size` weights against the bare work."""
    import torch

    from slipstream import record
    from slipstream.optimize import state_layout

    torch.set_num_threads(1)
    segment = make(size, 2, state_layout("adam", size))
    store, recorded = Store(segment.path, 0), Store(segment.path, 1)
    with tempfile.TemporaryDirectory() as folder:
        recorded.recorder = record.Recorder(Path(folder) / "schedule.bin")
        parameter = torch.nn.Parameter(torch.zeros(size))
        parameter.grad = torch.from_numpy(np.random.default_rng(0).normal(size=size).astype(np.float32))
        optimizer = torch.optim.Adam([parameter], lr=1e-3, eps=1e-5, fused=True)
        here, there = (aligned(store.layout.slot_bytes // 4) for _ in range(2))

        def bare() -> None:
            there[:] = here
            optimizer.step()

        ours = {"update": adam(store), "update_recorded": adam(recorded)}
        times = timed({**ours, "bare_update": bare, "bare_step": optimizer.step}, repeats, seconds)
    mine = Snapshot(aligned(size), 0)
    weights, published = mine.weights, store.current.weights

    def copy() -> None:
        weights[:] = published

    times |= timed({"read": partial(store.read, mine), "bare_read": copy}, repeats, seconds)
    segment.close()
    out: dict[str, Any] = {name: spread(v) for name, v in times.items()}
    for name, over in (("update", "bare_update"), ("update_recorded", "bare_update"), ("read", "bare_read")):
        out[f"{name}_ratio"] = spread([a / b for a, b in zip(times[name], times[over], strict=True)])
    return out


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# -- several processes ---------------------------------------------------------------------------------


def keep_on(path: str, worker: int, what: str) -> None:
    """Read or update until told to stop."""
    store = Store(path, worker)
    if what == "update":
        import torch

        torch.set_num_threads(1)
        act = adam(store)
    else:
        mine = Snapshot(aligned(store.layout.weights), 0)

        def act() -> None:
            store.read(mine)

    while not store.control[Word.STOP]:
        act()


def rate(size: int, readers: int, writers: int, windows: int, seconds: float) -> dict[str, Any]:
    """Reads/s and updates/s, over windows of time, of processes that do nothing else."""
    from slipstream.optimize import state_layout

    segment = make(size, readers + writers, state_layout("adam", size))
    store = Store(segment.path)
    jobs = ["read"] * readers + ["update"] * writers
    processes = [start(keep_on, segment.path, i, what) for i, what in enumerate(jobs)]
    done = [Counter.READS] * readers + [Counter.UPDATES] * writers
    wait(lambda: all(store.rows[i, c] > 0 for i, c in enumerate(done)), processes)
    reads, updates = [], []
    for _ in range(windows):
        before, begun = store.rows.copy(), time.perf_counter()
        time.sleep(seconds)
        more, passed = store.rows - before, time.perf_counter() - begun
        reads.append(float(more[:, Counter.READS].sum()) / passed)
        updates.append(float(more[:, Counter.UPDATES].sum()) / passed)
    store.control[Word.STOP] = 1
    finish(processes)
    retries = float(store.rows[:, Counter.READ_RETRIES].sum() / max(1.0, store.rows[:, Counter.READS].sum()))
    segment.close()
    found: dict[str, Any] = {"size": size, "readers": readers, "writers": writers, "retried_share": retries}
    if readers:
        found["reads_per_second"] = spread(reads)
    if writers:
        found["updates_per_second"] = spread(updates)
    return found


def start(function: Callable[..., None], *args: Any) -> Any:
    """Start a process."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args, daemon=True)
    process.start()
    return process


def wait(done: Callable[[], bool], processes: list[Any], seconds: float = 120) -> None:
    """Wait until something is so; a process that dies meanwhile ends the benchmark."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end or any(p.exitcode for p in processes):
            finish(processes)
            raise SystemExit("a process of the benchmark died or did not begin")
        time.sleep(0.01)


def finish(processes: list[Any]) -> None:
    """Let processes end, or end them."""
    for p in processes:
        p.join(10)
        if p.is_alive():
            p.kill()


# -- the proof -----------------------------------------------------------------------------------------


def write_pattern(path: str, worker: int, naive: bool) -> None:
    """Make updates that put their version into every element, as fast as can be; `naive`: all in slot 0."""
    store = Store(path, worker)
    while not store.control[Word.STOP]:
        if naive:
            store.slots[0].weights[:] = store.row[Counter.UPDATES] % PATTERN
            store.row[Counter.UPDATES] += 1
            continue
        with store.update() as slot:
            k = slot.version + 1
            slot.header[Header.VERSION] = k
            slot.weights[:] = k % PATTERN
            for piece in slot.optimizer.values():
                piece[:] = k % PATTERN
        store.row[Counter.UPDATES] += 1


def check_pattern(path: str, worker: int, reads: int, naive: bool) -> None:
    """Read so many times; count what is not one version (in ERRORS) or goes backwards (in BACKWARDS).

    `naive` copies the one slot that all updates go to, as a shared model is usually read: it shows that a torn
    read would be seen.
    """
    store = Store(path, worker)
    mine = Snapshot(aligned(store.layout.weights), 0)
    weights, row, newest = mine.weights, store.row, 0
    lowest, highest = weights.min, weights.max
    for _ in range(reads):
        if naive:
            weights[:] = store.slots[0].weights
            row[Counter.READS] += 1
            if lowest() != highest():
                row[ERRORS] += 1
            continue
        version = store.read(mine)
        if not lowest() == highest() == version % PATTERN:
            row[ERRORS] += 1
        if version < newest:
            row[BACKWARDS] += 1
        newest = version
    row[FINISHED] = 1


ERRORS, BACKWARDS, FINISHED = Counter.LOSS, Counter.POLICY_LOSS, Counter.VALUE_LOSS  # free numbers of a row


def proof(reads: int, slots: int = 4, naive: bool = False, say: bool = False) -> dict[str, Any]:
    """`reads` reads by two processes against a writer."""
    size, readers = 4096, 2
    segment = make(size, readers + 1, (("exp_avg", size), ("exp_avg_sq", size)), slots)
    store = Store(segment.path)
    processes = [start(write_pattern, segment.path, readers, naive)]
    wait(lambda: store.rows[readers, Counter.UPDATES] > 0, processes)
    begun = time.perf_counter()
    processes += [start(check_pattern, segment.path, i, reads // readers, naive) for i in range(readers)]
    rows = store.rows[:readers]
    said = begun
    while not rows[:, FINISHED].all():
        wait(lambda: True, processes)
        time.sleep(0.05)
        if say and time.perf_counter() - said > 30:
            said = time.perf_counter()
            print(f"  {int(rows[:, Counter.READS].sum()):,} reads, {int(rows[:, ERRORS].sum())} torn", file=sys.stderr)
    seconds = time.perf_counter() - begun
    store.control[Word.STOP] = 1
    finish(processes)
    found = {
        "reads": int(rows[:, Counter.READS].sum()), "torn": int(rows[:, ERRORS].sum()),
        "backwards": int(rows[:, BACKWARDS].sum()), "retried": int(rows[:, Counter.READ_RETRIES].sum()),
        "updates": int(store.rows[readers, Counter.UPDATES]), "version": store.current.version,
        "weights": size, "slots": slots, "readers": readers, "seconds": seconds,
    }  # fmt: skip
    segment.close()
    return found


# -- report --------------------------------------------------------------------------------------------


def cpu() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def about() -> dict[str, str]:
    """Where and with what this was measured."""
    packages = ", ".join(f"{p} {version(p)}" for p in ("slipstream-rl", "torch", "numpy"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"{os.getloadavg()[0]:.1f}"
    return {
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "versions": f"Python {platform.python_version()}, {packages}",
        "machine": f"{cpu()}, {cores} cores, {platform.system()} {platform.release()}, load {load} at the start",
    }


def number(v: dict[str, float], unit: str = "") -> str:
    """`median [min to max] unit`."""
    digits = 2 if v["median"] < 100 else 0
    return f"{v['median']:>11,.{digits}f} [{v['min']:,.{digits}f} to {v['max']:,.{digits}f}] {unit}".rstrip()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--reads", type=int, help="reads of the torn-read proof (default 1,000,000; quick: 50,000)")
    parser.add_argument("--only", choices=["bare", "rates", "proof"], help="one part of the table")
    options = parser.parse_args()
    repeats, seconds, windows = (5, 0.1, 3) if options.quick else (15, 0.5, 7)
    reads = options.reads if options.reads is not None else 50_000 if options.quick else 1_000_000
    os.environ.update(SINGLE_THREADED)
    found: dict[str, Any] = {"about": about()}
    bad = 0

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    for name, text in found["about"].items():
        say(f"{name:9} {text}")

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    if wanted("bare"):
        found["bare"] = {}
        for size in SIZES:
            found["bare"][size] = r = against_bare(size, repeats, seconds if size < 100_000 else 3 * seconds)
            say(f"\n{size:,} weights, {repeats} repeats")
            for name, what in (
                ("update", "store update (lock, Adam)"), ("update_recorded", "  the same, recorded"),
                ("bare_update", "bare: Adam step + slot copy"), ("bare_step", "  of which the step"),
                ("read", "store read"), ("bare_read", "bare: NumPy copy"),
            ):  # fmt: skip
                say(f"  {what:29} {number(r[name], 'µs')}")
            for name in ("update", "update_recorded", "read"):
                target = TARGETS[name.split("_")[0]]
                r[f"{name}_met"] = met = r[f"{name}_ratio"]["median"] <= target
                what = f"{name.replace('_', ' ')}: ratio"
                say(f"  {what:29} {number(r[f'{name}_ratio'])}   target <= {target}: {'met' if met else 'MISSED'}")
    if wanted("rates"):
        found["rates"] = []
        for size in SIZES:
            say(f"\n{size:,} weights, processes together, {windows} windows")
            cases = [(n, 0) for n in (1, 2, 3, 4)] + [(0, n) for n in (1, 2, 3, 4)] + [(1, 1)]
            for readers, writers in cases:
                r = rate(size, readers, writers, windows, seconds)
                found["rates"].append(r)
                text = "   ".join(number(r[k], k[:-11] + "/s") for k in r if k.endswith("_per_second"))
                say(f"  {readers} reading, {writers} updating {text}   {r['retried_share']:.2%} of reads repeated")
    if wanted("proof"):
        say(f"\ntorn reads: {reads:,} reads, 2 readers against a writer")
        found["control"] = c = proof(max(10_000, reads // 50), naive=True)
        say(f"  plain copies of a shared slot: {c['torn']:,} of {c['reads']:,} torn ({c['torn'] / c['reads']:.2%})")
        found["proofs"] = [
            proof(max(2, reads // 10), slots=2, say=not options.json),
            proof(reads, say=not options.json),
        ]
        for p in found["proofs"]:
            say(
                f"  Store.read, {p['slots']} slots: {p['torn']} of {p['reads']:,} torn, {p['backwards']} backwards, "
                f"{p['retried']:,} repeated; {p['updates']:,} updates meanwhile; {p['seconds']:.0f} s"
            )
            bad += p["torn"] + p["backwards"]
    if options.json:
        print(json.dumps(found))
    if bad:
        raise SystemExit("torn reads")


if __name__ == "__main__":
    main()
