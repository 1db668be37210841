"""The parts of tune.py that need no training: the grid, the reading of a trial, the proxy, what is recommended."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream import config, tune
from slipstream.errors import ConfigError, Interrupted
from slipstream.tune import Trial, best_workers, read_trial, recommend, worker_counts

RUN = config.check(config.from_dict({"env": "CartPole-v1", **config.preset("CartPole-v1")}))


def a_trial(workers: int = 1, copies: int = 8, steps: float = 1000.0, updates: float = 10.0, **more: Any) -> Trial:
    return Trial(
        workers, copies, steps, updates, **{"wait_share": 0.0, "staleness": 0.0, "critical_batch": 100.0, **more}
    )


def line(wall: float, steps: int, updates: int, rates: list[float], **more: Any) -> dict[str, Any]:
    return {
        "wall": wall, "steps": steps, "updates": updates, "worker_steps_per_second": rates, "wait_share": 0.1,
        "collect_share": 0.6, "clipped_share": 1.0, "staleness_mean": 1.0, "cores_busy": 1.5, **more,
    }  # fmt: skip


# -- the quick form ----------------------------------------------------------------------------------


def test_quick_form_takes_fewer_workers_where_they_are_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "usable_cores", lambda: 8)
    asked: list[tuple[int, float]] = []

    def measure(workers: int, seconds: float) -> float:
        asked.append((workers, seconds))
        return float({1: 10, 2: 20, 4: 39, 7: 40, 8: 40}[workers])

    assert best_workers(measure) == 4
    assert [n for n, _ in asked] == [1, 2, 4, 7, 8]
    assert {s for _, s in asked} == {6.0 / 5}


# -- the grid ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "cores", "counts"),
    [
        (0, 1, [1, 2]), (0, 2, [1, 2, 3]), (0, 4, [1, 2, 3, 4, 6]), (0, 16, [1, 2, 4, 8, 15, 16, 24]),
        (3, 8, [1, 2, 3]), (1, 2, [1]), (12, 8, [1, 2, 4, 7, 8, 12]),
    ],
)  # fmt: skip
def test_numbers_of_workers(most: int, cores: int, counts: list[int]) -> None:
    assert worker_counts(most, cores) == counts


# -- reading a trial ---------------------------------------------------------------------------------


def test_a_trial_counts_from_when_all_work_to_before_the_stop() -> None:
    lines = [
        line(0.0, 0, 0, [0, 0]),
        line(0.2, 100, 1, [500, 0]),
        line(0.4, 300, 3, [500, 500]),  # from here
        line(0.6, 500, 5, [500, 500], wait_share=0.2, staleness_mean=1.0),
        line(1.0, 900, 11, [500, 500], wait_share=0.5, staleness_mean=2.0),  # to here
        line(3.0, 950, 12, [10, 10], wait_share=1.0, staleness_mean=9.0),
    ]
    t = read_trial(lines, 2, 8, 256.0)
    assert t is not None
    assert t.steps_per_second == pytest.approx(600 / 0.6)
    assert t.updates_per_second == pytest.approx(8 / 0.6)
    assert t.wait_share == pytest.approx((0.2 * 0.2 + 0.5 * 0.4) / 0.6)
    assert t.staleness == pytest.approx((2 * 1.0 + 6 * 2.0) / 8)
    assert t.samples == pytest.approx(75)
    assert t.shares["collect_share"] == pytest.approx(0.6)
    assert t.shares["cores_busy"] == pytest.approx(1.5)
    assert "clipped_share" not in t.shares


def test_a_trial_too_short_tells_nothing() -> None:
    lines = [line(0.2 * i, 100 * i, i, [500, 500 if i > 3 else 0]) for i in range(6)]
    assert read_trial(lines, 2, 8, 256.0) is None
    assert read_trial([], 1, 8, 256.0) is None
    late = [line(0.05 * i, 100 * i, i, [500]) for i in range(6)]
    assert read_trial(late, 1, 8, 256.0) is None


# -- the proxy and the recommendation ----------------------------------------------------------------


def test_the_proxy() -> None:
    """A batch of the critical size halves it; stale gradients are one batch; tiny batches cost nothing."""
    assert a_trial().progress == pytest.approx(500)
    assert a_trial(staleness=1.0).progress == pytest.approx(1000 / 3)
    assert a_trial(updates=1e9).progress == pytest.approx(1000)
    lock, sync = a_trial(4, updates=40, staleness=3.0), a_trial(4, updates=10)
    assert lock.progress == pytest.approx(sync.progress)
    assert a_trial(steps=0.0, updates=0.0).progress == 0
    assert eval(tune.PROXY, {}, a_trial(staleness=2.5).to_dict()) == pytest.approx(a_trial(staleness=2.5).progress)


def test_the_smallest_of_those_as_good_is_recommended() -> None:
    trials = [
        a_trial(1, 8, 900), a_trial(1, 16, 960), a_trial(2, 8, 1000), a_trial(2, 4, 970), a_trial(3, 1, 985),
    ]  # fmt: skip
    trials = [Trial(**{**vars(t), "updates_per_second": t.steps_per_second / 100}) for t in trials]
    assert (recommend(trials).workers, recommend(trials).copies) == (1, 16)
    assert (recommend(trials[2:]).workers, recommend(trials[2:]).copies) == (2, 4)


def test_repeats_are_their_median() -> None:
    times = [a_trial(steps=s, wait_share=w, shares={"x": s}) for s, w in ((1, 0.5), (9, 0.1), (2, 0.3))]
    t = tune.middle(times)
    assert (t.steps_per_second, t.wait_share, t.shares) == (2, 0.3, {"x": 2})


def test_table_and_curve() -> None:
    trials = [a_trial(1, 8, 500, 5), a_trial(2, 16, 1000, 10)]
    assert len(tune.row(trials[0])) == len(tune.HEAD)
    lines = tune.curve(trials)
    assert lines[1] == "   2 x 16   " + "#" * 20 + "." * 20
    assert lines[0] == "   1 x 8    " + "#" * 10 + "." * 10
    said = tune.explain(trials, "lock")
    assert said[-1] == "recommended: --workers 2 --copies 16"
    assert all(len(text) <= 120 for text in said)
    assert "for the server" in "\n".join(tune.explain(trials, "server"))


# -- the grid is gone through ------------------------------------------------------------------------


class Fake:
    """Stands for `slipstream.train`: writes metrics as a run of so many workers would."""

    def __init__(self, rate: Any = lambda run: 1000.0 * run.workers) -> None:
        self.rate, self.runs = rate, []  # type: ignore[var-annotated]

    def __call__(self, env: Any, *, options: Any, run: Path, show: str, launcher: Any) -> Any:
        self.runs.append(options)
        assert not run.exists()
        assert options.limits.max_seconds
        assert not options.record
        assert not options.watch.tensorboard
        run.mkdir()
        rate = self.rate(options)
        each = [rate / options.workers] * options.workers
        lines = [line(0.2 * i, int(rate * 0.2 * i), 20 * i if rate else 0, each) for i in range(12)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        return SimpleNamespace(run=run)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class Launcher:
        closed = False

        def __init__(self) -> None:
            made.append(self)

        def end(self) -> None:
            self.closed = True

    monkeypatch.setattr(tune, "Kept", Launcher)
    return made


def test_every_setting_is_tried(no_launcher: list[Any]) -> None:
    train, said = Fake(), []
    found = tune.tune(train, RUN, workers=[2, 1, 2], copies=[4, 2], repeats=3, said=said.append)
    assert (
        [(t.workers, t.copies) for t in found]
        == [(1, 2), (1, 4), (2, 2), (2, 4)]
        == [(t.workers, t.copies) for t in said]
    )
    assert [(r.workers, r.copies) for r in train.runs] == list(
        itertools.chain.from_iterable([k] * 3 for k in [(1, 2), (1, 4), (2, 2), (2, 4)])
    )
    assert found[2].steps_per_second == pytest.approx(2000, rel=0.01)
    assert [m.closed for m in no_launcher] == [True]


def test_the_command_says_and_returns_the_same(no_launcher: list[Any]) -> None:
    options, rest = tune.parse(["CartPole-v1", "--max-workers", "2", "--copies", "4", "8", "--update", "sync"])
    assert rest == ["CartPole-v1", "--update", "sync"]
    said: list[str] = []
    found = tune.command(options, Fake(), RUN, said.append)
    assert said[-1] == f"recommended: {found['options']}"
    assert found["options"] == "--workers {workers} --copies {copies}".format(**found["recommended"])
    assert [t["workers"] for t in found["trials"]] == [1, 1, 2, 2]
    assert found["critical_batch"] == tune.critical_batch_of(RUN)
    json.dumps(found, allow_nan=False)


def test_a_trial_without_an_update_is_an_error_after_longer_ones(no_launcher: list[Any]) -> None:
    train = Fake(lambda run: 0.0)
    with pytest.raises(ConfigError, match="too short"):
        tune.tune(train, RUN, workers=[1], copies=[1], seconds=1.0)
    asked = [r.limits.max_seconds - tune.WARM_UP for r in train.runs]
    assert asked == pytest.approx([1, 3, 9])
    assert no_launcher[0].closed


def test_an_interruption_names_no_directory_that_is_gone(no_launcher: list[Any]) -> None:
    def train(*_: Any, **__: Any) -> Any:
        raise Interrupted("stopped by SIGTERM at step 5; `slipstream resume /tmp/x` goes on")

    with pytest.raises(Interrupted) as e:
        tune.tune(train, RUN, workers=[1])
    assert str(e.value) == "stopped by SIGTERM; nothing is recommended"
    assert no_launcher[0].closed


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"workers": [0]}, "workers"), ({"copies": [0]}, "copies"), ({"repeats": 0}, "repeats"),
     ({"seconds": 0.0}, "seconds"), ({"critical_batch": 0.0}, "critical_batch"), ({"copies": []}, "copies")],
)  # fmt: skip
def test_options_that_make_no_sense(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}:"):
        tune.tune(Fake(), RUN, **{"workers": [1], **settings})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [([], "which environment"), (["--seconds", "1"], "which environment"),
     (["CartPole-v1", "--workers", "3"], "--workers"), (["CartPole-v1", "--run=x"], "--run")],
)  # fmt: skip
def test_options_that_have_no_meaning(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tune.parse(arguments)


def test_a_launcher_that_is_kept_forgets_its_jobs(tmp_path: Path) -> None:
    """Closing ends the jobs alone; numbers begin anew and no end of an old job is taken for that of a new one."""
    import cloudpickle

    kept = tune.Kept()

    def start(number: int, call: Any) -> None:
        kept.send({
            "id": number, "call": cloudpickle.dumps(call), "path": sys.path, "output": str(tmp_path / "out"),
            "error": str(tmp_path / "error"),
        })  # fmt: skip

    def hear(word: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for m in kept.messages():
                if word in m:
                    return m
            time.sleep(0.01)
        raise AssertionError(word)

    try:
        hear("ready")
        start(0, (time.sleep, (60,)))
        pid = hear("started")["pid"]
        kept.close()
        assert not kept.closed
        assert not Path(f"/proc/{pid}").exists()
        assert not kept.started
        start(0, (time.sleep, (0,)))
        assert hear("ended")["status"] == 0
        kept.close()
        assert not kept.messages()
    finally:
        kept.end()
    assert kept.closed
    assert kept.process.returncode is not None
