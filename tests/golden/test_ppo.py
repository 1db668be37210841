"""PPO's loss against its definition as plain loops; its minibatches; what it has in common with A3C."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_a3c import CASES, log_prob_and_entropy

import helpers
from slipstream.algos import a3c
from slipstream.algos.ppo import Hyperparameters, learning_rate, loss, minibatch, prepare, too_far

HORIZON = 1000


def made(head="categorical", core="none", masks=False, T=6, B=5, seed=0):
    policy, flat, gradient = helpers.network(helpers.HEADS[head], core=core, seed=seed)
    return policy, flat, gradient, helpers.random_rollout(policy, T, B, seed, masks)


def by_loops(hyper, policy, batch, beta):
    """Terms of the loss over every valid row, as the papers define them."""
    with torch.no_grad():
        (params, value), _ = policy(*(torch.from_numpy(batch[k]) for k in ("obs", "state", "starts")))
    params, value = params.double().numpy(), value.double().numpy()
    rows = [(t, b) for t, b in np.ndindex(batch["valid"].shape) if batch["valid"][t, b]]
    seen = [float(batch["advantage"][r]) for r in rows]
    mean = sum(seen) / len(seen)
    spread = math.sqrt(sum((a - mean) ** 2 for a in seen) / len(seen)) + 1e-8
    out = dict.fromkeys(("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"), 0.0)
    for r in rows:
        mask = batch["mask"][r] if "mask" in batch else None
        logp, h = log_prob_and_entropy(policy.head, params[r], batch["action"][r], mask)
        a = (float(batch["advantage"][r]) - mean) / spread if hyper.normalize_advantages else batch["advantage"][r]
        ratio = math.exp(logp - batch["log_prob"][r])
        held = min(max(ratio, 1 - hyper.clip_range), 1 + hyper.clip_range)
        old, target = float(batch["value"][r]), float(batch["target"][r])
        error = (value[r] - target) ** 2
        if hyper.value_clip:
            near = old + min(max(value[r] - old, -hyper.value_clip), hyper.value_clip)
            error = max(error, (near - target) ** 2)
        out["policy_loss"] -= min(ratio * a, held * a) / len(rows)
        out["value_loss"] += 0.5 * error / len(rows)
        out["entropy"] += h / len(rows)
        out["approx_kl"] += (ratio - 1 - math.log(ratio)) / len(rows)
        out["clip_fraction"] += (abs(ratio - 1) > hyper.clip_range) / len(rows)
    out["loss"] = out["policy_loss"] - beta * out["entropy"] + hyper.value_coefficient * out["value_loss"]
    return out


@pytest.mark.parametrize(("head", "core", "masks"), CASES)
@pytest.mark.parametrize(("normalize", "value_clip"), [(True, 0.0), (False, 0.1)])
def test_the_loss_is_its_definition(head, core, masks, normalize, value_clip):
    """Also after the weights have moved, when ratios are not 1 and some are clipped."""
    hyper = Hyperparameters(
        minibatches=2, entropy=0.03, normalize_advantages=normalize, value_clip=value_clip, clip_range=0.05
    )
    policy, flat, _, rollout = made(head, core, masks)
    data = prepare(hyper, policy, rollout, np.random.default_rng(0))
    flat += 0.1 * np.random.default_rng(1).standard_normal(flat.shape).astype(np.float32)
    clipped = 0.0
    for part in range(2):
        batch = minibatch(data, part)
        _, terms = loss(hyper, policy, batch, 100, HORIZON)
        for name, value in by_loops(hyper, policy, batch, 0.03).items():
            assert terms[name] == pytest.approx(value, abs=2e-4, rel=2e-4), name
        clipped += terms["clip_fraction"]
    assert clipped > 0


@pytest.mark.parametrize(("head", "core", "masks"), CASES)
def test_its_first_gradient_is_that_of_a3c(head, core, masks):
    """Before the weights have moved every ratio is 1: the gradients of both are one, to rounding."""
    common = {
        "gamma": 0.97,
        "gae_lambda": 0.9,
        "entropy": 0.02,
        "value_coefficient": 0.4,
        "normalize_advantages": False,
    }
    policy, _, gradient, rollout = made(head, core, masks)
    hyper = Hyperparameters(minibatches=1, **common)
    data = prepare(hyper, policy, rollout, np.random.default_rng(0))
    found = []
    for module, h, batch in ((a3c, a3c.Hyperparameters(**common), rollout), (None, hyper, minibatch(data, 0))):
        gradient[:] = 0
        total, terms = (module.loss if module else loss)(h, policy, batch, 0, HORIZON)
        total.backward()
        found.append(gradient.copy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert terms["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert terms["clip_fraction"] == 0


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("parts", [1, 3, 4, 100])
def test_each_epoch_goes_over_every_valid_row_once(core, parts):
    hyper = Hyperparameters(epochs=3, minibatches=parts)
    policy, _, _, rollout = made(core=core, T=7, B=5)
    data = prepare(hyper, policy, rollout, np.random.default_rng(3))
    each = len(data["order"]) // 3
    assert each == min(parts, 5 if core == "lstm" else rollout.samples)
    orders = []
    for epoch in range(3):
        batches = [minibatch(data, epoch * each + i) for i in range(each)]
        sizes = [int(b["valid"].sum()) for b in batches]
        assert sum(sizes) == rollout.samples
        if core == "none":
            assert max(sizes) - min(sizes) <= 1
        else:
            assert all(len(b["obs"]) == 7 for b in batches)  # whole columns, each with its state
        rows = np.concatenate([b["advantage"][b["valid"]] for b in batches])
        np.testing.assert_array_equal(np.sort(rows), np.sort(data["advantage"][data["valid"]]))
        orders.append(rows)
    assert not np.array_equal(orders[0], orders[1])  # a new order each time


def test_prepared_data_outlive_the_rollout():
    """The collector overwrites its memory while minibatches are still being cut."""
    for core in ("none", "lstm"):
        hyper = Hyperparameters(minibatches=2)
        policy, _, _, rollout = made(core=core)
        data = prepare(hyper, policy, rollout, np.random.default_rng(0))
        before = loss(hyper, policy, minibatch(data, 1), 0, HORIZON)[1]
        for value in vars(rollout).values():
            if isinstance(value, np.ndarray) and value.dtype != bool:
                value[...] = 7
        assert loss(hyper, policy, minibatch(data, 1), 0, HORIZON)[1] == pytest.approx(before, nan_ok=True)


def test_the_clip_stops_the_gradient_only_where_it_should():
    """Ratio beyond the clip with a positive advantage: no policy gradient; on the side that is worse: there is."""
    hyper = Hyperparameters(normalize_advantages=False, value_coefficient=0.0, epochs=1, minibatches=1)
    for moved, advantage, stopped in [(0.5, 1.0, True), (-0.5, 1.0, False), (0.5, -1.0, False), (-0.5, -1.0, True)]:
        policy, _, gradient, rollout = made(T=1, B=1)
        rollout.valid[:] = True
        batch = minibatch(prepare(hyper, policy, rollout, np.random.default_rng(0)), 0)
        batch["log_prob"] = batch["log_prob"] - np.float32(moved)  # now the ratio is exp(moved)
        batch["advantage"] = np.full_like(batch["advantage"], advantage)
        gradient[:] = 0
        loss(hyper, policy, batch, 0, HORIZON)[0].backward()
        assert (np.abs(gradient).max() == 0) == stopped, (moved, advantage)


def test_one_row_and_equal_advantages_are_finite():
    hyper = Hyperparameters(minibatches=1000)
    policy, _, gradient, rollout = made(T=3, B=2)
    rollout.reward[:] = 0
    data = prepare(hyper, policy, rollout, np.random.default_rng(0))
    data["advantage"][:] = 2.5
    for part in range(len(data["order"])):
        gradient[:] = 0
        total, terms = loss(hyper, policy, minibatch(data, part), 0, HORIZON)
        total.backward()
        assert np.isfinite(gradient).all()
        assert math.isfinite(terms["loss"])


def test_a_rollout_of_resets_alone():
    """No valid row: no minibatch with rows, nothing to learn, nothing that is not finite."""
    hyper = Hyperparameters()
    policy, _, gradient, rollout = made(T=2, B=2)
    rollout.valid[:] = False
    data = prepare(hyper, policy, rollout, np.random.default_rng(0))
    for part in range(len(data["order"])):
        gradient[:] = 0
        total, _ = loss(hyper, policy, minibatch(data, part), 0, HORIZON)
        total.backward()
        assert np.isfinite(gradient).all()


def test_schedules_and_the_stop():
    hyper = Hyperparameters(learning_rate=1.0, target_kl=0.02)
    assert [learning_rate(hyper, s, 100) for s in (0, 50, 100, 200)] == [1.0, 0.5, 0.0, 0.0]
    assert not too_far(hyper, {"approx_kl": 0.03})
    assert too_far(hyper, {"approx_kl": 0.031})
    assert not too_far(Hyperparameters(), {"approx_kl": 9.0})
