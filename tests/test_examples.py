"""The five examples run and do what they say; a3c_one_file.py is the oracle of one worker, step for step."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import slipstream as ss
from slipstream import build, config, record
from slipstream.config import Given
from slipstream.store import Segment, Store, initialize
from slipstream.worker import Worker

EXAMPLES = Path(__file__).parents[1] / "examples"


def script(name: str, directory: Path, *options: str) -> str:
    """Run an example in an empty directory and return what it printed."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_every_example_is_run_by_a_test() -> None:
    here = Path(__file__).read_text()
    names = sorted(f.name for f in EXAMPLES.glob("*.py"))
    assert len(names) == 5
    for name in names:
        assert f'"{name}"' in here, name
        module = (EXAMPLES / name).read_text()
        assert f"Run it with: python examples/{name}" in module.split('"""')[1], f"{name} does not say how to run it"


def test_train_and_use(tmp_path: Path) -> None:
    said = script("train_and_use.py", tmp_path, "--total-steps", "8000", "--run", "one")
    steps = int(re.search(r"trained for (\d+) steps", said)[1])
    assert 8000 <= steps == summary(tmp_path / "one")["steps"]
    total = int(re.search(r"one episode: return (\d+)", said)[1])
    assert 8 <= total <= 500
    episodes, mean = re.search(r"(\d+) episodes: mean return ([\d.]+)", said).groups()
    assert int(episodes) == 20
    assert float(mean) > 30  # random play gets 22


def test_own_environment(tmp_path: Path) -> None:
    said = script("own_environment.py", tmp_path, "--total-steps", "10000", "--run", "one")
    trained, random = (float(x) for x in re.search(r"mean return (\S+); random pushes (\S+)", said).groups())
    assert random < -20
    assert trained > random / 2
    saved = config.load(tmp_path / "one" / "config.yaml")
    assert saved.env == "Parking"
    assert saved.env_kwargs == {"limit": 50}


def test_own_network(tmp_path: Path) -> None:
    said = script("own_network.py", tmp_path, "--total-steps", "6000", "--run", "one")
    low, high = (float(x) for x in re.search(r"are now ([\d.]+) to ([\d.]+)", said).groups())
    assert low < 0.999 < 1.001 < high, "the torso's own parameters were not trained"
    parts = json.loads((tmp_path / "one" / "parts.json").read_text())[0]
    assert [p[0] for p in parts["parts"]["pieces"]][:4] == [
        "torso.layers.0.weight",
        "torso.layers.0.bias",
        "torso.layers.1.weight",
        "torso.layers.1.bias",
    ]


def test_compare_rules(tmp_path: Path) -> None:
    said = script("compare_rules.py", tmp_path, "--total-steps", "5000", "--run", "rules")
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines()[1:]}
    assert list(rows) == ["lock", "hogwild", "sync"]
    for rule, (rate, updates, staleness, _, waiting, _) in rows.items():
        s = summary(tmp_path / "rules" / rule)
        assert s["update"] == rule
        assert s["steps"] >= 5000
        assert int(updates) == s["updates"] > 0
        assert float(rate) > 100
        assert float(waiting.rstrip("%")) == pytest.approx(100 * s["wait_share"], abs=0.06)
        assert float(staleness) == pytest.approx(s["staleness_mean"], abs=0.006)
    assert float(rows["sync"][2]) == 0  # nobody updates between a pull and the round it belongs to
    assert float(rows["lock"][2]) > 0
    assert int(rows["sync"][1]) < 0.7 * int(rows["lock"][1])  # one update a round of both workers
    assert float(rows["hogwild"][4].rstrip("%")) == 0  # no lock to wait for


def test_a3c_one_file_runs_and_learns(tmp_path: Path) -> None:
    said = script("a3c_one_file.py", tmp_path, "--total-steps", "9000")
    lines = [re.match(r"update (\d+)  steps (\d+)  return ([\d.]+)", line) for line in said.splitlines()]
    updates, steps, returns = zip(*((int(m[1]), int(m[2]), float(m[3])) for m in lines), strict=True)
    assert updates[0] == 50
    assert steps[-1] >= 9000 > steps[-2]
    assert updates[-1] < 9000 / 112  # 128 rows a rollout, less the resets
    assert returns[-1] > returns[0] > 25


# -- the oracle ------------------------------------------------------------------------------------

# Rewards, truncations (episodes of 120 steps at most), resets and every term of the loss take part. The learning
# rate is a third of the preset's: at 4e-3 rounding errors of 1e-7 grow tenfold every 40 updates.
SETTINGS = {"seed": 11, "total_steps": 16_000, "learning_rate": 1e-3, "entropy": 0.01, "max_episode_steps": 120}


@pytest.fixture(scope="module")
def oracle() -> tuple[list[Any], torch.nn.Module]:
    """Every update of a3c_one_file.py under SETTINGS, and the model at the end."""
    one = load_example()
    model = one.ActorCritic(SETTINGS["seed"])
    return list(one.train(one.Settings(**SETTINGS), model)), model


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("a3c_one_file", EXAMPLES / "a3c_one_file.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["a3c_one_file"] = module
    spec.loader.exec_module(module)
    return module


def same_run() -> dict[str, Any]:
    """SETTINGS as those of a run; what is not named there is the preset's on both sides."""
    return {
        "seed": SETTINGS["seed"],
        "workers": 1,
        "total_steps": SETTINGS["total_steps"],
        "target_return": None,
        "env_kwargs": {"max_episode_steps": SETTINGS["max_episode_steps"]},
        "algo": {"learning_rate": SETTINGS["learning_rate"], "entropy": SETTINGS["entropy"]},
    }


def test_the_oracle_imports_nothing_of_ours() -> None:
    tree = ast.parse((EXAMPLES / "a3c_one_file.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.split(".")[0] for n in names} - sys.stdlib_module_names == {"torch", "numpy", "gymnasium"}


def test_oracle_settings_are_the_preset() -> None:
    ours = config.check(config.from_dict({"env": "CartPole-v1", **config.preset("CartPole-v1")}))
    theirs = load_example().Settings()
    assert theirs.copies == ours.copies
    for name in vars(theirs):
        if hasattr(ours.algo, name):
            assert getattr(theirs, name) == getattr(ours.algo, name), name


def test_one_worker_matches_the_oracle_action_by_action(tmp_path: Path, oracle: Any) -> None:
    updates, model = oracle
    base = config.from_dict({"env": "CartPole-v1", **config.preset("CartPole-v1")})
    run = config.check(config.from_dict(same_run(), base))
    layout, weights, _ = build.layout(run, Given())
    segment = Segment.create(layout.regions()[1], [str(tmp_path)])
    initialize(segment.path, layout, weights)
    store = Store(segment.path, 0)
    worker = Worker(run, Given(), 0, 0, store.row, lambda *a, **k: None, tmp_path / "bad")
    rule = build.rule(run, store, worker.env)
    truncated = 0
    for number, theirs in enumerate(updates):
        rule.pull(worker.snapshot)
        contribution, rollout = worker.compute()
        np.testing.assert_array_equal(rollout.action, theirs.actions, err_msg=f"update {number}")
        np.testing.assert_array_equal(rollout.reward, theirs.rewards, err_msg=f"update {number}")
        np.testing.assert_array_equal(rollout.obs, theirs.obs, err_msg=f"update {number}")
        assert contribution.loss == pytest.approx(theirs.loss, abs=1e-4, rel=1e-5), number
        assert contribution.norm == pytest.approx(theirs.norm, abs=1e-4, rel=1e-5), number
        assert worker.algorithm.learning_rate(run.algo, worker.snapshot.steps, run.total_steps) == pytest.approx(
            theirs.learning_rate
        )
        truncated += int(rollout.truncated.sum())
        rule.push(contribution)
        assert store.current.steps == theirs.steps
    assert len(updates) >= 100
    assert truncated > 10, "no episode was cut: the run does not show what it should"
    rule.pull(worker.snapshot)
    compare(worker.policy, model)
    store.close()
    segment.close()


def test_a_run_of_one_worker_matches_the_oracle(tmp_path: Path, oracle: Any) -> None:
    updates, model = oracle
    result = ss.train("CartPole-v1", run=tmp_path / "one", show="none", **same_run())
    entries = record.read(tmp_path / "one" / "schedule.bin")
    assert len(entries) == len(updates) == result.updates
    assert entries["steps"].tolist() == [u.steps for u in updates]
    np.testing.assert_allclose(entries["loss"], [u.loss for u in updates], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(entries["norm"], [u.norm for u in updates], rtol=1e-5, atol=1e-4)
    compare(ss.load(result).network, model)


def compare(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Equal to 1e-5, parameter by parameter, and far from where training began."""
    start = load_example().ActorCritic(SETTINGS["seed"])
    moved = 0.0
    for p, q, begun in zip(ours.parameters(), theirs.parameters(), start.parameters(), strict=True):
        np.testing.assert_allclose(p.detach().numpy(), q.detach().numpy(), rtol=0, atol=1e-5)
        moved = max(moved, float((q - begun).detach().abs().max()))
    assert moved > 0.02
