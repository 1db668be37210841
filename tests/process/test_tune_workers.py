"""`slipstream tune-workers` as a command: what it prints, and that it leaves nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from harness import assert_nothing_left, command, family, finish, start, until

SHORT = ("--seconds", 0.4, "--copies", 2, 8, "--max-workers", 2)


def environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("COLUMNS", "200")


def test_table_curve_and_recommendation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(tmp_path, monkeypatch)
    done = command("tune-workers", "CartPole-v1", *SHORT, "--update", "sync", cwd=tmp_path)
    assert done.code == 0, done.err
    rows = re.findall(r"^ +(\d) +(\d) +([\d,]+) +[\d.,]+ +\d+ +[\d.]+ % +0.00 +[\d,]+$", done.out, re.M)
    assert [(w, c) for w, c, _ in rows] == [("1", "2"), ("1", "8"), ("2", "2"), ("2", "8")]
    assert all(int(steps.replace(",", "")) > 0 for *_, steps in rows)
    assert len(re.findall(r"^ +\d x \d +#+\.*$", done.out, re.M)) == 4
    assert re.search(r"^recommended: --workers [12] --copies [28]$", done.out, re.M)
    assert list(tmp_path.iterdir()) == []


def test_json_is_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(tmp_path, monkeypatch)
    done = command(
        "tune-workers", "Acrobot-v1", "--seconds", 0.4, "--copies", 2, "--max-workers", 1, "--json",
        "--critical-batch", 64, "--update", "server", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.json["recommended"] == {"workers": 1, "copies": 2}
    assert done.json["options"] == "--workers 1 --copies 2"
    assert done.json["update"] == "server"
    (trial,) = done.json["trials"]
    assert trial["steps_per_second"] > 0
    assert trial["samples_per_update"] == pytest.approx(16, rel=0.2)  # 2 copies, rollouts of 8 steps
    expected = trial["steps_per_second"] / (1 + trial["samples_per_update"] * (1 + trial["staleness"]) / 64)
    assert trial["progress_per_second"] == pytest.approx(expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_leaves_nothing(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(tmp_path, monkeypatch)
    process = start("tune-workers", "CartPole-v1", "--seconds", 30, "--copies", 4, cwd=tmp_path)
    until(lambda: len(family(process.pid)) >= 2, 30, what="a worker")
    until(lambda: list(tmp_path.glob("slipstream-tune-*/run/metrics.jsonl")), 30, what="metrics")
    os.kill(process.pid, number)
    done = finish(process, 20)
    assert done.code == code, done.err
    assert "nothing is recommended" in done.err
    assert "Traceback" not in done.err
    assert_nothing_left(process.pid)
    assert list(tmp_path.iterdir()) == []


def test_an_error_comes_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(tmp_path, monkeypatch)
    done = command("tune-workers", "CartPoel-v1", "--json", cwd=tmp_path)
    assert done.code == 2
    assert done.out == ""
    assert "CartPole-v1" in done.err
    assert list(tmp_path.iterdir()) == []
