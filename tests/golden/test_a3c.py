"""The loss of A3C against its definition as two plain loops, and what its gradient must be."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from slipstream.algos.a3c import Hyperparameters, learning_rate, loss
from slipstream.nets.policy import pieces
from slipstream.rollout import Rollout

HORIZON = 1000
CASES = [
    (head, core, masks)
    for head in helpers.HEADS
    for core in ("none", "lstm")
    for masks in (False, True)
    if not (masks and head == "gaussian")
]


def made(head, core="none", masks=False, T=6, B=3, seed=0, **net):
    policy, _, gradient = helpers.network(helpers.HEADS[head], core=core, seed=seed, **net)
    return policy, gradient, helpers.random_rollout(policy, T, B, seed, masks)


def gradient_of(policy, gradient, rollout, hyper=None, steps=0):
    gradient[:] = 0
    total, terms = loss(hyper or Hyperparameters(), policy, rollout, steps, HORIZON)
    total.backward()
    return gradient.copy(), terms


def log_softmax(x):
    top = max(x)
    total = top + math.log(sum(math.exp(v - top) for v in x))
    return [v - total for v in x]


def log_prob_and_entropy(head, params, action, mask):
    """Of one action, in plain Python; masked choices do not exist."""
    if head.kind == "gaussian":
        n = len(head.sizes)
        logp = h = 0.0
        for mean, log_std, a in zip(params[:n], params[n:], action, strict=True):
            logp += -0.5 * ((a - mean) / math.exp(log_std)) ** 2 - log_std - 0.5 * math.log(2 * math.pi)
            h += 0.5 + 0.5 * math.log(2 * math.pi) + log_std
        return logp, h
    logp, h, at = 0.0, 0.0, 0
    for i, n in enumerate(head.sizes):
        legal = [k for k in range(n) if mask is None or mask[at + k]]
        logs = log_softmax([params[at + k] for k in legal])
        logp += logs[legal.index(int(np.ravel(action)[i]))]
        h -= sum(math.exp(x) * x for x in logs)
        at += n
    return logp, h


def by_two_loops(hyper, policy, r: Rollout, beta):
    """The terms of the loss as the paper defines them, over every valid (t, b)."""
    with torch.no_grad():
        (params, value), _ = policy(torch.from_numpy(r.obs), torch.from_numpy(r.state), torch.from_numpy(r.starts))
    params, value = params.double().numpy(), value.double().numpy()
    T, B = r.reward.shape
    advantages, targets = np.zeros((T, B)), np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            weight, a = 1.0, 0.0
            for k in range(t, T):
                if not r.valid[k, b]:
                    break
                after = r.bootstrap[k, b] if r.has_bootstrap[k, b] else value[k + 1, b]
                a += weight * (r.reward[k, b] + hyper.gamma * after * (not r.terminated[k, b]) - value[k, b])
                if r.terminated[k, b] or r.truncated[k, b]:
                    break
                weight *= hyper.gamma * hyper.gae_lambda
            advantages[t, b], targets[t, b] = a, a + value[t, b]
    if hyper.normalize_advantages:
        seen = advantages[r.valid]
        advantages = (advantages - seen.mean()) / (seen.std() + 1e-8)
    policy_loss = value_loss = entropy = 0.0
    for b in range(B):
        for t in range(T):
            if not r.valid[t, b]:
                continue
            mask = None if r.mask is None else r.mask[t, b]
            logp, h = log_prob_and_entropy(policy.head, params[t, b], r.action[t, b], mask)
            policy_loss -= logp * advantages[t, b] / r.samples
            value_loss += 0.5 * (targets[t, b] - value[t, b]) ** 2 / r.samples
            entropy += h / r.samples
    total = policy_loss - beta * entropy + hyper.value_coefficient * value_loss
    return {"loss": total, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


@pytest.mark.parametrize(("head", "core", "masks"), CASES)
@pytest.mark.parametrize("normalize", [False, True])
def test_every_term_equals_the_double_loop(head, core, masks, normalize):
    hyper = Hyperparameters(gamma=0.9, gae_lambda=0.8, entropy=0.3, normalize_advantages=normalize)
    for seed in range(3):
        policy, _, rollout = made(head, core, masks, seed=seed)
        assert 0 < rollout.samples < rollout.valid.size
        total, terms = loss(hyper, policy, rollout, 0, HORIZON)
        expected = by_two_loops(hyper, policy, rollout, 0.3)
        assert total.item() == terms["loss"]
        for name, value in expected.items():
            assert terms[name] == pytest.approx(value, rel=2e-5, abs=2e-5), name
        assert math.isfinite(terms["explained_variance"])


def test_a_loss_worked_out_by_hand():
    """Three actions with logits 0, value 0.5 everywhere; T = 1, reward 1, terminated: A = 0.5, R = 1."""
    policy, gradient, _ = made("categorical", hidden=(4,))
    gradient[:] = 0
    with torch.no_grad():
        for p in policy.parameters():
            p.zero_()
        policy.v.bias.fill_(0.5)
    flags = np.ones((1, 1), bool)
    zeros = np.zeros((1, 1), np.float32)
    rollout = Rollout(
        obs=np.ones((2, 1, 4), np.float32), action=np.array([[1]]), reward=zeros + 1, terminated=flags,
        truncated=~flags, valid=flags, starts=np.zeros((2, 1), bool), bootstrap=zeros, has_bootstrap=~flags,
        state=np.zeros((1, 0), np.float32), samples=1,
    )  # fmt: skip
    total, terms = loss(Hyperparameters(entropy=0.1, value_coefficient=0.5), policy, rollout, 0, HORIZON)
    assert terms["policy_loss"] == pytest.approx(0.5 * math.log(3), rel=1e-6)
    assert terms["value_loss"] == pytest.approx(0.125, rel=1e-6)
    assert terms["entropy"] == pytest.approx(math.log(3), rel=1e-6)
    assert terms["loss"] == pytest.approx(0.5 * math.log(3) - 0.1 * math.log(3) + 0.0625, rel=1e-6)
    total.backward()
    np.testing.assert_allclose(policy.pi.bias.grad, [0.5 / 3, 0.5 / 3 - 0.5, 0.5 / 3], rtol=1e-5)
    np.testing.assert_allclose(policy.v.bias.grad, [-0.25], rtol=1e-5)


@pytest.mark.parametrize(("head", "core", "masks"), CASES)
def test_the_flat_gradient_is_the_sum_over_steps_and_the_concatenation_over_parameters(head, core, masks):
    """One term for each (t, b), advantages held constant, added up parameter by parameter by autograd."""
    hyper = Hyperparameters(gamma=0.9, gae_lambda=0.8, entropy=0.3)
    policy, gradient, r = made(head, core, masks)
    got, _ = gradient_of(policy, gradient, r, hyper)

    alone = copy.deepcopy(policy)
    (params, value), _ = alone(torch.from_numpy(r.obs), torch.from_numpy(r.state), torch.from_numpy(r.starts))
    V = value.detach().numpy()
    sums = [torch.zeros_like(p) for p in alone.parameters()]
    for b in range(r.reward.shape[1]):
        advantage = 0.0
        for t in reversed(range(len(r.reward))):
            if not r.valid[t, b]:
                advantage = 0.0
                continue
            after = r.bootstrap[t, b] if r.has_bootstrap[t, b] else V[t + 1, b]
            delta = r.reward[t, b] + 0.9 * after * (not r.terminated[t, b]) - V[t, b]
            over = r.terminated[t, b] or r.truncated[t, b]
            advantage = float(delta) + 0.72 * (0.0 if over else advantage)
            logp = h = 0.0
            if head == "gaussian":
                d = torch.distributions.Normal(params[t, b, :2], params[t, b, 2:].exp())
                logp, h = d.log_prob(torch.from_numpy(r.action[t, b])).sum(), d.entropy().sum()
            else:
                at = 0
                for i, n in enumerate(policy.head.sizes):
                    legal = np.flatnonzero(r.mask[t, b, at : at + n]) if masks else np.arange(n)
                    d = torch.distributions.Categorical(logits=params[t, b, at + legal])
                    action = int(np.ravel(r.action[t, b])[i])
                    logp = logp + d.log_prob(torch.tensor(int(np.flatnonzero(legal == action)[0])))
                    h, at = h + d.entropy(), at + n
            target = advantage + float(V[t, b])
            term = -logp * advantage - 0.3 * h + 0.5 * 0.5 * (target - value[t, b]) ** 2
            parts = torch.autograd.grad(
                term / r.samples, list(alone.parameters()), retain_graph=True, allow_unused=True
            )
            for total, part in zip(sums, parts, strict=True):
                total += 0 if part is None else part
    for place, total in zip(pieces(policy)[0], sums, strict=True):
        part = got[place.offset : place.offset + total.numel()]
        np.testing.assert_allclose(part, total.numpy().ravel(), atol=2e-6, rtol=2e-4, err_msg=place.name)
        got[place.offset : place.offset + total.numel()] = 0
    assert not got.any()  # the padding


@settings(max_examples=20)
@given(st.sampled_from(CASES), st.integers(0, 1000))
def test_what_stands_in_invalid_rows_changes_neither_loss_nor_gradient(case, seed):
    head, core, masks = case
    policy, gradient, rollout = made(head, core, masks, seed=seed)
    # an invalid row's own observation is what the row before it bootstraps from; here nothing does
    before = np.zeros_like(rollout.valid)
    before[:-1] = ~rollout.valid[1:]
    rollout.terminated |= before
    rollout.starts[1:] |= before
    hyper = Hyperparameters(normalize_advantages=bool(seed % 2))
    expected, terms = gradient_of(policy, gradient, rollout, hyper)
    rng, invalid = np.random.default_rng(seed), ~rollout.valid
    rollout.starts[1:] |= invalid
    for name in ("reward", "bootstrap"):
        getattr(rollout, name)[invalid] = 1e3
    rollout.obs[:-1][invalid] = rng.normal(size=(int(invalid.sum()), 4)) * 10
    rollout.terminated[invalid] ^= True
    rollout.has_bootstrap[invalid] ^= True
    rollout.action[invalid] = 1
    if masks:
        rollout.mask[invalid] = False
    changed, after = gradient_of(policy, gradient, rollout, hyper)
    assert after == pytest.approx(terms, rel=1e-6, abs=1e-7, nan_ok=True)
    np.testing.assert_allclose(changed, expected, rtol=1e-5, atol=1e-7)


def test_a_final_observation_counts_only_where_a_time_limit_cut():
    """Row 2 is a reset; its observation is the final one of the episode that ended in row 1."""
    policy, gradient, r = made("categorical", T=4, B=1)
    for flags in (r.terminated, r.truncated, r.has_bootstrap):
        flags[:] = False
    r.valid[:], r.valid[2], r.starts[:], r.starts[3], r.samples = True, False, False, True, 3
    losses = {}
    for ends in ("terminated", "truncated"):
        r.terminated[1], r.truncated[1] = ends == "terminated", ends == "truncated"
        for shift in (0, 5):
            r.obs[2] += shift
            losses[ends, shift] = gradient_of(policy, gradient, r)[1]["loss"]
            r.obs[2] -= shift
    assert losses["terminated", 0] == losses["terminated", 5]
    assert abs(losses["truncated", 0] - losses["truncated", 5]) > 1e-3


def test_masked_logits_have_no_gradient():
    policy, gradient, rollout = made("categorical", masks=True)
    rollout.mask[..., 2] = False
    rollout.action[rollout.action == 2] = 0
    rollout.mask[..., 0] = True
    gradient_of(policy, gradient, rollout, Hyperparameters(entropy=0.3))
    assert not policy.pi.weight.grad[2].any()
    assert policy.pi.bias.grad[2] == 0
    assert policy.pi.weight.grad[0].any()


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("workers", [2, 3])
def test_the_weighted_mean_of_workers_is_the_gradient_of_one_that_has_all_their_rows(core, workers):
    policy, gradient, whole = made("categorical", core, masks=True, T=8, B=2 * workers)
    hyper = Hyperparameters(gamma=0.9, gae_lambda=0.9, entropy=0.1)
    expected, _ = gradient_of(policy, gradient, whole, hyper)
    mean, counts = np.zeros_like(expected), []
    for w in range(workers):
        cols = slice(2 * w, 2 * w + 2)
        part = {
            f.name: getattr(whole, f.name)[cols] if f.name == "state" else getattr(whole, f.name)[:, cols]
            for f in dataclasses.fields(whole)
            if isinstance(getattr(whole, f.name), np.ndarray) and f.name != "moments"
        }
        rollout = Rollout(**part, samples=int(part["valid"].sum()))
        counts.append(rollout.samples)
        mean += gradient_of(policy, gradient, rollout, hyper)[0] * np.float32(rollout.samples / whole.samples)
    assert len(set(counts)) > 1, "the weights must matter"
    np.testing.assert_allclose(mean, expected, atol=1e-5, rtol=1e-4)
    assert np.abs(expected).max() > 1e-3


@pytest.mark.parametrize(
    ("shape", "schedule_steps", "steps", "share"),
    [
        ("constant", 0, 900, 1.0),
        ("linear", 0, 0, 1.0),
        ("linear", 0, 250, 0.75),
        ("linear", 0, 2000, 0.0),
        ("linear", 500, 250, 0.5),
        ("cosine", 0, 500, 0.5),
    ],
)
def test_entropy_and_learning_rate_fall_over_global_steps(shape, schedule_steps, steps, share):
    hyper = Hyperparameters(
        entropy=0.4, entropy_schedule=shape, learning_rate=0.01, learning_rate_schedule=shape,
        schedule_steps=schedule_steps,
    )  # fmt: skip
    policy, _, rollout = made("categorical")
    _, terms = loss(hyper, policy, rollout, steps, HORIZON)
    without = terms["policy_loss"] + 0.5 * terms["value_loss"]
    assert without - terms["loss"] == pytest.approx(0.4 * share * terms["entropy"], abs=1e-6)
    assert learning_rate(hyper, steps, HORIZON) == pytest.approx(0.01 * share)


def test_the_advantage_is_a_constant_for_the_policy_and_the_target_for_the_value():
    """With value_coefficient 0 the value head learns nothing."""
    policy, gradient, rollout = made("categorical")
    gradient_of(policy, gradient, rollout, Hyperparameters(value_coefficient=0.0, entropy=0.0))
    assert not policy.v.weight.grad.any()
    assert all(not p.grad.any() for p in policy.value_torso.parameters())
    assert policy.pi.weight.grad.any()


def test_normalized_advantages_do_not_depend_on_the_scale_of_rewards():
    hyper = Hyperparameters(normalize_advantages=True, value_coefficient=0.0, entropy=0.0)
    policy, gradient, rollout = made("categorical")
    with torch.no_grad():
        policy.v.weight.zero_()
        policy.v.bias.zero_()
    rollout.bootstrap[:] = 0
    first, _ = gradient_of(policy, gradient, rollout, hyper)
    rollout.reward *= 100
    second, _ = gradient_of(policy, gradient, rollout, hyper)
    np.testing.assert_allclose(first, second, atol=1e-6)
