"""Log-probabilities, entropies and samples against torch.distributions, plain loops and counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, Normal

from slipstream.actions import Head, mode, sample
from slipstream.nets.heads import log_prob_and_entropy

SEEDS = st.integers(0, 2**32 - 1)
ONE = Head("categorical", (4,))


def generator(seed):
    return torch.Generator().manual_seed(seed % 2**63)


@given(SEEDS, st.integers(1, 5), st.floats(0, 20))
def test_categorical_equals_torch_and_a_plain_loop(seed, B, spread):
    logits = torch.randn(3, B, 4, generator=generator(seed)) * spread
    action = torch.randint(0, 4, (3, B), generator=generator(seed + 1))
    logp, entropy = log_prob_and_entropy(ONE, logits, action)
    reference = Categorical(logits=logits)
    torch.testing.assert_close(logp, reference.log_prob(action), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, reference.entropy(), atol=1e-5, rtol=1e-5)
    for t in range(3):
        for b in range(B):
            x = [float(v) for v in logits[t, b]]
            total = max(x) + math.log(sum(math.exp(v - max(x)) for v in x))
            p = [math.exp(v - total) for v in x]
            assert logp[t, b].item() == pytest.approx(x[action[t, b]] - total, abs=1e-4)
            h = -sum(q * math.log(q) for q in p if q > 0)
            assert entropy[t, b].item() == pytest.approx(h, abs=1e-4)


@given(SEEDS)
def test_several_choices_are_the_sum_of_each(seed):
    head = Head("multi", (3, 2, 4))
    params = torch.randn(5, 2, 9, generator=generator(seed)) * 3
    action = torch.stack([torch.randint(0, n, (5, 2), generator=generator(seed + n)) for n in head.sizes], -1)
    logp, entropy = log_prob_and_entropy(head, params, action)
    parts = [Categorical(logits=x) for x in params.split(head.sizes, -1)]
    torch.testing.assert_close(logp, sum(d.log_prob(action[..., i]) for i, d in enumerate(parts)))
    torch.testing.assert_close(entropy, sum(d.entropy() for d in parts))


@given(SEEDS, st.integers(1, 3))
def test_gaussian_equals_torch(seed, n):
    head = Head("gaussian", (1,) * n)
    params = torch.randn(5, 2, 2 * n, generator=generator(seed))
    action = torch.randn(5, 2, n, generator=generator(seed + 1)) * 5  # far outside any bounds: raw samples
    logp, entropy = log_prob_and_entropy(head, params, action)
    reference = Normal(params[..., :n], params[..., n:].exp())
    torch.testing.assert_close(logp, reference.log_prob(action).sum(-1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy, reference.entropy().sum(-1))


def test_gaussian_by_hand():
    """N(1, e^0.5): at its mean log p = -0.5 - log(2 pi)/2."""
    logp, entropy = log_prob_and_entropy(Head("gaussian", (1,)), torch.tensor([[1.0, 0.5]]), torch.tensor([[1.0]]))
    assert logp.item() == pytest.approx(-0.5 - 0.918939, abs=1e-5)
    assert entropy.item() == pytest.approx(0.5 + 1.418939, abs=1e-5)


# -- masks -----------------------------------------------------------------------------------------


@given(SEEDS)
def test_masked_actions_have_no_probability_no_entropy_and_no_gradient(seed):
    rng = np.random.default_rng(seed)
    mask = torch.from_numpy(rng.random((6, 4)) < 0.5)
    action = torch.from_numpy(rng.integers(0, 4, 6))
    mask[torch.arange(6), action] = True
    logits = torch.from_numpy(rng.normal(size=(6, 4)) * 10).float().requires_grad_()
    logp, entropy = log_prob_and_entropy(ONE, logits, action, mask)
    for i in range(6):
        alone = Categorical(logits=logits.detach()[i][mask[i]])
        torch.testing.assert_close(logp[i].detach(), alone.log_prob(mask[i, : action[i]].sum()), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(entropy[i].detach(), alone.entropy(), atol=1e-5, rtol=1e-4)
    (logp.sum() + 0.1 * entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask] == 0).all()


def test_one_legal_action_has_entropy_0_and_finite_gradients():
    logits = torch.tensor([[3.0, -1.0, 2.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[False, True, False, False]])
    logp, entropy = log_prob_and_entropy(ONE, logits, torch.tensor([1]), mask)
    assert logp.item() == entropy.item() == 0
    (logp + entropy).sum().backward()
    assert (logits.grad == 0).all()


def test_no_legal_action_is_not_nan():
    """Only in rows that are not valid: an episode's last state may allow nothing."""
    logits = torch.randn(1, 4, generator=generator(0), requires_grad=True)
    logp, entropy = log_prob_and_entropy(ONE, logits, torch.tensor([1]), torch.zeros(1, 4, dtype=torch.bool))
    (logp + entropy).sum().backward()
    assert torch.isfinite(torch.cat([logp, entropy, logits.grad[0]])).all()


def test_entropy_where_a_probability_is_0():
    logits = torch.tensor([[0.0, -1000.0, 1000.0]], requires_grad=True)
    logp, entropy = log_prob_and_entropy(Head("categorical", (3,)), logits, torch.tensor([2]))
    assert entropy.item() == pytest.approx(0, abs=1e-6)
    assert logp.item() == 0
    (entropy + logp).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_each_of_several_choices_has_its_own_part_of_the_mask():
    head = Head("multi", (3, 2))
    mask = torch.tensor([[True, True, False, False, True]])
    logp, entropy = log_prob_and_entropy(head, torch.zeros(1, 5), torch.tensor([[0, 1]]), mask)
    assert logp.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))
    drawn = sample(head, np.zeros((500, 5), np.float32), np.random.default_rng(0), mask.numpy().repeat(500, 0))
    assert set(map(tuple, drawn.tolist())) == {(0, 1), (1, 1)}


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "params", "action"),
    [
        (ONE, (5, 4), (5, 1)),
        (ONE, (5, 1, 4), (5,)),
        (ONE, (5, 4), (1,)),
        (Head("multi", (2, 2)), (5, 4), (5, 1, 2)),
        (Head("multi", (2, 2)), (5, 4), (5,)),
        (Head("multi", (2, 2)), (5, 4), (5, 3)),
        (Head("gaussian", (1,)), (5, 2), (5,)),
        (Head("gaussian", (1,)), (5, 2), (5, 1, 1)),
        (Head("gaussian", (1, 1)), (5, 4), (5, 1)),
    ],
)
def test_a_column_for_a_row_is_refused(head, params, action):
    """(B, 1) against (B) would be broadcast to (B, B) without a word."""
    kind = torch.float32 if head.kind == "gaussian" else torch.int64
    with pytest.raises(ValueError, match="fit"):
        log_prob_and_entropy(head, torch.zeros(params), torch.zeros(action, dtype=kind))


# -- sampling --------------------------------------------------------------------------------------

N = 40_000


def test_frequencies_of_a_categorical_choice():
    p = np.array([0.1, 0.2, 0.3, 0.4])
    logits = np.broadcast_to(np.log(p).astype(np.float32), (N, 4))
    drawn = sample(ONE, logits, np.random.default_rng(0))
    assert drawn.shape == (N,)
    assert drawn.dtype == np.int64
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / N, p, atol=4 * 0.5 / N**0.5)


def test_masked_actions_are_never_drawn_and_the_rest_keep_their_shares():
    p = np.array([0.1, 0.2, 0.3, 0.4])
    mask = np.broadcast_to([True, False, True, False], (N, 4))
    logits = np.broadcast_to(np.log(p).astype(np.float32), (N, 4))
    counts = np.bincount(sample(ONE, logits, np.random.default_rng(0), mask), minlength=4)
    assert counts[1] == counts[3] == 0
    assert counts[0] / N == pytest.approx(0.25, abs=0.01)
    confident = sample(ONE, np.full((9, 4), 50.0) * [0, 1, 0, 1], np.random.default_rng(0), mask[:9])
    assert set(confident.tolist()) <= {0, 2}
    assert mode(ONE, logits[:3], mask[:3]).tolist() == [2, 2, 2]
    assert mode(ONE, logits[:3]).tolist() == [3, 3, 3]


def test_several_choices_are_drawn_independently():
    head = Head("multi", (2, 3))
    p = np.concatenate([[0.25, 0.75], [0.2, 0.3, 0.5]])
    drawn = sample(head, np.broadcast_to(np.log(p), (N, 5)), np.random.default_rng(1))
    assert drawn.shape == (N, 2)
    joint = np.zeros((2, 3))
    np.add.at(joint, (drawn[:, 0], drawn[:, 1]), 1 / N)
    np.testing.assert_allclose(joint, np.outer(p[:2], p[2:]), atol=0.01)
    assert mode(head, np.log(p)[None]).tolist() == [[1, 2]]


def test_moments_of_a_gaussian_action():
    head = Head("gaussian", (1, 1))
    params = np.broadcast_to(np.array([5, -1, 0.5, -1], np.float32), (N, 4))
    drawn = sample(head, params, np.random.default_rng(2))
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn.mean(0), [5, -1], atol=0.04)
    np.testing.assert_allclose(drawn.std(0), np.exp([0.5, -1]), rtol=0.02)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02
    np.testing.assert_array_equal(mode(head, params[:2]), params[:2, :2])


def test_a_seed_gives_the_same_actions():
    logits = np.random.default_rng(0).normal(size=(50, 4))
    draws = [sample(ONE, logits, np.random.default_rng(s)).tolist() for s in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]


def test_what_a_head_says_of_its_actions():
    assert (ONE.outputs, ONE.action_shape, ONE.action_dtype) == (4, (), np.int64)
    multi, gaussian = Head("multi", (3, 2)), Head("gaussian", (1, 1, 1))
    assert (multi.outputs, multi.action_shape, multi.action_dtype) == (5, (2,), np.int64)
    assert (gaussian.outputs, gaussian.action_shape, gaussian.action_dtype) == (3, (3,), np.float32)
