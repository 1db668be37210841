"""Schedules, usable cores, the record of a run, and statistics of evaluations."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import cores, record
from slipstream.errors import ConfigError
from slipstream.evaluate import bootstrap, iqm
from slipstream.record import ENTRY, HEADER, Recorder
from slipstream.schedule import scheduled

# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "steps", "value"),
    [
        ("constant", 0, 0.8), ("constant", 10**9, 0.8), ("linear", 0, 0.8), ("linear", 25, 0.6), ("linear", 50, 0.4),
        ("linear", 100, 0.0), ("linear", 101, 0.0), ("cosine", 0, 0.8), ("cosine", 50, 0.4), ("cosine", 25, 0.68284),
        ("cosine", 100, 0.0), ("cosine", 500, 0.0),
    ],
)  # fmt: skip
def test_schedules_by_hand(shape, steps, value):
    assert scheduled(0.8, shape, steps, 100) == pytest.approx(value, abs=1e-5)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 500), st.integers(0, 500), st.integers(0, 200))
def test_schedules_fall_and_keep_no_state(shape, a, b, horizon):
    """The value depends on the global step alone, however it got there, and never rises."""
    early, late = (scheduled(1.0, shape, s, horizon) for s in sorted((a, b)))
    assert 1.0 >= early >= late >= 0.0
    assert scheduled(1.0, shape, min(a, b), horizon) == early


# -- cores -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("v2", "v1", "period", "limit"),
    [
        ("200000 100000", None, None, 2.0),
        ("200000 100000\n", None, None, 2.0),
        ("max 100000", None, None, None),
        ("50000 100000", None, None, 0.5),
        ("150000", None, None, 1.5),
        (None, "-1", "100000", None),
        (None, "-1\n", "100000\n", None),
        (None, "300000", "100000", 3.0),
        ("max 100000", "300000", "100000", 3.0),
        (None, "300000", None, None),
        (None, None, None, None),
        ("", "", "", None),
    ],
)
def test_quotas_of_both_versions_of_cgroups(v2, v1, period, limit):
    assert cores.quota(v2, v1, period) == limit


@pytest.mark.parametrize(
    ("files", "affinity", "usable"),
    [
        ({"/sys/fs/cgroup/cpu.max": "200000 100000"}, 8, 2),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, 8, 8),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, 8, 1),
        ({"/sys/fs/cgroup/cpu.max": "350000 100000"}, 8, 3),
        ({"/sys/fs/cgroup/cpu.max": "800000 100000"}, 2, 2),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8, 4),
        (
            {
                "/proc/self/cgroup": "0::/user/job\n",
                "/sys/fs/cgroup/cpu.max": "max 100000",
                "/sys/fs/cgroup/user/cpu.max": "300000 100000",
                "/sys/fs/cgroup/user/job/cpu.max": "500000 100000",
            },
            8,
            3,
        ),
        ({}, 5, 5),
    ],
)
def test_the_least_of_affinity_and_every_group_above(monkeypatch, files, affinity, usable):
    monkeypatch.setattr(cores, "_read", files.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    assert cores.usable_cores() == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_a_process_pinned_to_one_core_uses_one():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    code += "from slipstream.cores import usable_cores; print(usable_cores())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "1\n"


def test_every_numerical_library_is_limited():
    assert cores.SINGLE_THREADED["OMP_NUM_THREADS"] == cores.SINGLE_THREADED["OPENCV_FOR_THREADS_NUM"] == "1"


# -- the record ------------------------------------------------------------------------------------


def entries(n, first=0):
    out = np.zeros(n, ENTRY)
    out["tick"] = np.arange(first, first + n)
    out["checksum"] = 2**64 - 1 - out["tick"].astype(np.uint64)
    out["loss"] = np.pi * out["tick"]
    out["worker"], out["kind"] = 65535, 2
    return out


@pytest.fixture
def file(tmp_path):
    return tmp_path / "schedule.bin"


def test_a_record_comes_back(file):
    writer = Recorder(file)
    writer.write(0, entries(3))
    writer.write(3, entries(2, 3))
    writer.close()
    np.testing.assert_array_equal(record.read(file), entries(5))
    np.testing.assert_array_equal(record.read(file, 2), entries(2))
    assert file.stat().st_size == HEADER + 5 * ENTRY.itemsize
    assert ENTRY.itemsize % 8 == 0


def test_two_writers_share_a_record_by_position(file):
    a, b = Recorder(file), Recorder(file)
    b.write(1, entries(1, 1))
    a.write(0, entries(1, 0))
    a.write(2, entries(1, 99))  # killed before it published: the next writer takes the place
    b.write(2, entries(1, 2))
    np.testing.assert_array_equal(record.read(file), entries(3))
    for r in (a, b):
        r.close()


def test_a_record_is_cut_back_and_goes_on(file):
    writer = Recorder(file)
    writer.write(0, entries(9))
    writer.truncate(4)
    assert len(record.read(file)) == 4
    writer.write(4, entries(1, 4))
    np.testing.assert_array_equal(record.read(file), entries(5))
    writer.truncate(0)
    assert len(record.read(file)) == len(record.read(file, 0)) == 0
    writer.close()
    again = Recorder(file)
    again.write(0, entries(2))
    assert len(record.read(file)) == 2
    again.close()


def test_a_damaged_record_is_named(file):
    with pytest.raises(ConfigError, match="not recorded"):
        record.read(file)
    writer = Recorder(file)
    writer.write(0, entries(3))
    writer.close()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert len(record.read(file)) == 2  # the torn entry does not count
    with pytest.raises(ConfigError, match="holds 2 entries, the run made 3"):
        record.read(file, 3)
    for junk in (b"", b"x" * 500, whole[:8], whole[:63], b"\0" + whole[1:]):
        file.write_bytes(junk)
        with pytest.raises(ConfigError, match="not a schedule record"):
            record.read(file)


# -- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "value"),
    [
        ([5], 5),
        ([1, 3], 2),
        ([0, 1, 2, 300], 1.5),
        ([300, 2, 0, 1], 1.5),
        ([0, 0, 1, 2, 3, 4, 99, 99], 2.5),
        (list(range(100)), 49.5),
        ([1, 2, 3, 4, 1000], 3),
    ],
)
def test_interquartile_mean_by_hand(x, value):
    assert iqm(np.array(x, float)) == value


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_interquartile_mean_is_the_mean_of_the_middle(x):
    a = np.array(x)
    assert a.min() <= iqm(a) + 1e-6
    assert iqm(a) <= a.max() + 1e-6
    assert iqm(a) == pytest.approx(iqm(a[::-1]))
    assert iqm(2 * a + 1) == pytest.approx(2 * iqm(a) + 1, rel=1e-6, abs=1e-3)


def test_bootstrap_interval():
    assert bootstrap(np.full(20, 7.0)) == (7.0, 7.0)
    x = np.random.default_rng(0).normal(10, 2, 100)
    low, high = bootstrap(x)
    assert low < iqm(x) < high
    assert bootstrap(x) == (low, high)  # the same numbers every time
    # the middle half of a normal has a standard error of about 1.1 sigma / sqrt(n)
    assert (high - low) / (2 * 1.96) == pytest.approx(1.1 * x.std() / 10, rel=0.25)
    wide = bootstrap(x, level=0.99)
    assert wide[0] < low
    assert wide[1] > high


def test_bootstrap_by_enumeration():
    """Two values: resamples are 00, 01, 10, 11 with equal chance, so the 95 % interval is [0, 1]."""
    assert bootstrap(np.array([0.0, 1.0])) == (0.0, 1.0)
    assert bootstrap(np.array([0.0, 1.0]), level=0.4) == (0.5, 0.5)
