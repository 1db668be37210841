"""The parameter store: the one place where weights and optimizer state live, versioned.

A segment of shared memory with S slots. A slot holds weights, optimizer state, normalizer moments
and counters; `tick % S` is the current one. A writer holds the lock, copies the current slot to the
next, changes that, and publishes it by writing the tick last. A reader takes no lock: it copies the
current slot and copies again if writers came round to it meanwhile. So a read is always one version,
and a writer killed anywhere leaves the published version as it was.

A tick is one such transaction. Most make a version; one whose gradient was not finite makes none.
This file knows nothing of torch, so that the supervising process need not load it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from slipstream.bell import Bell
from slipstream.counters import RING, ROW, STALENESS_BINS, Counter, Phase
from slipstream.errors import ConfigError
from slipstream.record import PACKED, Kind, Recorder

MAGIC = b"SLIPSTO1"
PREFACE = 16384  # bytes: magic, length, layout as JSON
LINE = 64  # bytes: everything begins on a cache line
ORDERED = os.uname().machine in ("x86_64", "amd64", "i386", "i686")  # stores and loads are seen in order


class Header(IntEnum):
    """Index of each int64 in a slot's header."""

    TICK = 0
    VERSION = 1  # updates applied
    STEPS = 2  # environment steps whose experience has been offered
    ENTRIES = 3  # entries of schedule.bin that belong to this tick and those before
    CHECKSUM = 4  # of the weights, where somebody asked for it (else 0)


class Word(IntEnum):
    """Index of each int64 of the control block; a cache line apart."""

    TICK = 0
    STOP = 8  # 1: leave at the next rollout
    PAUSE = 16  # number of the newest pause request
    PAUSE_TICK = 24  # workers pause once they have pulled this tick or a later one
    RESUME = 32  # number of the newest pause request that is over
    HOLDER = 40  # worker + 1 that holds the lock
    SAMPLE_WANTED = 48  # 1: the next push leaves a copy of its gradient in `gradients[-1]`
    PAUSE_STATE = 56  # 1: write the worker's state when pausing
    DISK_FULL = 57  # 1: a writer waits for room for the record


# plain integers for `read`, which takes little longer than the copy it makes; TICK is 0 in headers, too
TICK, VERSION, READS = int(Word.TICK), int(Header.VERSION), int(Counter.READS)


@dataclass(frozen=True)
class Layout:
    """What a store holds. Sizes are numbers of elements.

    Attributes:
        weights: float32 elements of the flat weight vector (padded to whole cache lines).
        optimizer: name and float32 elements of each piece of optimizer state.
        moments: float64 elements of normalizer statistics.
        workers: rows of counters.
        slots: S; a reader is disturbed only if S - 1 updates happen during its copy.
        offers: True where every worker needs a buffer for its gradient (rule `sync`).
        in_place: True for a rule that changes the current slot without a lock (`hogwild`).
        checksums: True to keep a checksum of the weights with each version (`--check-reads`).
        uplink: rule `server`: messages in the ring of each worker, bytes of a compressed gradient, elements of the
            weights it was computed from (0: not sent). The last row of counters is then the server's.
    """

    weights: int
    optimizer: tuple[tuple[str, int], ...]
    moments: int
    workers: int
    slots: int = 4
    offers: bool = False
    in_place: bool = False
    checksums: bool = False
    uplink: tuple[int, int, int] = (0, 0, 0)

    @property
    def actors(self) -> int:
        """Rows of workers: all but the server's, where there is one."""
        return self.workers - bool(self.uplink[0])

    @property
    def entry_bytes(self) -> int:
        """Bytes of one message of an uplink."""
        return _up(16 * 8 + 8 * self.moments) + _up(self.uplink[1]) + _up(4 * self.uplink[2])

    def regions(self) -> tuple[dict[str, int], int]:
        """Byte offset of each region, and the size of the whole segment."""
        sizes = {
            "control": LINE * 8,
            "rows": 8 * ROW * self.workers,
            "rings": 8 * 4 * RING * self.workers,
            "gradients": 4 * self.weights * ((self.workers if self.offers else 0) + 1),
            "offers": (80 + 8 * self.moments) * self.workers if self.offers else 0,
            "uplinks": (2 * LINE + self.uplink[0] * self.entry_bytes) * self.actors if self.uplink[0] else 0,
            "slots": self.slot_bytes * self.slots,
        }
        offset, at = PREFACE, {}
        for name, bytes_ in sizes.items():
            at[name] = offset
            offset = _up(offset + bytes_)
        return at, offset

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        state = sum(_up(4 * n) for _, n in self.optimizer)
        applied = _up(8 * self.actors) if self.uplink[0] else 0
        return LINE + _up(4 * self.weights) + state + _up(8 * self.moments) + applied


def layout_from(fields: dict[str, Any]) -> Layout:
    """A layout from its fields as JSON holds them."""
    optimizer = tuple((name, n) for name, n in fields["optimizer"])
    depth, payload, read = fields.get("uplink", (0, 0, 0))
    return Layout(**{**fields, "optimizer": optimizer, "uplink": (depth, payload, read)})


def _up(n: int) -> int:
    return -(-n // LINE) * LINE


class Slot:
    """Views of one slot: `header` int64 [8], `weights` float32 [N], `optimizer` by name, `moments` float64.

    `numbers` and `body` are header and weights as memoryviews, whose items and copies cost a fraction of NumPy's.
    """

    def __init__(self, memory: Any, offset: int, layout: Layout) -> None:
        self.bytes = np.frombuffer(memory, np.uint8, layout.slot_bytes, offset)
        self.header = np.frombuffer(memory, np.int64, 8, offset)
        offset += LINE
        self.weights = np.frombuffer(memory, np.float32, layout.weights, offset)
        offset += _up(4 * layout.weights)
        self.optimizer: dict[str, NDArray[np.float32]] = {}
        for name, n in layout.optimizer:
            self.optimizer[name] = np.frombuffer(memory, np.float32, n, offset)
            offset += _up(4 * n)
        self.moments = np.frombuffer(memory, np.float64, layout.moments, offset)
        offset += _up(8 * layout.moments)
        # rule `server`: number of the last message of each worker that is in these weights
        self.applied = np.frombuffer(memory, np.int64, layout.actors if layout.uplink[0] else 0, offset)
        self.numbers, self.body = view(self.header), view(self.weights)

    @property
    def version(self) -> int:
        """Updates applied to these weights."""
        return int(self.numbers[Header.VERSION])

    @property
    def steps(self) -> int:
        """Global environment steps."""
        return int(self.numbers[Header.STEPS])


class Snapshot:
    """A worker's own copy of what it pulled; `weights` is the memory its network computes with."""

    def __init__(self, weights: NDArray[np.float32], moments: int) -> None:
        self.weights = weights
        self.moments = np.zeros(moments)
        self.header = np.zeros(8, np.int64)
        self.numbers, self.body = view(self.header), view(self.weights)

    @property
    def tick(self) -> int:
        """Transaction that made these weights."""
        return int(self.numbers[Header.TICK])

    @property
    def version(self) -> int:
        """Updates applied to these weights."""
        return int(self.numbers[Header.VERSION])

    @property
    def steps(self) -> int:
        """Global environment steps when these weights were current."""
        return int(self.numbers[Header.STEPS])


def view(array: Any) -> Any:
    """An array whose scalars cost less than NumPy's."""
    return memoryview(array)


def checksum(weights: NDArray[np.float32]) -> int:
    """63-bit checksum of a weight vector; never 0."""
    digest = blake2b(cast(Any, weights), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) | 1


class Lock:
    """A lock the kernel releases when its holder dies: `flock` on a descriptor of this handle alone.

    A `flock` belongs to the open file description: a descriptor inherited over fork would exclude
    nobody. So each handle opens its own, refuses to be used by another process, and is closed in
    forked children. Threads that share one handle are kept apart by a mutex besides.
    """

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.pid = os.getpid()
        self.mutex = threading.Lock()
        _locks.add(self)

    def acquire(self) -> None:
        """Block until the lock is ours.

        Raises:
            RuntimeError: this handle was opened by another process.
        """
        if os.getpid() != self.pid:
            raise RuntimeError(f"store opened by process {self.pid}, used in {os.getpid()}: open it there too")
        self.mutex.acquire()
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX)
        except BaseException:  # a signal handler that raises
            self.mutex.release()
            raise

    def release(self) -> None:
        """Give the lock back."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        self.mutex.release()

    def close(self) -> None:
        """Close the descriptor, which also releases the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _drop_inherited_locks() -> None:
    for lock in list(_locks):
        with suppress(OSError):
            lock.close()


os.register_at_fork(after_in_child=_drop_inherited_locks)


class Segment:
    """Memory for a store: a file in /dev/shm, or elsewhere where that is too small.

    On Linux it has no name after `create`: workers open it as `/proc/<pid>/fd/<n>` of the process that
    made it, so nothing can be left behind by any crash.
    """

    def __init__(self, fd: int, path: str, place: str, name: str | None) -> None:
        self.fd, self.path, self.place, self.name = fd, path, place, name

    @classmethod
    def create(cls, size: int, places: list[str], nameless: bool | None = None) -> Segment:
        """Reserve `size` bytes in the first of `places` that has room.

        Raises:
            ConfigError: none has; says how much is needed and how much is free.
        """
        refused = []
        for place in places:
            try:
                free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
                if free < size:
                    raise OSError(f"{free / 2**20:.0f} MiB free")
                fd, name = tempfile.mkstemp(prefix=f"slipstream-{os.getpid()}-", dir=place)
            except OSError as e:
                refused.append(f"{place}: {e.strerror or e}")
                continue
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as e:
                refused.append(f"{place}: {e.strerror}")
                os.close(fd)
                os.unlink(name)
                continue
            if os.path.isdir("/proc/self/fd") if nameless is None else nameless:
                os.unlink(name)
                return cls(fd, f"/proc/{os.getpid()}/fd/{fd}", place, None)
            return cls(fd, name, place, name)
        raise ConfigError(
            f"no room for {size / 2**20:.1f} MiB of shared memory ({'; '.join(refused)}). Enlarge /dev/shm "
            "(docker: --shm-size=1g) or set TMPDIR to a directory with room"
        )

    def close(self) -> None:
        """Give the memory back once every process has let go of it."""
        os.close(self.fd)
        if self.name is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.name)


def sweep(place: str = "/dev/shm") -> list[str]:
    """Remove named segments whose process is gone (only systems without /proc leave any)."""
    gone = []
    for file in Path(place).glob("slipstream-*-*"):
        pid = file.name.split("-")[1]
        if pid.isdigit() and not _alive(int(pid)):
            with suppress(OSError):
                file.unlink()
                gone.append(str(file))
    return gone


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def initialize(path: str, layout: Layout, weights: NDArray[np.float32]) -> None:
    """Write the layout and version 0 into a fresh segment; optimizer state and moments begin at 0."""
    at, size = layout.regions()
    text = json.dumps(asdict(layout)).encode()
    if len(text) > PREFACE - 16:
        raise ConfigError("the optimizer has too many pieces of state for the store's preface")
    with open(path, "r+b") as file:
        os.ftruncate(file.fileno(), size)
        with mmap.mmap(file.fileno(), size) as memory:
            slot = Slot(memory, at["slots"], layout)
            slot.weights[:] = weights
            if layout.checksums:
                slot.header[Header.CHECKSUM] = checksum(slot.weights)
            del slot
            memory[8 : 16 + len(text)] = len(text).to_bytes(8, "little") + text
            memory[:8] = MAGIC


@dataclass
class Contribution:
    """What a worker offers: one gradient and what belongs to it.

    Attributes:
        gradient: float32 `[N]`, clipped; meaningless unless `finite`.
        finite: False where NaN or Inf was met; then it counts steps but changes no weight.
        samples: valid rows of the rollout = environment steps; the weight of the gradient in a mean.
        tick: transaction whose weights it was computed from.
        version: their version.
        worker: index of the worker.
        incarnation: how often that worker had been started before.
        rollout: number of the rollout in its incarnation.
        moments: normalizer statistics of the rollout.
        loss: of the rollout; with `norm` it tells a replay at once where it differs.
        norm: of the gradient before clipping.
        weight: rows the gradient is the mean of, if those are not `samples`.
        read: the weights it was computed from, where the rule asks for them.
        payload: the gradient as it is sent, where it is compressed.
    """

    gradient: NDArray[np.float32]
    finite: bool
    samples: int
    tick: int
    version: int
    worker: int
    incarnation: int
    rollout: int
    moments: NDArray[np.float64]
    loss: float = 0.0
    norm: float = 0.0
    weight: int = -1
    read: NDArray[np.float32] | None = None
    payload: NDArray[np.uint8] | None = None

    @property
    def rows(self) -> int:
        """Weight of the gradient in a mean."""
        return self.samples if self.weight < 0 else self.weight


class Store:
    """One process's (or thread's) handle on the store."""

    def __init__(self, path: str, worker: int | None = None, recorder: Recorder | None = None) -> None:
        """Open the store at `path`. `worker` says whose row of counters this handle keeps."""
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        if self.memory[:8] != MAGIC:
            raise ConfigError(f"{path}: not a parameter store")
        text = self.memory[16 : 16 + int.from_bytes(self.memory[8:16], "little")]
        fields = json.loads(text)
        self.layout = layout = layout_from(fields)
        self.recorder = recorder
        self.worker = worker
        at, _ = layout.regions()
        memory = self.memory
        self.control = np.frombuffer(memory, np.int64, LINE, at["control"])
        self.rows = np.frombuffer(memory, np.float64, ROW * layout.workers, at["rows"]).reshape(-1, ROW)
        self.rings = np.frombuffer(memory, np.float64, 4 * RING * layout.workers, at["rings"])
        self.rings = self.rings.reshape(-1, RING, 4)
        n = (layout.workers if layout.offers else 0) + 1
        self.gradients = np.frombuffer(memory, np.float32, n * layout.weights, at["gradients"]).reshape(n, -1)
        offer = np.dtype([("numbers", "<i8", (8,)), ("prints", "<f8", (2,)), ("moments", "<f8", (layout.moments,))])
        self.uplinks = at["uplinks"]
        self.offers = np.frombuffer(memory, offer, layout.workers if layout.offers else 0, at["offers"])
        self.slots = [Slot(memory, at["slots"] + i * layout.slot_bytes, layout) for i in range(layout.slots)]
        # scalars of memoryviews, unlike NumPy's, cost next to nothing
        self.row = view(self.rows[worker] if worker is not None else np.zeros(ROW))
        self._words = view(self.control)
        plain = ORDERED and not layout.moments and not layout.checksums  # then a read is two copies
        self._reading = self.row, self._words, self.slots, layout.slots, plain
        self.lock = Lock(path)
        self._fence = threading.Lock()

    @cached_property
    def bell(self) -> Bell:
        """What wakes this seat, and by which it wakes others."""
        return Bell(self.lock.fd, self.worker if self.worker is not None else -1)

    # -- reading ---------------------------------------------------------------------------------

    @property
    def tick(self) -> int:
        """The newest published transaction."""
        return int(self._words[TICK])

    @property
    def current(self) -> Slot:
        """The newest published slot; it may change under a reader's eyes, so copy with `read`."""
        return self.slots[self.tick % self.layout.slots]

    def read(self, into: Snapshot) -> int:
        """Copy the newest version, whole, into `into`; returns its version. Takes no lock."""
        row, words, slots, lap, plain = self._reading
        numbers, body = into.numbers, into.body
        while True:
            tick = words[TICK]
            slot = slots[tick % lap]
            if not plain:
                self.fence()
                into.moments[:] = slot.moments
            body[:] = slot.body
            numbers[:] = slot.numbers
            if not plain:
                self.fence()
            if words[TICK] - tick < lap - 1 and numbers[TICK] == tick:
                break
            row[Counter.READ_RETRIES] += 1
        row[READS] += 1
        if not plain and self.layout.checksums and checksum(into.weights) != numbers[Header.CHECKSUM]:
            row[Counter.READS_BAD] += 1
        version: int = numbers[VERSION]
        return version

    def progress(self) -> tuple[int, int]:
        """(version, global environment steps) now."""
        if not self.layout.in_place:
            header = self.current.header
            return int(header[Header.VERSION]), int(header[Header.STEPS])
        base = self.slots[0].header
        version = int(base[Header.VERSION] + self.rows[:, Counter.UPDATES].sum())
        return version, int(base[Header.STEPS] + self.rows[:, Counter.STEPS].sum())

    # -- writing ---------------------------------------------------------------------------------

    @contextmanager
    def update(self) -> Iterator[Slot]:
        """Hold the lock over a copy of the current slot, and publish the copy on leaving.

        The caller changes the slot it is given. Nothing is published if it raises.
        """
        row = self.row
        row[Counter.PHASE] = Phase.WAIT
        begun = perf_counter()
        self.lock.acquire()
        try:
            self._words[Word.HOLDER] = (self.worker or 0) + 1
            row[Counter.PHASE] = Phase.APPLY
            got = perf_counter()
            row[Counter.T_WAIT] += got - begun
            with self.transaction() as slot:
                yield slot
            row[Counter.T_APPLY] += perf_counter() - got
            row[Counter.BYTES] += slot.bytes.nbytes
        finally:
            self._words[Word.HOLDER] = 0
            self.lock.release()

    @contextmanager
    def transaction(self) -> Iterator[Slot]:
        """The part of `update` inside the lock, for a caller that holds it."""
        tick = self.tick
        slots = self.slots
        slot = slots[(tick + 1) % len(slots)]
        slot.bytes[:] = slots[tick % len(slots)].bytes
        slot.numbers[Header.TICK] = tick + 1
        slot.numbers[Header.CHECKSUM] = 0
        yield slot
        if self.layout.checksums and not slot.numbers[Header.CHECKSUM]:
            slot.numbers[Header.CHECKSUM] = checksum(slot.weights)
        self.fence()
        self._words[TICK] = tick + 1

    def note(self, slot: Slot, contributions: list[Contribution], every: int = 100) -> None:
        """Write the entries of a tick to the record, if this run is recorded.

        Args:
            slot: the slot about to be published, its header complete.
            contributions: those that made the tick, in the order they were applied.
            every: versions between checksums of the weights.
        """
        if self.recorder is None:
            return
        tick, version, steps, index = slot.numbers[: Header.ENTRIES + 1]
        taken = 0
        if version % every == 0:
            taken = checksum(slot.weights)
            slot.numbers[Header.CHECKSUM] = taken
        entries = b"".join(
            PACKED.pack(
                tick, c.tick, version, steps, taken, c.loss, c.norm, c.rollout, c.worker, c.incarnation,
                Kind.APPLIED if c.finite else Kind.DROPPED,
            )
            for c in contributions
        )  # fmt: skip
        while True:
            try:
                self.recorder.write(index, entries)
                break
            except OSError as e:  # a full disk: training pauses until there is room, and the parent says so
                if e.errno not in (errno.ENOSPC, errno.EDQUOT) or self.control[Word.STOP]:
                    raise
                self.control[Word.DISK_FULL] = 1
                self.row[Counter.BEAT] += 1
                sleep(0.5)
        self.control[Word.DISK_FULL] = 0
        slot.numbers[Header.ENTRIES] = index + len(contributions)

    def fence(self) -> None:
        """Order memory accesses before and after (x86 needs none; weaker machines do).

        What comes before may sink into the first pair and what comes after may rise into the second, but
        the second acquires what the first released.
        """
        if not ORDERED:
            for _ in range(2):
                self._fence.acquire()
                self._fence.release()

    def close(self) -> None:
        """Close this handle's lock; the mapping goes with the last view of it."""
        if "bell" in vars(self):
            self.bell.close()
        self.lock.close()


def count(row: Any, contribution: Contribution, staleness: int) -> None:
    """Book one push in its worker's row."""
    row[Counter.STEPS] += contribution.samples
    if not contribution.finite:
        return
    row[Counter.BYTES_UP] += contribution.gradient.nbytes
    row[Counter.UPDATES] += 1
    row[Counter.STALENESS] += staleness
    row[Counter.STALENESS_MAX] = max(row[Counter.STALENESS_MAX], staleness)
    row[Counter.HISTOGRAM + min(staleness, STALENESS_BINS - 1)] += 1
