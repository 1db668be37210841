"""The model of benchmarks/simulate_scaling.py against what can be worked out by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("simpy", reason="simpy is not installed: pip install 'slipstream-rl[bench]'")

FOLDER = Path(__file__).parents[2] / "benchmarks"
MS = 1e-3


def load(name: str) -> Any:
    """A file of benchmarks/ as a module; those beside it are found as when it is run."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


model = load("scaling_model")
script = load("simulate_scaling")

COSTS = model.Costs(samples=100, collect=3 * MS, gradient=1.5 * MS, apply=0.5 * MS)
ALONE = 100 / (5 * MS)  # steps/s of one worker
SPREAD = tuple(0.5 + i / 10 for i in range(11))  # mean 1
SCHEMES = {s.name: s for s in model.SCHEMES}
LOCAL = [s for s in model.SCHEMES if not s.network]
REAL = {s.name: s for s in LOCAL}


def run(name: str, workers: int, cores: int = 2000, costs: Any = COSTS, **options: Any) -> Any:
    machine = model.Machine(cores, **options)
    return model.simulate(costs, SCHEMES[name], workers, machine)


@pytest.mark.parametrize("name", REAL)
def test_one_worker_takes_the_sum_of_its_times(name: str) -> None:
    o = run(name, 1)
    assert o.steps_per_second == pytest.approx(ALONE, rel=1e-9)
    assert o.updates_per_second == pytest.approx(ALONE / 100, rel=1e-9)
    assert o.staleness == 0
    more = run(name, 1, costs=replace(COSTS, pull=0.2 * MS, other=0.8 * MS))
    assert more.steps_per_second == pytest.approx(100 / (6 * MS), rel=1e-9)


@pytest.mark.parametrize("name", REAL)
def test_a_spread_of_rollouts_leaves_the_mean(name: str) -> None:
    o = model.simulate(replace(COSTS, spread=SPREAD), SCHEMES[name], 1, model.Machine(1), rollouts=4000)
    assert o.steps_per_second == pytest.approx(ALONE, rel=0.02)


@pytest.mark.parametrize("workers", [40, 200])
def test_lock_saturates_at_one_update_each_apply(workers: int) -> None:
    o = run("lock", workers)
    assert o.updates_per_second == pytest.approx(1 / (0.5 * MS), rel=1e-3)
    assert o.busy == pytest.approx(1, abs=1e-3)
    assert o.wait_share == pytest.approx(1 - 5 * MS / (workers * 0.5 * MS), abs=0.01)
    passed = run("lock", workers, costs=replace(COSTS, wake=0.25 * MS))
    assert 0.99 / (0.75 * MS) <= passed.updates_per_second < 1 / (0.5 * MS)  # some come when it has just fallen free


def test_below_saturation_a_lock_costs_little() -> None:
    assert run("lock", 4, costs=replace(COSTS, spread=SPREAD)).steps_per_second > 0.95 * 4 * ALONE


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 64])
def test_staleness_of_lock_and_hogwild_is_the_others_updates(workers: int) -> None:
    """In a turn of one worker every other one makes one update."""
    for name in ("lock", "hogwild", "server"):
        o = run(name, workers, costs=replace(COSTS, spread=SPREAD))
        assert o.staleness == pytest.approx(workers - 1, rel=0.03), name


def test_server_with_quorum_is_stale_by_updates_not_by_gradients() -> None:
    o = run("server, quorum N/2", 64, costs=replace(COSTS, apply=0.01 * MS, spread=SPREAD))
    assert 0.5 < o.staleness < 3
    assert o.updates_per_second == pytest.approx(o.steps_per_second / 100 / 32, rel=0.05)


def test_sync_goes_with_the_slowest() -> None:
    """The greatest of many rollouts is the longest there is; and nothing is stale."""
    costs = replace(COSTS, spread=SPREAD)
    o = run("sync", 256, costs=costs)
    assert o.steps_per_second == pytest.approx(256 * 100 / (1.5 * 4.5 * MS + 0.5 * MS), rel=1e-3)
    assert o.staleness == 0
    assert o.wait_share == pytest.approx((0.5 * 4.5 + 0.5) / (1.5 * 4.5 + 0.5), abs=0.02)
    same = run("sync", 256)
    assert same.steps_per_second == pytest.approx(256 * ALONE, rel=1e-6)


def test_sync_pays_for_every_gradient_of_the_mean() -> None:
    o = run("sync", 11, costs=replace(COSTS, contribution=0.1 * MS, wake=0.3 * MS))
    assert o.steps_per_second == pytest.approx(11 * 100 / (6.3 * MS), rel=0.01)


@pytest.mark.parametrize("cores", [1, 2, 8, 64])
def test_hogwild_is_linear_up_to_the_cores(cores: int) -> None:
    for workers in (1, cores // 2 or 1, cores, 2 * cores, 5 * cores):
        o = run("hogwild", workers, cores)
        assert o.steps_per_second == pytest.approx(min(workers, cores) * ALONE, rel=0.03), workers


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("workers", [3, 16])
def test_no_more_work_is_done_than_there_are_cores_for(name: str, workers: int) -> None:
    costs = replace(COSTS, look=0.01 * MS, spread=SPREAD)
    o = run(name, workers, 2, costs)
    each = 4.5 * MS if name in ("sync", "server, quorum N/2") else 5 * MS  # of several, one pays for the update
    assert o.steps_per_second <= 1.02 * 2 * 100 / each


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("workers", [2, 16, 100])
def test_every_gradient_is_applied_once(name: str, workers: int) -> None:
    """Those that were offered and not applied are at most one of each worker."""
    world = model.World(COSTS, SCHEMES[name], workers, model.Machine(16), 20 * workers, 0)
    world.env.run(until=world.over)
    taken = world.updates * (workers if name == "sync" else SCHEMES[name].quorum(workers))
    assert world.applied == taken
    assert abs(world.applied - world.gradients) <= workers
    assert world.gradients >= 20 * workers - workers


def test_load_and_contention_slow_everything_down() -> None:
    assert run("hogwild", 4, 2, load=0.5).steps_per_second == pytest.approx(1.5 * ALONE, rel=0.02)
    assert run("hogwild", 2, 2, stretch=1.25).steps_per_second == pytest.approx(2 * ALONE / 1.25, rel=0.02)
    assert run("hogwild", 1, 2, stretch=1.25).steps_per_second == pytest.approx(ALONE, rel=1e-6)


def test_server_is_bound_by_its_own_work_and_by_its_link() -> None:
    costs = replace(COSTS, look=0.01 * MS)
    o = run("server", 100, costs=costs)
    assert o.updates_per_second == pytest.approx(1 / (0.5 * MS + 100 * 0.01 * MS), rel=0.01)
    link = {"bandwidth": 1e6, "latency": 1e-4}
    costs = replace(COSTS, bytes_down=2000, bytes_up=1000)
    bound = run("server over network", 100, costs=costs, **link)
    assert bound.updates_per_second == pytest.approx(1e6 / 2000, rel=0.01)
    one = run("server over network", 1, costs=costs, **link)
    assert one.steps_per_second == pytest.approx(100 / (5 * MS + 3 * MS + 0.2 * MS), rel=1e-6)
    fewer = replace(costs, bytes_up=10)
    assert run("server over network", 1, costs=fewer, **link).steps_per_second > one.steps_per_second


@pytest.mark.parametrize("name", REAL)
def test_the_same_seed_gives_the_same_outcome(name: str) -> None:
    costs, machine = replace(COSTS, spread=SPREAD), model.Machine(4)
    first, again = (model.simulate(costs, SCHEMES[name], 8, machine, seed=3) for _ in range(2))
    assert first == again
    assert model.simulate(costs, SCHEMES[name], 8, machine, seed=4) != first


def test_where_a_rule_stops_scaling() -> None:
    """Lock: 2,000 updates/s for N workers that could do 200 each: half from N = 20 on."""
    roomy = lambda n: model.Machine(n + 2)  # noqa: E731
    assert model.stops_at(COSTS, SCHEMES["lock"], roomy) == pytest.approx(20, abs=1)
    assert model.stops_at(COSTS, SCHEMES["hogwild"], roomy) is None


def test_the_report_from_kept_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables for both networks, and an error for what was measured; nothing is run."""
    one = {"samples": 100.0, "collect": 3 * MS, "gradient": 1.5 * MS, "apply": 0.5 * MS, "pull": 0.0, "other": 0.0}
    each = {s.name: one for s in model.SCHEMES}
    measured = {"scheme": "lock", "wait_share": 0.0, "staleness": 0.0, "others": 0.0}
    times = {
        "env": "CartPole-v1", "cores": 2, "stretch": 1.0, "slice": 3 * MS, "spread": [1.0], "parent": 0.0,
        "others": 0.0, "costs": each, "big": each, "parameters": 1_700_000, "seconds": 2.0,
        "measured": [
            {**measured, "workers": 1, "steps_per_second": ALONE, "repeats": [ALONE]},
            {**measured, "workers": 2, "steps_per_second": 1.6 * ALONE, "repeats": [ALONE, 1.6 * ALONE]},
        ],
    }  # fmt: skip
    options = SimpleNamespace(workers=[1, 2], cores=[4], bandwidth=10.0, latency=50.0, env="CartPole-v1")
    searched = lambda costs, scheme, machine: None if scheme.update == "hogwild" else machine(1).cores  # noqa: E731
    monkeypatch.setattr(script, "stops_at", searched)  # tested above, and slow
    monkeypatch.setattr(script, "LIMIT", 16)
    monkeypatch.setattr(script, "simulate", partial(model.simulate, rollouts=100))
    page, values = script.report(json.loads(json.dumps(times)), options)
    text = "\n".join(page)
    assert "within 20% (the target): 0 of 1" in text
    assert values["validation"][1]["error"] == pytest.approx(0.25, abs=0.02)
    assert abs(values["validation"][0]["error"]) < 1e-6
    assert "- lock: from about 3 workers on" in text
    assert "1,700,000 parameters, 4 cores" in text
    assert set(values["predicted"]) == {"costs 2", "costs 4", "big 2", "big 4"}
    assert values["stops_at"]["costs"]["hogwild"] is None
    json.dumps(values)
