"""One run of a comparison: a fresh process of `slipstream train`, watched from outside to its end, and its figures.

What is the process's own (memory, CPU, GPU) is measured here, alike for all; the rest is read from what the run wrote.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from slipstream import __version__
from slipstream.compare_statistics import MOVED, PHASES, Measured
from slipstream.cores import usable_cores
from slipstream.launch import die_with_parent
from slipstream.watch.usage import pss_mib

SAMPLE_EVERY = 0.5  # seconds between looks at the processes of a run
GPU_EVERY = 2.0
GPU_QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
STOP_SECONDS = 15.0  # a run that is told to stop saves a checkpoint, within 10 s


class Tree:
    """Peak memory, CPU seconds and GPU use of a process and its descendants, from looks at them."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak_mib = pid, 0.0
        self.cpu: dict[int, float] = {}
        self.gpu: list[float] = []
        self.next_gpu = time.monotonic() if shutil.which(GPU_QUERY[0]) else float("inf")

    def look(self) -> None:
        """Take a sample."""
        pids = []
        with suppress(psutil.Error):
            root = psutil.Process(self.pid)
            for process in [root, *root.children(recursive=True)]:
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self.cpu[process.pid] = times.user + times.system
                    pids.append(process.pid)
        self.peak_mib = max(self.peak_mib, pss_mib(pids) or 0.0)
        if time.monotonic() >= self.next_gpu:
            self.next_gpu = time.monotonic() + GPU_EVERY
            with suppress(OSError, ValueError, subprocess.SubprocessError):
                said = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=2, check=True).stdout
                self.gpu.append(max(float(line) for line in said.split()) / 100)  # the busiest


def execute(arguments: list[str]) -> dict[str, Any]:
    """Carry out `slipstream <arguments>` in a fresh process that does not outlive this one, and watch it to its end.

    Returns:
        code: exit code (minus the signal that killed it); error: the end of what it wrote there; wall: seconds from
        start to end; cpu_seconds: user and system time of the whole tree; peak_memory_mib: PSS of the tree (RSS where
        the kernel does not tell); gpu: mean use of the busiest GPU, or none.
    """
    parent, begun = os.getpid(), time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=errors, preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
        try:
            used, tree = _watch(process)
        except BaseException:
            _end(process)
            raise
        wall = time.monotonic() - begun
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-4000:].strip()
    reaped = used.ru_utime + used.ru_stime  # lacks descendants nobody has waited for; the samples lack the last moment
    return {
        "code": process.returncode, "error": said if process.returncode else None, "wall": wall,
        "cpu_seconds": max(reaped, sum(tree.cpu.values())), "peak_memory_mib": round(tree.peak_mib, 1),
        "gpu": float(np.mean(tree.gpu)) if tree.gpu else None,
    }  # fmt: skip


def _watch(process: subprocess.Popen[bytes]) -> tuple[Any, Tree]:
    """Wait for a child; returns its resource usage (and its descendants') and what was sampled."""
    tree, due = Tree(process.pid), 0.0
    while True:
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            return used, tree
        if time.monotonic() >= due:
            tree.look()
            due = time.monotonic() + SAMPLE_EVERY
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a child stop, in order if it can; a second Ctrl-C does not wait for it."""
    try:
        process.terminate()
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def machine() -> dict[str, Any]:
    """What the figures depend on: cores, CPU, system and versions."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = found.group(1) if found else cpu
    versions = {"slipstream": __version__, "python": platform.python_version()}
    for package in ("torch", "gymnasium", "numpy", "scipy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"cpu": cpu, "cores": usable_cores(), "system": platform.platform(), "versions": versions}


# -- what a run left -------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a broken last line, as a killed run leaves it, is passed over."""
    found = []
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def collect(directory: Path, record: dict[str, Any]) -> Measured:
    """The figures of a run from its directory and its record; what the run did not write is None."""
    summary, lines = read_json(directory / "summary.json"), read_lines(directory / "metrics.jsonl")
    last: dict[str, Any] = lines[-1] if lines else {}
    failure = _failure(record, summary)
    solved = summary.get("solved_at") if failure is None else None
    totals = {**{k: last.get(k) for k in ("steps", "updates", "bytes_down", "bytes_up")}, "seconds": last.get("wall")}
    totals |= {k: summary[k] for k in (*totals, "bytes_trajectories") if k in summary}
    if solved is None:
        steps, updates, seconds = totals["steps"] or 0, totals["updates"] or 0, totals["seconds"] or 0.0
    else:  # the run stopped a few rollouts later; updates are read between the lines on either side
        seen = [{"steps": 0, "updates": 0}, *lines]
        updates = np.interp(solved, [m["steps"] for m in seen], [m["updates"] for m in seen])
        steps, seconds = solved, summary["seconds_to_solved"]
    known = [m for m in lines if m.get("return") is not None]
    return Measured(
        cell=record["cell"], seed=record["seed"], directory=str(directory), reached=solved is not None,
        failure=failure, steps=float(steps), seconds=float(seconds), updates=float(updates),
        figures=_figures(summary, totals, known, record),
        curve={k: [float(m[k]) for m in known] for k in ("steps", "wall", "return")}, phases=_phases(summary, lines),
        staleness_histogram=[int(n) for n in summary.get("staleness_histogram", [])],
    )  # fmt: skip


def _failure(record: dict[str, Any], summary: dict[str, Any]) -> str | None:
    if record["code"] < 0:
        return f"killed by signal {-record['code']}"
    if record["code"]:
        return str(record["error"] or f"exit code {record['code']}")
    return None if summary else "it left no summary.json"


def _figures(
    summary: dict[str, Any], totals: dict[str, Any], known: list[dict[str, Any]], record: dict[str, Any]
) -> dict[str, float | None]:
    """Everything that is one number a run; keys as in compare_statistics.FIGURES."""
    full = max((m["return_episodes"] for m in known), default=0)  # means over few episodes are of short ones
    moved = {k: totals.get(f"bytes{k}") for k in MOVED if k}
    parts = [b for b in moved.values() if b is not None]
    moved[""] = sum(parts) if parts else None
    return {
        "peak_return": max((float(m["return"]) for m in known if m["return_episodes"] == full), default=None),
        "steps_per_second": summary.get("steps_per_second", _ratio(totals["steps"], totals["seconds"])),
        **{f"bytes{k}_per_update": _ratio(b, totals["updates"]) for k, b in moved.items()},
        **{f"gb{k}_per_hour": _ratio(b, totals["seconds"], 3600 / 1e9) for k, b in moved.items()},
        "peak_memory_mib": record["peak_memory_mib"] or None,
        "cpu": record["cpu_seconds"] / record["wall"] / record["machine"]["cores"], "gpu": record["gpu"],
        "staleness_mean": summary.get("staleness_mean"), "staleness_p99": summary.get("staleness_p99"),
        "dropped_stale": summary.get("gradients_dropped_stale"), "wait_share": summary.get("wait_share"),
        "torn_share": summary.get("reads_overlapped_share"),
    }  # fmt: skip


def _ratio(a: float | None, b: float | None, scale: float = 1.0) -> float | None:
    return None if a is None or not b else a / b * scale


def _phases(summary: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each phase, all workers together; a run that failed has their shares in its metrics."""
    if "phases" in summary:
        return {k: float(summary["phases"][k]) for k in PHASES}
    out, before = dict.fromkeys(PHASES, 0.0), 0.0
    for m in lines:
        for k in PHASES:
            out[k] += m[f"{k}_share"] * (m["wall"] - before) * len(m["worker_steps_per_second"])
        before = m["wall"]
    return out
