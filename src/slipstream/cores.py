"""How many cores this process may really use: affinity and cgroup quota, not the host's count."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# the environment of every worker: processes are the parallelism, not threads inside them
SINGLE_THREADED = {
    **dict.fromkeys(
        (
            "OMP_NUM_THREADS",
            "MKL_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "NUMEXPR_NUM_THREADS",
            "BLIS_NUM_THREADS",
            "VECLIB_MAXIMUM_THREADS",
            "OPENCV_FOR_THREADS_NUM",
        ),
        "1",
    ),
    "SDL_VIDEODRIVER": "dummy",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
}


def quota(v2_cpu_max: str | None, v1_quota: str | None, v1_period: str | None) -> float | None:
    """CPU quota in cores from the texts of the cgroup files, or None where there is no limit.

    Args:
        v2_cpu_max: contents of cgroup v2 `cpu.max`, such as `"200000 100000"` or `"max 100000"`.
        v1_quota: contents of cgroup v1 `cpu.cfs_quota_us` (-1: unlimited).
        v1_period: contents of cgroup v1 `cpu.cfs_period_us`.
    """
    if v2_cpu_max:
        limit, _, period = v2_cpu_max.strip().partition(" ")
        if limit != "max" and limit.isdigit():
            return int(limit) / int(period or 100_000)
    if v1_quota and v1_period and int(v1_quota) > 0 and int(v1_period) > 0:
        return int(v1_quota) / int(v1_period)
    return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _group_quotas() -> list[float]:
    """Quotas of this process's cgroup and of every group above it."""
    groups = {"/"}
    for line in (_read("/proc/self/cgroup") or "").splitlines():
        path = Path(line.split(":", 2)[-1])
        groups.update(str(p) for p in (path, *path.parents))
    found = []
    for group in groups:
        base = "" if group == "/" else group
        limit = quota(
            _read(f"/sys/fs/cgroup{base}/cpu.max"),
            _read(f"/sys/fs/cgroup/cpu{base}/cpu.cfs_quota_us"),
            _read(f"/sys/fs/cgroup/cpu{base}/cpu.cfs_period_us"),
        )
        if limit is not None:
            found.append(limit)
    return found


def usable_cores() -> int:
    """Cores this process may use: the least of its affinity and its cgroups' quotas, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(math.floor(q) for q in _group_quotas())]))


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for each library call in this process, as workers have; the user's settings come back after."""
    import torch  # not at the top: the supervising process does without it
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)
