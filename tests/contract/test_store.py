"""The parameter store under concurrency: never a torn read, never a lost update, never a deadlock.

The processes of these tests are in store_tools.py; the long form of the pattern test is benchmarks/store.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import store_tools as tools
from hypothesis import given
from hypothesis import strategies as st
from store_tools import SAMPLES, faults, fill, make, run, snapshot

from slipstream import record
from slipstream import store as stores
from slipstream.counters import Counter
from slipstream.errors import ConfigError
from slipstream.store import Header, Layout, Lock, Segment, Snapshot, Store, Word, sweep

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and tmpfs")


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts an empty file system of so many KiB and returns its folder."""
    mounted = []

    def mount(kib: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting a small tmpfs is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    try:
        yield mount
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.fixture
def segment():
    """A function that makes a store; all are given back at the end."""
    made = []

    def create(size: int = 64, workers: int = 2, **more) -> Segment:
        made.append(make(size, workers, **more))
        return made[-1]

    yield create
    for s in made:
        s.close()


# -- the pattern: FAULTS 1, 2, 3, 15b, 16; catalogue 5, 8, 16 ------------------------------------------


@pytest.mark.parametrize("how", ["spawn", "fork", "thread"])
@pytest.mark.parametrize(
    ("size", "updates", "slots", "checksums"),
    [(1, 1500, 4, False), (10_000, 800, 4, True), (10_000, 800, 2, False), (1_000_000, 25, 3, False)],
)
def test_every_read_is_one_version_and_every_update_counts(segment, how, size, updates, slots, checksums):
    writers, readers = 3, 2
    shared = segment(size, writers + readers, slots=slots, checksums=checksums)
    bodies = [("write", {"path": shared.path, "worker": i, "updates": updates}) for i in range(writers)]
    last = writers * updates
    bodies += [("read", {"path": shared.path, "worker": writers + i, "last": last}) for i in range(readers)]
    found = run(how, bodies)
    assert [f["problems"] for f in found] == [[]] * (writers + readers)
    store = Store(shared.path)
    assert sum(f["made"] for f in found[:writers]) == store.tick == store.current.version == last
    assert store.progress() == (last, SAMPLES * last)
    assert faults(store.current) == []  # weights, optimizer state, moments and header of one version
    for f in found[writers:]:
        assert f["newest"] == last
        assert f["counted"] == f["reads"] > 0
    assert store.rows[:, Counter.READS_BAD].sum() == 0
    assert store.rows[:, Counter.UPDATES].sum() == last
    assert store.control[Word.HOLDER] == 0


def test_the_pattern_test_can_fail(segment):
    """A reader that just copies does find mixtures, so that finding none above says something."""
    shared = segment(1_000_000, 2, slots=2)
    found = run(
        "spawn",
        [
            ("write", {"path": shared.path, "worker": 0, "updates": 1000, "until_stop": True}),
            ("peek", {"path": shared.path, "worker": 1, "last": 1000}),
        ],
    )
    assert found[1]["mixed"] > 0, f"{found[1]['copies']} copies"


@pytest.mark.parametrize("worker_threads", [2, 4])
def test_threads_that_share_one_handle_exclude_each_other(segment, worker_threads):
    shared = segment(1000, 1)
    found = run(
        "spawn",
        [("shared_handle", {"path": shared.path, "worker": 0, "threads": worker_threads, "updates": 300})],
    )
    assert found[0] == {"problems": [], "alive": 0}
    assert Store(shared.path).current.version == 300 * worker_threads


def test_a_copy_is_a_copy(segment):
    """Catalogue 7: what was read does not change with the store, nor the store with it."""
    shared = segment(100)
    writer, reader = Store(shared.path, 0), Store(shared.path, 1)
    mine = snapshot(reader)
    with writer.update() as slot:
        fill(slot)
    assert reader.read(mine) == 1
    with writer.update() as slot:
        fill(slot)
    writer.current.weights[:] = 77.0
    assert faults(mine) == []
    mine.weights[:], mine.moments[:], mine.header[:] = -1, -1, -1
    assert (writer.current.weights == 77.0).all()
    assert writer.current.moments.min() == 2
    assert writer.current.version == 2


@given(before=st.integers(0, 9), slots=st.integers(2, 5))
def test_versions_follow_ticks(before, slots):
    """An update that makes no version moves the tick alone."""
    shared = make(8, 1, slots=slots)
    store = Store(shared.path, 0)
    for i in range(before):
        with store.update() as slot:
            if i % 3:
                fill(slot)
    made = sum(1 for i in range(before) if i % 3)
    assert (store.tick, store.current.version) == (before, made)
    assert store.current.header[Header.TICK] == before
    assert faults(store.current) == []
    store.close()
    shared.close()


def test_an_update_that_raises_publishes_nothing(segment):
    shared = segment(100)
    store, other = Store(shared.path, 0), Store(shared.path, 1)
    with store.update() as slot:
        fill(slot)

    def fail() -> None:
        with store.update() as slot:
            slot.weights[:50] = 9
            slot.header[Header.VERSION] = 9
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.tick == store.current.version == 1
    assert faults(store.current) == []
    assert store.control[Word.HOLDER] == 0
    with other.update() as slot:  # the lock is free
        assert faults(slot) == []
        fill(slot)
    assert faults(store.current) == []
    assert store.current.version == 2


# -- a reader that is lapped ---------------------------------------------------------------------------


class Halfway:
    """The memory of a snapshot's weights; between its first and its second half, updates happen."""

    def __init__(self, body: memoryview, happen) -> None:
        self.body, self.happen, self.mixed = body, happen, []

    def __setitem__(self, _, source) -> None:
        half = len(self.body) // 2
        self.body[:half] = source[:half]
        self.happen()
        self.body[half:] = source[half:]
        self.mixed.append(self.body[0] != self.body[-1])


@given(
    slots=st.integers(2, 5), ahead=st.integers(0, 7), laps=st.lists(st.integers(0, 12), max_size=4), half=st.booleans()
)
def test_a_reader_that_is_lapped_reads_again(slots, ahead, laps, half):
    """During its first copy `laps[0]` updates happen, during its second `laps[1]` …; perhaps one more is half done."""
    shared = make(32, 2, slots=slots)
    writer, reader = Store(shared.path, 0), Store(shared.path, 1)

    def updates(n: int) -> None:
        for _ in range(n):
            with writer.update() as slot:
                fill(slot)

    updates(ahead)
    left = list(laps)

    def happen() -> None:
        updates(left.pop(0) if left else 0)
        if half:  # begun, not published: its writer is here, or was killed here
            slot = writer.slots[(writer.tick + 1) % slots]
            slot.bytes[:] = writer.current.bytes
            slot.weights[:] = -5
            slot.header[Header.TICK] = writer.tick + 1

    into = snapshot(reader)
    halfway = Halfway(into.body, happen)
    into.body = halfway
    version = reader.read(into)
    expected = ahead  # the version that the first copy not lapped begins with
    retries = 0
    for n in [*laps, 0]:
        if n < slots - 1:
            break
        expected += n
        retries += 1
    assert version == into.version == into.tick == expected
    assert faults(into) == []
    assert reader.row[Counter.READ_RETRIES] == retries
    assert not halfway.mixed[-1]
    for n, mixed in zip(laps, halfway.mixed, strict=False):
        assert mixed == (n >= slots or (half and n == slots - 1))  # only what was thrown away was a mixture
    writer.close(), reader.close(), shared.close()


def test_readers_are_lapped_for_real(segment):
    """With two slots every update during a read disturbs it: reads repeat, and still none is a mixture."""
    shared = segment(300_000, 2, slots=2)
    found = run(
        "spawn",
        [
            ("write", {"path": shared.path, "worker": 0, "updates": 400}),
            ("read", {"path": shared.path, "worker": 1, "last": 400}),
        ],
    )
    assert [f["problems"] for f in found] == [[], []]
    assert found[1]["retries"] > 0


def test_a_slot_whose_header_is_not_of_the_tick_is_read_again(segment):
    """The second guard of a read: the tick in the copy itself."""
    shared = segment(16)
    writer, reader = Store(shared.path, 0), Store(shared.path, 1)
    with writer.update() as slot:
        fill(slot)
    into = snapshot(reader)
    wrong = iter([5])
    right = writer.current.header[Header.TICK]

    def happen() -> None:
        writer.current.header[Header.TICK] = next(wrong, right)

    into.body = Halfway(into.body, happen)
    assert reader.read(into) == 1
    assert reader.row[Counter.READ_RETRIES] == 1


# -- kill -9: FAULTS 4 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "kills"), [(2_000, 200), (200_000, 100)])
def test_writers_killed_at_random_moments(segment, tmp_path, size, kills):
    """A writer killed in its update leaves no lock, no torn state, and the record agrees with the store."""
    shared = segment(size, 1)
    log = tmp_path / "schedule.bin"
    given = {"path": shared.path, "worker": 0, "kills": kills, "log": str(log), "seed": size}
    found = run("spawn", [("kill_writers", {**given, "longest": 2e-3 if size < 10_000 else 8e-3})])[0]
    assert found["problems"] == []
    assert found["kills"] == kills
    assert found["inside"] >= kills // 4, found  # they did die holding the lock,
    assert found["halves"] > 0, found  # some of them with half an update written
    store = Store(shared.path)
    _agrees(store, log, kills)


def test_writers_killed_beside_others(segment, tmp_path):
    """The same while other processes write and read."""
    shared = segment(20_000, 4, slots=3)
    log = str(tmp_path / "schedule.bin")
    many = {"updates": 10**9, "log": log, "until_stop": True}
    found = run(
        "fork",
        [
            ("kill_writers", {"path": shared.path, "worker": 0, "kills": 100, "log": log, "alone": False}),
            *(("write", {"path": shared.path, "worker": w, **many}) for w in (1, 2)),
            ("read", {"path": shared.path, "worker": 3}),
        ],
    )
    assert [f["problems"] for f in found] == [[]] * 4
    assert found[0]["kills"] == 100
    assert all(f["made"] > 0 for f in found[1:3])
    store = Store(shared.path)
    entries = _agrees(store, Path(log), 100)
    assert set(entries["worker"]) == {0, 1, 2}
    for w in (1, 2):  # those that were not killed lost nothing
        assert (entries["worker"] == w).sum() == found[w]["made"]


def _agrees(store: Store, log: Path, kills: int):
    """The store is whole and counts what was published, and the record says the same."""
    assert faults(store.current) == []
    tick = store.tick
    assert store.current.version == tick
    booked = int(store.rows[:, Counter.UPDATES].sum())
    assert booked <= tick <= booked + kills  # one killed between publishing and booking is not booked
    assert store.current.header[Header.ENTRIES] == tick
    entries = record.read(log, tick)
    assert (entries["tick"] == np.arange(1, tick + 1)).all()
    assert (entries["version"] == entries["tick"]).all()
    assert (entries["steps"] == SAMPLES * entries["tick"]).all()
    assert (entries["kind"] == record.Kind.APPLIED).all()
    assert len(record.read(log)) <= tick + 1  # at most one entry of an update never published
    checked = entries[entries["checksum"] != 0]
    assert set(checked["version"]) == set(range(100, tick + 1, 100))
    n = store.layout.weights
    for entry in checked[:: max(1, len(checked) // 5)]:
        assert entry["checksum"] == stores.checksum(np.full(n, entry["version"], np.float32))
    return entries


# -- the lock ------------------------------------------------------------------------------------------


@linux
def test_a_handle_opened_before_a_fork(segment):
    shared = segment()
    found = run("spawn", [("foreign", {"path": shared.path})])[0]
    assert found["closed"]
    assert found["descriptor"] == "closed"
    for name in ("lock", "update"):
        assert f"opened by process {found['pid']}" in found[name]
    assert found["excluded"]  # the child's own handle waits for the parent's
    assert found["still_held"]
    assert found["free"]


def test_an_inherited_descriptor_would_exclude_nobody(segment):
    """FAULTS 15b: what the rule 'every process opens its own' is for."""
    found = run("spawn", [("inherited", {"path": segment().path})])[0]
    assert found == {"same_descriptor": True, "own_descriptor": False}


def test_waiting_for_the_lock_can_be_interrupted(segment):
    found = run("spawn", [("interrupted", {"path": segment().path})])[0]
    assert found == {"blocked": True, "mutex": True}  # held by the second, later acquire


def test_lock_is_released_by_closing(segment):
    shared = segment()
    first, second = Lock(shared.path), Lock(shared.path)
    first.acquire()
    with pytest.raises(BlockingIOError):
        fcntl.flock(second.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    first.close()
    first.close()  # twice is harmless
    second.acquire()
    second.release()
    second.close()


def test_waiting_is_booked(segment):
    shared = segment()
    holder, waiter = Store(shared.path, 0), Store(shared.path, 1)
    holder.lock.acquire()
    threading.Timer(0.1, holder.lock.release).start()
    with waiter.update() as slot:
        fill(slot)
        time.sleep(0.02)
    assert 0.05 < waiter.row[Counter.T_WAIT] < 30
    assert waiter.row[Counter.T_APPLY] >= 0.02
    assert waiter.row[Counter.BYTES] == waiter.layout.slot_bytes


# -- segments ------------------------------------------------------------------------------------------


@linux
def test_nameless_segments_leave_no_file(tmp_path):
    s = Segment.create(8192, [str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
    assert s.name is None
    assert os.stat(s.path).st_size == 8192
    code = "import os, sys; print(os.stat(sys.argv[1]).st_size)"
    other = subprocess.run([sys.executable, "-c", code, s.path], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == "8192"  # another process gets at it
    s.close()
    assert not os.path.exists(s.path)


def test_named_segments_go_when_closed(tmp_path):
    s = Segment.create(8192, [str(tmp_path)], nameless=False)
    assert [str(f) for f in tmp_path.iterdir()] == [s.name]
    assert f"slipstream-{os.getpid()}-" in s.path
    s.close()
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_those_of_dead_processes_alone(tmp_path):
    mine = Segment.create(4096, [str(tmp_path)], nameless=False)
    for stranger in ("slipstream-notes-x", "slipstream-1-init", "other-99999999-x"):
        (tmp_path / stranger).write_text("")
    dead = run("spawn", [("leave_segment", {"place": str(tmp_path)})])[0]["path"]
    assert os.path.exists(dead)
    before = {f.name for f in tmp_path.iterdir()}
    assert sweep(str(tmp_path)) == [dead]
    assert {f.name for f in tmp_path.iterdir()} == before - {Path(dead).name}
    assert sweep(str(tmp_path)) == []
    mine.close()


@linux
def test_too_small_a_place_is_passed_over(small_disk, tmp_path):
    """FAULTS 59."""
    small, free = small_disk(1024), tmp_path / "room"
    free.mkdir()
    s = Segment.create(3 << 20, [str(small), str(tmp_path / "missing"), str(free)])
    assert s.place == str(free)
    assert os.stat(s.path).st_size == os.stat(s.path).st_blocks * 512 == 3 << 20  # reserved, no bus error later
    s.close()
    assert list(small.iterdir()) == list(free.iterdir()) == []


@linux
def test_no_room_anywhere(small_disk):
    one, two = small_disk(1024), small_disk(2048)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as e:
        Segment.create(5 << 20, [str(one), str(two)])
    for part in ("5.0 MiB", f"{one}: 1 MiB free", f"{two}: 2 MiB free", "--shm-size", "TMPDIR"):
        assert part in str(e.value)
    assert list(one.iterdir()) == list(two.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_room_that_vanishes_while_it_is_reserved(tmp_path, monkeypatch):
    """Another run takes the room between the question and the reservation."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    reserve = os.posix_fallocate
    tried = []

    def full_once(fd: int, offset: int, size: int) -> None:
        tried.append(fd)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full_once)
    s = Segment.create(4096, [str(first), str(second)], nameless=False)
    assert s.place == str(second)
    assert list(first.iterdir()) == []
    s.close()


def test_what_is_no_store_is_refused(tmp_path):
    file = tmp_path / "x"
    file.write_bytes(b"\0" * 65536)
    with pytest.raises(ConfigError, match="not a parameter store"):
        Store(str(file))
    many = Layout(8, tuple((f"piece_of_state_{i}", 8) for i in range(2000)), 0, 1)
    with pytest.raises(ConfigError, match="too many pieces"):
        stores.initialize(str(file), many, np.zeros(8, np.float32))


@given(
    weights=st.integers(1, 300), state=st.lists(st.integers(1, 200), max_size=3), moments=st.integers(0, 9),
    workers=st.integers(1, 4), slots=st.integers(2, 5), offers=st.booleans(),
)  # fmt: skip
def test_nothing_in_a_store_overlaps(weights, state, moments, workers, slots, offers):
    """Every view written with its own number keeps it; rows and slots begin on cache lines."""
    layout = Layout(weights, tuple((f"s{i}", n) for i, n in enumerate(state)), moments, workers, slots, offers)
    segment = Segment.create(layout.regions()[1], ["/dev/shm"])
    stores.initialize(segment.path, layout, np.zeros(weights, np.float32))
    store = Store(segment.path, workers - 1)
    assert store.layout == layout
    views = [store.control, store.rows, store.rings, store.gradients, *(s.header for s in store.slots)]
    for slot in store.slots:
        views += [slot.weights, *slot.optimizer.values(), slot.moments]
    if offers:
        views += [store.offers["numbers"], store.offers["prints"], store.offers["moments"]]
    for i, view in enumerate(views):
        view[:] = i + 1
    for i, view in enumerate(views):
        assert (view == i + 1).all()
    assert all(v.ctypes.data % 64 == 0 for v in [store.control, *(s.header for s in store.slots)])
    assert all(s.weights.ctypes.data % 64 == 0 for s in store.slots)
    store.close(), segment.close()


# -- checksums: --check-reads --------------------------------------------------------------------------


def test_a_planted_torn_slot_is_detected(segment):
    shared = segment(5000, checksums=True)
    writer, reader = Store(shared.path, 0), Store(shared.path, 1)
    into = snapshot(reader)
    assert reader.read(into) == 0  # the first version has a checksum too
    for _ in range(6):
        with writer.update() as slot:
            fill(slot)
        reader.read(into)
    assert reader.row[Counter.READS_BAD] == 0
    writer.current.weights[4321] = 3.0
    reader.read(into)
    assert reader.row[Counter.READS_BAD] == 1
    reader.read(into)
    assert reader.row[Counter.READS_BAD] == 2
    with writer.update() as slot:  # the next version is whole, and says so
        fill(slot)
    assert reader.read(into) == 7
    assert reader.row[Counter.READS_BAD] == 2
    assert reader.row[Counter.READS] == 10


def test_checksum_tells_any_bit(segment):
    weights = np.arange(100, dtype=np.float32)
    seen = {stores.checksum(weights)}
    for i in (0, 50, 99):
        other = weights.copy()
        other.view(np.uint32)[i] ^= 1
        seen.add(stores.checksum(other))
    assert len(seen) == 4
    assert all(0 < c < 2**63 for c in seen)


# -- the record, and a full disk: FAULTS 68 ------------------------------------------------------------


def test_packed_entries_are_entries():
    assert record.PACKED.size == record.ENTRY.itemsize
    names = ["tick", "pulled", "version", "steps", "checksum", "loss", "norm", "rollout", "worker", "incarnation"]
    values = [1, -2, 3, 4, 2**63 + 5, 6.5, -7.25, 2**32 - 8, 65535, 10, 2]
    entry = np.frombuffer(record.PACKED.pack(*values), record.ENTRY)[0]
    assert [entry[n].item() for n in [*names, "kind"]] == values


def _recorded(segment, log):
    """A recorded store, what makes an update of it, and its path."""
    path = segment(16, 1).path
    store = Store(path, 0, record.Recorder(log))
    made = iter(range(10**6))

    def update() -> None:
        with store.update() as slot:
            fill(slot)
            store.note(slot, [tools.contribution(0, next(made))])

    return store, update, path


@linux
def test_full_disk_pauses_and_goes_on(segment, small_disk):
    """On a real full disk: an entry that fits in part is not taken for whole; with room again, all is there."""
    disk = small_disk(64)
    filler = disk / "filler"
    log = disk / "schedule.bin"
    store, update, path = _recorded(segment, log)
    update()
    with suppress(OSError), filler.open("wb", buffering=0) as f:
        while True:
            f.write(b"\0" * 4096)
    target = 120  # more than the pages already there hold
    worker = threading.Thread(target=lambda: [update() for _ in range(target)], daemon=True)
    worker.start()
    tools.until(lambda: bool(store.control[Word.DISK_FULL]), "the disk is full and nobody says so")
    stuck = store.tick
    assert 0 < stuck < target
    beat = store.row[Counter.BEAT]
    tools.until(lambda: store.row[Counter.BEAT] > beat, "a worker that waits for room must be seen to live")
    assert store.tick == stuck  # paused
    reader = Store(path)
    into = snapshot(reader)
    assert reader.read(into) == stuck  # and readers go on
    filler.unlink()
    worker.join(60)
    assert not worker.is_alive()
    assert store.tick == target + 1
    assert store.control[Word.DISK_FULL] == 0
    entries = record.read(log, target + 1)
    assert (entries["tick"] == np.arange(1, target + 2)).all()
    assert (entries["rollout"] == np.arange(target + 1)).all()
    assert (entries["kind"] == record.Kind.APPLIED).all()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_a_few_times(segment, tmp_path, monkeypatch, code):
    """Where nothing can be mounted; parts of entries are written, too."""
    store, update, _ = _recorded(segment, tmp_path / "schedule.bin")
    real, calls = os.pwrite, []

    def reluctant(fd: int, data, at: int) -> int:
        calls.append(at)
        if len(calls) in (2, 3, 6):
            raise OSError(code, os.strerror(code))
        return real(fd, bytes(data)[: 50 if len(calls) % 2 else None], at)

    monkeypatch.setattr(os, "pwrite", reluctant)
    monkeypatch.setattr(stores, "sleep", lambda _: None)
    for _ in range(5):
        update()
    assert len(calls) > 10
    assert store.control[Word.DISK_FULL] == 0
    assert (record.read(tmp_path / "schedule.bin", 5)["tick"] == [1, 2, 3, 4, 5]).all()
    assert len(record.read(tmp_path / "schedule.bin")) == 5


def test_disk_full_and_the_run_is_to_stop(segment, tmp_path, monkeypatch):
    store, update, path = _recorded(segment, tmp_path / "schedule.bin")
    update()

    def full(*_) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(stores, "sleep", lambda _: store.control.__setitem__(Word.STOP, 1))  # Ctrl-C while it waits
    with pytest.raises(OSError, match="No space left"):
        update()
    assert store.control[Word.DISK_FULL] == 1  # it was said
    assert store.tick == store.current.version == 1  # not published: the record and the weights agree
    assert faults(store.current) == []
    other = Lock(path)
    fcntl.flock(other.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and the lock is free


def test_other_errors_of_the_record_are_raised(segment, tmp_path):
    """Only a full disk is waited for: a closed or broken record would never come back."""
    store, update, _ = _recorded(segment, tmp_path / "schedule.bin")
    update()
    os.close(store.recorder.fd)
    with pytest.raises(OSError) as e:
        update()
    assert e.value.errno == errno.EBADF
    assert store.tick == 1


def test_a_record_is_checked(tmp_path):
    missing, wrong, short = tmp_path / "none.bin", tmp_path / "wrong.bin", tmp_path / "short.bin"
    wrong.write_bytes(json.dumps({"no": "record"}).encode() * 20)
    recorder = record.Recorder(short)
    recorder.write(0, record.PACKED.pack(1, 0, 1, 3, 0, 0.0, 0.0, 0, 0, 0, 1) * 4)
    recorder.truncate(3)
    recorder.close()
    for file, why in ((missing, "not recorded"), (wrong, "not a schedule record")):
        with pytest.raises(ConfigError, match=why):
            record.read(file)
    with pytest.raises(ConfigError, match="holds 3 entries, the run made 4"):
        record.read(short, 4)
    assert len(record.read(short)) == 3
    again = record.Recorder(short)  # opening a record keeps it
    assert len(record.read(short, 3)) == 3
    again.close()


def test_one_tick_may_have_several_entries(segment, tmp_path):
    """A round of `sync`: entries share the tick, in the order applied; dropped gradients are marked."""
    log = tmp_path / "schedule.bin"
    store = Store(segment(16, 3).path, 0, record.Recorder(log))
    for tick in (1, 2):
        with store.update() as slot:
            fill(slot)
            offered = [tools.contribution(w, tick, tick - 1) for w in (2, 0, 1)]
            offered[1].finite = False
            offered[2].loss, offered[2].norm = 0.5, 0.25
            store.note(slot, offered)
    entries = record.read(log, 6)
    assert entries["tick"].tolist() == [1, 1, 1, 2, 2, 2]
    assert entries["worker"].tolist() == [2, 0, 1] * 2
    assert entries["kind"].tolist() == [record.Kind.APPLIED, record.Kind.DROPPED, record.Kind.APPLIED] * 2
    assert entries["pulled"].tolist() == [0] * 3 + [1] * 3
    assert entries["loss"].tolist() == [0, 0, 0.5] * 2
    assert entries["norm"].tolist() == [0, 0, 0.25] * 2
    assert store.current.header[Header.ENTRIES] == 6


def test_a_snapshot_of_another_size_is_refused(segment):
    store = Store(segment(16).path)
    with pytest.raises(ValueError):
        store.read(Snapshot(np.zeros(15, np.float32), 5))
