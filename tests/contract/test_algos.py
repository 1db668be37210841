"""What every file of algos/ must offer. They are found by listing: a new one is tested unasked."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import helpers
from slipstream import config
from slipstream.config import from_dict
from slipstream.errors import ConfigError

ALGORITHMS = config.names("algos")
HORIZON = 1000
NETS = [
    (head, core, masks)
    for head in helpers.HEADS
    for core in ("none", "lstm")
    for masks in ((False, True) if head != "gaussian" else (False,))
]

pytestmark = pytest.mark.parametrize("name", ALGORITHMS)


def gradient(name, hyper, head="categorical", core="none", masks=False, seed=0, change=lambda r: None):
    """(loss, terms, flat gradient) of one random rollout."""
    policy, _, flat = helpers.network(helpers.HEADS[head], core=core, seed=seed)
    rollout = helpers.random_rollout(policy, 8, 3, seed, masks)
    change(rollout)
    flat[:] = 0
    module = config.module("algos", name)
    batch = rollout
    if hasattr(module, "prepare"):  # then the loss is of a part of the rollout
        batch = module.minibatch(module.prepare(hyper, policy, rollout, np.random.default_rng(seed)), 0)
    loss, terms = module.loss(hyper, policy, batch, 100, HORIZON)
    loss.backward()
    return loss, terms, flat


def test_hyper_parameters_are_a_small_frozen_dataclass_that_can_be_checked(name):
    hyper = config.hyperparameters(name)
    assert dataclasses.is_dataclass(hyper)
    assert 0 < len(dataclasses.fields(hyper)) <= 30
    assert hyper.__doc__
    made = hyper()
    made.check()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.learning_rate = 1.0
    assert made.rollout_steps >= 1
    assert 0 <= made.gamma <= 1
    assert made.optimizer in ("adam", "rmsprop", "sgd")
    assert made.max_gradient_norm >= 0
    config.check(from_dict({"algorithm": name}))


def test_values_out_of_range_are_refused_by_name(name):
    hyper = config.hyperparameters(name)
    for f in dataclasses.fields(hyper):
        if isinstance(f.default, bool) or not isinstance(f.default, int | float):
            continue
        for bad in (-1, math.nan) if isinstance(f.default, float) else (-1,):
            with pytest.raises(ConfigError, match=f.name):
                hyper(**{f.name: bad}).check()


@pytest.mark.parametrize(("head", "core", "masks"), NETS)
def test_the_loss_of_random_experience_is_finite_and_has_a_gradient(name, head, core, masks):
    for seed in range(3):
        loss, terms, flat = gradient(name, config.hyperparameters(name)(), head, core, masks, seed)
        assert loss.shape == ()
        assert loss.dtype == torch.float32
        assert terms["loss"] == pytest.approx(loss.item())
        assert {"loss", "policy_loss", "value_loss", "entropy", "explained_variance"} <= terms.keys()
        assert all(type(v) is float for v in terms.values())
        assert np.isfinite([terms[k] for k in terms if k != "explained_variance"]).all()
        assert np.isfinite(flat).all()
        assert np.abs(flat).max() > 1e-5


def test_the_loss_is_a_pure_function_of_its_arguments(name):
    """Nothing of its own is drawn or kept: that is what makes a run replayable. The rollout is not changed."""
    hyper, kept = config.hyperparameters(name)(), {}

    def keep(rollout):
        kept["rollout"] = rollout
        kept["before"] = {k: v.copy() for k, v in vars(rollout).items() if isinstance(v, np.ndarray)}

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    first = gradient(name, hyper, core="lstm", masks=True, change=keep)
    for key, value in kept["before"].items():
        np.testing.assert_array_equal(getattr(kept["rollout"], key), value, err_msg=key)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    second = gradient(name, hyper, core="lstm", masks=True)
    assert first[1] == second[1]
    np.testing.assert_array_equal(first[2], second[2])


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_rewards_of_rows_that_are_not_valid_are_irrelevant(name, core):
    def change(rollout):
        rollout.reward[~rollout.valid] = 1e4

    hyper = config.hyperparameters(name)()
    _, _, expected = gradient(name, hyper, core=core)
    _, _, got = gradient(name, hyper, core=core, change=change)
    np.testing.assert_array_equal(expected, got)


def test_nan_in_the_experience_is_seen_in_the_loss(name):
    """The guard of the worker looks at the loss and at the norm of the gradient."""

    def change(rollout):
        rollout.reward[rollout.valid] = np.nan

    loss, _, flat = gradient(name, config.hyperparameters(name)(), change=change)
    assert not (math.isfinite(loss.item()) and np.isfinite(flat).all())


def test_the_learning_rate_is_a_function_of_global_steps(name):
    module, hyper = config.module("algos", name), config.hyperparameters(name)()
    rates = [module.learning_rate(hyper, s, HORIZON) for s in (0, 500, HORIZON, 10 * HORIZON)]
    assert rates[0] == hyper.learning_rate
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] >= 0
    assert rates[1] == module.learning_rate(hyper, 500, HORIZON)


def test_the_supervising_process_reads_hyper_parameters_without_torch(name):
    code = f"import sys, slipstream.algos.{name}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "False\n"


def test_it_imports_no_rule_no_environment_and_says_what_it_is(name):
    module = config.module("algos", name)
    source = Path(module.__file__).read_text()
    assert "slipstream.rules" not in source
    assert "slipstream.envs" not in source
    assert len(module.__doc__) > 30
    assert len(module.loss.__doc__) > 100
