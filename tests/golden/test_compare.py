"""Comparisons: the grid, the statistics, what is read from a run, and the reports."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from slipstream import cli, compare, compare_report, compare_statistics
from slipstream.compare import Options, directory_of, entries, finished, grid, parse, plan, remembered
from slipstream.compare_run import collect
from slipstream.compare_statistics import Comparison, Measured, curve, interval, iqm, statistic, statistics
from slipstream.errors import ConfigError
from slipstream.options import train_options

# -- the grid --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lock", ["lock"]),
        (" lock , hogwild,,lock", ["lock", "hogwild"]),
        ("none,topk:0.01,qsgd:8", ["none", "topk:0.01", "qsgd:8"]),
        ("none,topk:0.01+qsgd:8", ["none", "topk:0.01,qsgd:8"]),
        ("topk:0.01+qsgd:8+feedback=no,int8", ["topk:0.01,qsgd:8,feedback=no", "int8"]),
        ("topk:0.01,feedback=no,momentum=0.9,int8", ["topk:0.01,feedback=no,momentum=0.9", "int8"]),
        ("server:quorum=2,max_staleness=4,lock", ["server:quorum=2,max_staleness=4", "lock"]),
        ("server:quorum=2+max_staleness=4,lock", ["server:quorum=2,max_staleness=4", "lock"]),
        ("server,quorum=2,lock", ["server:quorum=2", "lock"]),
        ("server,server:quorum=2", ["server", "server:quorum=2"]),
    ],
)
def test_lists(text: str, found: list[str]) -> None:
    assert entries("updates", text) == found


def labels(algos: str, updates: str, compressions: str = "none") -> list[str]:
    return [c.label for c in grid(algos, updates, compressions)]


def test_the_grid_of_the_manual() -> None:
    assert labels("a2c,ppo,a3c", "lock,hogwild,server") == ["a2c", "ppo", "a3c lock", "a3c hogwild", "a3c server"]
    cells = grid("a2c,ppo,a3c", "lock,hogwild,server,server:quorum=2,sync", "none,topk:0.01")
    assert [c.label for c in cells] == [
        "a2c", "ppo", "a3c lock", "a3c hogwild", "a3c server", "a3c server topk:0.01", "a3c server quorum=2",
        "a3c server quorum=2 topk:0.01",
    ]  # fmt: skip
    assert cells[0].arguments() == ["--algorithm", "a3c", "--update", "sync"]  # a3c under sync is a2c: made once
    assert cells[1].arguments() == ["--algorithm", "ppo", "--update", "sync"]
    assert cells[-1].arguments() == [
        "--algorithm", "a3c", "--update", "server", "--rule.quorum", "2", "--compress", "topk:0.01",
    ]  # fmt: skip
    assert len({c.slug for c in cells}) == len(cells)
    assert all(re.fullmatch(r"[\w.=,+-]+", c.slug) for c in cells)


def test_options_of_a_rule_in_any_order_are_one_cell() -> None:
    assert len(grid("a3c", "server:quorum=2+max-staleness=4,server:max_staleness=4+quorum=2", "none")) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a2k", "lock"), r"algos: .*'a2k'.*Did you mean 'a2c'"),
        (("a3c", "lok"), r"updates: .*'lok'.*Did you mean 'lock'"),
        (("a3c", "server", "none,tpk:0.1"), r"compress: .*'tpk'.*Did you mean 'topk'"),
        (("a3c", "server", "topk:7"), r"topk ratio '7'"),
        (("a3c", "server:quorum"), r"'quorum' of 'server:quorum' is not an option"),
        ((" ,", "lock"), "algos: the list is empty"),
        (("a3c", "lock", "topk:0.1"), r"no cell of the grid would use 'topk:0.1'"),
        (("ppo", "server", "topk:0.1"), r"no cell of the grid would use"),
    ],
)
def test_refusals_of_the_grid(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        labels(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CartPol-v1"], r"no environment 'CartPol-v1'.*CartPole-v1"),
        (["CartPole-v1", "--algos", "a2k"], "Did you mean 'a2c'"),
        (["CartPole-v1", "--seeds", "0"], "seeds: 0 is too small"),
        (["CartPole-v1", "--workers", "2", "--updates", "server:quorum=3"], r"a3c server quorum=3: rule.quorum: 3"),
        (["CartPole-v1", "--updates", "lock:quorum=2"], "a3c lock quorum=2: rule.quorum: 2 is an option"),
        (["CartPole-v1", "--updates", "server:quorm=2"], r"--rule\.quorum"),
        (["CartPole-v1", "--sedes", "2"], "--seeds"),
        (["CartPole-v1", "--", "--total-stps", "9"], "--total-steps"),
        (["CartPole-v1", "--", "--update", "lock"], "train: update is an option of the grid"),
        (["CartPole-v1", "--", "--seed", "3"], "train: seed is an option of the grid"),
        (["CartPole-v1", "--train", "'"], "cannot be split"),
        ([], "which environment"),
        (["--out", "nowhere"], "nowhere holds no comparison"),
        (["CartPole-v1", "--out", "full"], "full is not empty and holds no comparison"),
        (["CartPole-v1", "--out", "full/file"], "cannot make full/file"),
    ],
)  # fmt: skip
def test_refusals_before_anything_starts(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").touch()
    monkeypatch.setattr(compare, "execute", lambda _: pytest.fail("something was started"))
    try:
        code = cli.run(["compare", *arguments])
    except SystemExit as e:
        code = int(e.code or 0)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert re.search(said, captured.err), captured.err
    assert [p.name for p in Path().iterdir()] == ["full"]


@pytest.mark.parametrize("package", ["scipy", "matplotlib"])
def test_a_missing_extra_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = compare_statistics.importlib.util.find_spec
    monkeypatch.setattr(
        compare_statistics.importlib.util, "find_spec", lambda p: None if p == package else find(p)
    )  # fmt: skip
    assert cli.run(["compare", "CartPole-v1"]) == 2
    assert capsys.readouterr().err == f"slipstream: compare: needs {package}: pip install 'slipstream-rl[compare]'\n"


def test_the_plan_goes_seed_by_seed(tmp_path: Path) -> None:
    options = parse(["CartPole-v1", "--algos", "ppo,a3c", "--updates", "lock", "--seeds", "2", "--target", "-5",
                     "--workers", "2", "--", "--algo.gamma", "0.9"])  # fmt: skip
    jobs = plan(options, tmp_path)
    assert [(j.cell.label, j.seed) for j in jobs] == [("ppo", 0), ("a3c lock", 0), ("ppo", 1), ("a3c lock", 1)]
    assert jobs[1].directory == tmp_path / "a3c-lock-seed0"
    run = compare.check(jobs[1], lambda a: train_options(a)[0])
    assert (run.algorithm, run.update, run.workers, run.target_return, run.algo.gamma) == ("a3c", "lock", 2, -5.0, 0.9)
    assert compare.command(options).endswith("--seeds 2 --target -5.0 --workers 2 -- --algo.gamma 0.9")


def test_the_same_options_lead_to_the_same_place(tmp_path: Path) -> None:
    a = parse(["CartPole-v1", "--seeds", "3"])
    assert directory_of(a) == directory_of(parse(["CartPole-v1", "--seeds", "5", "--json"]))
    assert directory_of(a) != directory_of(parse(["CartPole-v1", "--seeds", "3", "--target", "9"]))
    assert directory_of(parse(["my.package:A/B-v0"])).name.startswith("compare-A-B-v0-")
    saved = dataclasses.asdict(dataclasses.replace(a, out="elsewhere"))
    (tmp_path / "plan.json").write_text(json.dumps({"options": saved}))
    assert remembered(Options(out=str(tmp_path))) == dataclasses.replace(a, out=str(tmp_path))
    with pytest.raises(ConfigError, match="changed with its ENV given too"):
        remembered(Options(out=str(tmp_path), seeds=9))


# -- statistics ------------------------------------------------------------------------------------


def test_interquartile_means_by_hand() -> None:
    assert iqm(np.array([1.0, 2, 3, 100])) == 2.5
    assert iqm(np.array([1.0, 2, 3, 4, 100])) == 3.0
    assert iqm(np.array([1.0, 2, 6])) == 3.0  # a quarter of three is none
    assert iqm(np.arange(8.0).reshape(2, 4), axis=1).tolist() == [1.5, 5.5]


def test_intervals_are_the_bootstrap_of_scipy() -> None:
    x = np.random.default_rng(3).normal(10, 2, 12)
    s = statistic(list(x))
    assert s is not None
    expected = stats.bootstrap(
        (x,), lambda v, axis: stats.trim_mean(v, 0.25, axis=axis), method="percentile", n_resamples=20_000,
        rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    assert s.median == np.median(x)
    assert s.iqm == pytest.approx(np.sort(x)[3:9].mean())
    assert (s.low, s.high) == pytest.approx((expected.low, expected.high), abs=0.1)
    assert (s.open_median, s.open_iqm, s.open_low, s.open_high) == (False,) * 4


def test_few_runs_have_what_can_be_known() -> None:
    assert statistic([]) is None
    one = statistic([4.0])
    assert one is not None
    assert (one.n, one.median, one.iqm, one.low, one.high) == (1, 4.0, 4.0, None, None)
    same = statistic([4.0, 4.0, 4.0])
    assert same is not None
    assert (same.low, same.high) == (4.0, 4.0)
    assert interval(np.array([1.0])) is None


@pytest.mark.parametrize(
    ("values", "censored", "median", "mean", "high"),
    [
        ([1, 2, 3], [False, False, False], False, False, False),
        ([1, 2, 30], [False, False, True], False, True, True),  # the median stays 2 however long the third took
        ([1, 20, 30], [False, True, True], True, True, True),
        ([1, 2, 3, 4, 5, 6, 7, 80], [False] * 7 + [True], False, False, True),  # the IQM leaves it out
        ([5, 6, 7, 1], [False, False, False, True], True, True, True),  # stopped early: it may well be the slowest
        ([0, 0], [True, True], True, True, True),  # failed before the first step
    ],
)
def test_lower_bounds_are_marked(
    values: list[float], censored: list[bool], median: bool, mean: bool, high: bool
) -> None:
    s = statistic(values, censored)
    assert s is not None
    assert (s.open_median, s.open_iqm, s.open_high) == (median, mean, high)
    assert s.n == len(values)
    assert s.median == np.median(values)
    assert max(s.median, s.iqm, s.high or 0) < 1e6  # the mark is no figure


# -- what a run left -------------------------------------------------------------------------------


def line(steps: int, wall: float, value: float | None, episodes: int = 100, **more: Any) -> dict[str, Any]:
    shares = {f"{k}_share": s for k, s in zip(compare_statistics.PHASES, (0.5, 0.3, 0.05, 0.1, 0.05), strict=True)}
    return {
        "steps": steps, "updates": steps // 100, "wall": wall, "return": value, "return_episodes": episodes, **shares,
        "worker_steps_per_second": [1.0, 1.0], "bytes_down": steps * 10, "bytes_up": steps * 5, **more,
    }  # fmt: skip


def plant(
    out: Path, cell: str, seed: int, solved: int | None = 3000, code: int = 0, error: str | None = None, **more: Any
) -> Measured:
    """A run of 4,000 steps in 8 s, as it leaves its directory, and what is read from it."""
    directory = out / f"{cell.replace(' ', '-')}-seed{seed}"
    directory.mkdir(parents=True)
    lines = [line(0, 0.0, None, 0), line(1000, 2.0, 400.0, 3), line(2000, 4.0, 90.0 + seed), line(4000, 8.0, 80.0)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in lines) + '{"steps": 99')
    if code == 0:
        summary = {
            "steps": 4000, "updates": 40, "seconds": 8.0, "solved_at": solved, "steps_per_second": 500.0,
            "seconds_to_solved": None if solved is None else 7.0, "wait_share": 0.25, "staleness_mean": 1.5,
            "staleness_p99": 4.0, "staleness_histogram": [6, 3, 1, 0], "bytes_down": 40_000, "bytes_up": 20_000,
            "bytes_trajectories": 0, "gradients_dropped_stale": 2,
            "phases": dict(zip(compare_statistics.PHASES, (6.0, 4.0, 1.0, 4.0, 1.0), strict=True)), **more,
        }  # fmt: skip
        (directory / "summary.json").write_text(json.dumps(summary))
    record = {
        "cell": cell, "seed": seed, "code": code, "error": error, "wall": 10.0, "cpu_seconds": 15.0, "gpu": None,
        "peak_memory_mib": 250.0, "machine": {"cores": 2},
    }  # fmt: skip
    return collect(directory, record)


def test_figures_of_a_run_that_reached_the_target(tmp_path: Path) -> None:
    m = plant(tmp_path, "a3c hogwild", 0, reads_overlapped_share=0.02)
    assert (m.reached, m.failure) == (True, None)
    assert (m.steps, m.seconds, m.updates) == (3000, 7.0, 30)  # updates: halfway between two lines
    assert m.figures == {
        "peak_return": 90.0,  # not the 400 that is a mean of three episodes
        "steps_per_second": 500.0, "bytes_per_update": 1500.0, "bytes_down_per_update": 1000.0,
        "bytes_up_per_update": 500.0, "bytes_trajectories_per_update": 0.0,
        "gb_per_hour": pytest.approx(60_000 / 8 * 3600 / 1e9), "gb_down_per_hour": pytest.approx(0.018),
        "gb_up_per_hour": pytest.approx(0.009), "gb_trajectories_per_hour": 0.0, "peak_memory_mib": 250.0,
        "cpu": 0.75, "gpu": None, "staleness_mean": 1.5, "staleness_p99": 4.0, "dropped_stale": 2,
        "wait_share": 0.25, "torn_share": 0.02,
    }  # fmt: skip
    assert tuple(sorted(m.figures)) == tuple(sorted(compare_statistics.FIGURES))
    assert m.curve == {"steps": [1000, 2000, 4000], "wall": [2, 4, 8], "return": [400, 90, 80]}
    assert sum(m.phases.values()) == 16.0


def test_a_run_that_did_not_reach_it_counts_with_all_it_used(tmp_path: Path) -> None:
    m = plant(tmp_path, "ppo", 0, solved=None)
    assert (m.reached, m.failure) == (False, None)
    assert (m.steps, m.seconds, m.updates) == (4000, 8.0, 40)


@pytest.mark.parametrize(("code", "said"), [(-9, "killed by signal 9"), (1, "worker 0 ended"), (2, "exit code 2")])
def test_failures_are_told_and_what_is_known_is_kept(code: int, said: str, tmp_path: Path) -> None:
    m = plant(tmp_path, "ppo", 0, code=code, error="slipstream: worker 0 ended" if code == 1 else "")
    assert not m.reached
    assert said in str(m.failure)
    assert (m.steps, m.seconds, m.updates) == (4000, 8.0, 40)
    assert m.figures["bytes_per_update"] == 1500.0
    assert m.figures["steps_per_second"] == 500.0
    assert m.figures["staleness_mean"] is None
    assert m.phases["collect"] == pytest.approx(0.5 * 8 * 2)
    assert m.curve["return"]


def test_a_run_that_left_nothing(tmp_path: Path) -> None:
    record = {"cell": "ppo", "seed": 0, "code": 0, "error": None, "wall": 1.0, "cpu_seconds": 1.0, "gpu": 0.5,
              "peak_memory_mib": 0.0, "machine": {"cores": 2}}  # fmt: skip
    m = collect(tmp_path / "nothing", record)
    assert (m.reached, m.failure, m.steps, m.seconds) == (False, "it left no summary.json", 0, 0)
    assert m.figures["peak_return"] is None
    assert m.figures["gpu"] == 0.5


def test_a_run_of_other_options_is_not_taken_for_ours(tmp_path: Path) -> None:
    job = plan(Options(env="CartPole-v1"), tmp_path)[0]
    assert finished(job) is None
    job.directory.mkdir()
    assert finished(job) is None  # half done
    (job.directory / "compare.json").write_text(json.dumps({"arguments": job.arguments, "code": 0}))
    assert finished(job) == {"arguments": job.arguments, "code": 0}
    (job.directory / "compare.json").write_text(json.dumps({"arguments": ["other"]}))
    with pytest.raises(ConfigError, match="was run with other options"):
        finished(job)


# -- the reports -----------------------------------------------------------------------------------

MACHINE = {
    "cpu": "A <fast> CPU",
    "cores": 2,
    "system": "Linux",
    "versions": {"torch": "2.13"},
    "first": "1",
    "last": "2",
}


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Two cells of three seeds: in the second, one run did not reach the target and one failed."""
    runs = [plant(tmp_path, "a2c", s, solved=1000 * (s + 1)) for s in range(3)]
    runs += [
        plant(tmp_path, "a3c hogwild", 0, reads_overlapped_share=0.02),
        plant(tmp_path, "a3c hogwild", 1, solved=None, reads_overlapped_share=0.04),
        plant(tmp_path, "a3c hogwild", 2, code=1, error="slipstream: worker 0 | <ended>"),
    ]
    return Comparison(
        env="CartPole-v1", target=95.0, command="slipstream compare CartPole-v1", directory=str(tmp_path),
        grid=compare.GRID, cells=["a2c", "a3c hogwild"], runs=runs, machines=[MACHINE],
    )  # fmt: skip


def test_the_table(comparison: Comparison) -> None:
    found = dict(compare_report.tables(comparison))
    head, a2c, hogwild = found["Environment steps to target"]
    assert head == ["", "reached", "failed", "median", "IQM", "95 % interval", "seeds 0, 1, 2"]
    assert a2c == ["a2c", "3/3", "0", "2,000", "2,000", "1,000 to 3,000", "1,000 · 2,000 · 3,000"]
    assert hogwild[:3] == ["a3c hogwild", "1/3", "1"]
    assert hogwild[3] == "> 4,000"
    assert hogwild[-1] == "3,000 · > 4,000 · > 4,000 (failed)"
    assert "Wall seconds to target" in found
    assert "Updates to target" in found
    assert found["Return and speed"][1] == ["a2c", "91.0; 91.0 (90.0 to 92.0)", "500; 500 (500 to 500)"]
    (moved,) = [rows for title, rows in found.items() if title.startswith("Bytes moved")]
    assert moved[1] == ["a2c", "1.5", "1.0", "0.5", "0.0", "0.03", "0.02", "0.01", "0.00"]
    head, a2c, hogwild = found["Machine and consistency"]
    assert dict(zip(head, a2c, strict=True))["CPU %"] == "75"
    assert dict(zip(head, a2c, strict=True))["torn reads at most %"] == "-"
    assert dict(zip(head, hogwild, strict=True))["torn reads at most %"] == "3.00 [2 of 3 runs]"
    assert found["Failures"][1:] == [["a3c hogwild, seed 2", "slipstream: worker 0 | <ended>"]]
    assert any("written: " in t for t in compare_report.text(comparison))


def test_without_a_target_there_is_nothing_to_reach(comparison: Comparison) -> None:
    c = dataclasses.replace(comparison, target=None)
    assert dict(compare_report.tables(c))["Updates to target"][1][1:6] == ["-", "0", "-", "-", "-"]
    assert statistics(c, "a2c")["steps_to_target"] is None
    assert csv_rows(c)[0]["steps_to_target_median"] == ""


def csv_rows(c: Comparison) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(compare_report.csv_text(c))))


def test_the_csv_has_every_figure_of_every_seed(comparison: Comparison) -> None:
    a2c, hogwild = csv_rows(comparison)
    assert (a2c["cell"], a2c["runs"], a2c["reached"], a2c["failed"]) == ("a2c", "3", "3", "0")
    assert (hogwild["runs"], hogwild["reached"], hogwild["failed"]) == ("3", "1", "1")
    assert float(a2c["steps_to_target_median"]) == 2000
    assert a2c["steps_to_target_median_is_lower_bound"] == "False"
    assert hogwild["steps_to_target_median_is_lower_bound"] == "True"
    assert hogwild["steps_to_target_seeds"] == "3000 >4000 >4000"
    assert hogwild["torn_share_seeds"] == "0.02 0.04 -"
    assert hogwild["torn_share_n"] == "2"
    for figure in compare_statistics.FIGURES:
        assert {f"{figure}_{f}" for f in ("median", "iqm", "low", "high", "n", "seeds")} <= set(a2c)


def test_the_files(comparison: Comparison, tmp_path: Path) -> None:
    compare_report.write(comparison, tmp_path)
    markdown, page = ((tmp_path / f"comparison.{e}").read_text() for e in ("md", "html"))
    assert markdown.startswith("# CartPole-v1, to a mean return of 95: 2 ways, 3 seeds each\n")
    assert "| a3c hogwild | 1/3 | 1 | > 4,000 |" in markdown
    assert r"worker 0 \| <ended>" in markdown
    assert page.count("<svg") == page.count("</svg>") == 4
    for text in ("a3c hogwild", "worker 0 | &lt;ended&gt;", "A &lt;fast&gt; CPU", "environment steps",
                 "seconds of training", "collect", "staleness (updates)"):  # fmt: skip
        assert text in page
    for outside in ("http", "//", "<script", "<link", "<image", "src=", "@import"):
        assert outside not in page, f"the page refers to something: {outside}"
    assert all(found.startswith("#") for found in re.findall(r'href="([^"]*)"', page))
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", page))
    stored = json.loads((tmp_path / "comparison.json").read_text())
    assert len(stored["runs"]) == 6
    assert stored["statistics"]["a3c hogwild"]["steps_to_target"]["open_median"] is True


def test_machines_that_differ_are_told(comparison: Comparison) -> None:
    assert not any("NOT" in n for n in compare_report.notes(comparison))
    two = dataclasses.replace(comparison, machines=[MACHINE, {**MACHINE, "cores": 4}])
    assert any("NOT all made with the same machine" in n for n in compare_report.notes(two))


def test_curves_are_interquartile_means_with_a_band(comparison: Comparison) -> None:
    found = curve(comparison.of("a2c"), "steps")
    assert found is not None
    grid, middle, band = found
    assert (grid[0], grid[-1]) == (1000, 4000)
    assert (middle[0], middle[-1]) == (400, 80)
    at = int(np.argmin(abs(grid - 2000)))
    assert band[0][at] < middle[at] < band[1][at]
    one = comparison.of("a2c")[:1]
    alone = curve(one, "wall")
    assert alone is not None
    assert alone[2] is None
    assert curve([dataclasses.replace(one[0], curve={"steps": [], "wall": [], "return": []})], "steps") is None
