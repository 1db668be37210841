"""Comparisons with real runs: killed in the middle and taken up again, stopped, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness import assert_nothing_left, command, finish, start, until

GRID = ("CartPole-v1", "--algos", "a3c", "--updates", "lock,hogwild", "--seeds", 2, "--workers", 1, "--target", 1000)


def training(process: subprocess.Popen[str]) -> int:
    """The `slipstream train` that a comparison is carrying out."""

    def look() -> int | None:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children():
                if "train" in child.cmdline():
                    return int(child.pid)
        return None

    return int(until(look, what="a training"))


def measured(directory: Path) -> bool:
    """Whether a run has begun to train."""
    return (directory / "metrics.jsonl").exists() and (directory / "metrics.jsonl").stat().st_size > 0


def finished(out: Path) -> dict[str, int]:
    """The finished runs, and when."""
    return {p.parent.name: p.stat().st_mtime_ns for p in out.glob("*/compare.json")}


def test_a_killed_comparison_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    out, names = tmp_path / "c", [f"a3c-{u}-seed{s}" for s in (0, 1) for u in ("lock", "hogwild")]
    process = start("compare", *GRID, "--total-steps", 12_000, "--out", out)
    until(lambda: (out / names[0] / "compare.json").exists(), 60, what="a finished run")
    until(lambda: measured(out / names[1]), 60, what="a second run")
    child = training(process)
    process.kill()
    process.communicate()
    until(lambda: not psutil.pid_exists(child), 5, what="the end of the training")
    assert_nothing_left(child, 5)
    before = finished(out)
    assert list(before) == names[:1]
    assert not (out / "comparison.csv").exists()

    half = out / names[1] / "half-done"
    half.touch()
    process = start("compare", "--out", out, "--json")  # its options are in its directory
    until(lambda: not half.exists() and measured(half.parent), 60, what="the second run, begun anew")
    os.kill(training(process), signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.err
    assert done.err.count("(finished before)") == 1
    assert "FAILED: killed by signal 9" in done.err
    after = finished(out)
    assert sorted(after) == sorted(names)
    assert after[names[0]] == before[names[0]]
    assert [(Path(r["directory"]).name, r["failure"]) for r in done.json["runs"]] == [
        (n, "killed by signal 9" if n == names[1] else None) for n in names
    ]
    for run in done.json["runs"]:
        assert run["figures"]["peak_memory_mib"] > 50
        assert 0.05 < run["figures"]["cpu"] < 1.5
    whole = done.json["runs"][0]
    summary = json.loads((out / names[0] / "summary.json").read_text())
    assert (whole["steps"], whole["updates"]) == (summary["steps"], summary["updates"])
    assert whole["figures"]["bytes_up_per_update"] == summary["bytes_up"] / summary["updates"]
    for file in ("csv", "md", "html"):
        assert "a3c hogwild" in (out / f"comparison.{file}").read_text()

    done = command("compare", *GRID, "--total-steps", 12_000, "--out", out)  # all is done: only the report
    assert done.code == 0, done.err
    assert done.out.count("(finished before)") == 4
    assert "> " in done.out
    assert "(failed)" in done.out
    assert finished(out) == after


@pytest.mark.parametrize(("number", "group", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_a_stopped_comparison_leaves_nothing_behind(number: int, group: bool, code: int, tmp_path: Path) -> None:
    out = tmp_path / "c"
    process = start("compare", *GRID, "--total-steps", 10_000_000, "--out", out)
    until(lambda: measured(out / "a3c-lock-seed0"), 60, what="a run")
    child = training(process)
    (os.killpg if group else os.kill)(process.pid, number)
    done = finish(process, 30)
    assert done.code == code, done
    assert f"`slipstream compare --out {out}` goes on" in done.err
    assert "Traceback" not in done.err
    assert not psutil.pid_exists(child)
    assert_nothing_left(child)
    assert not finished(out)  # what was stopped is not counted
    assert done.seconds < 15


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "c"
    process = start("compare", *GRID, "--total-steps", 10_000_000, "--out", out)
    try:
        until(lambda: measured(out / "a3c-lock-seed0"), 60, what="a run")
        done = command("compare", "--out", out)
        assert done.code == 2
        assert f"another process works in {out}" in done.err
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_is_refused_ends_the_comparison(tmp_path: Path) -> None:
    """What `train` finds only when it makes the environment; the directory is free for another attempt."""
    more = ("--workers", 1, "--total-steps", 5000, "--", "--env-kwargs", "{nonsense: 1}")
    done = command("compare", "CartPole-v1", "--algos", "a3c", "--out", tmp_path / "c", *more)
    assert done.code == 2, done
    assert done.err.startswith("slipstream: a3c lock: env_kwargs: {'nonsense': 1} do not fit CartPole-v1")
    assert done.err.count("\n") == 1
    assert not list((tmp_path / "c").glob("*-seed*"))
