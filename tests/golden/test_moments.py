"""Running moments that workers share, and what is normalized with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import helpers
from slipstream.moments import mean_and_scale, merge, of_batch, size
from slipstream.rollout import CLIP, Normalizer

BATCHES = st.lists(
    st.integers(0, 6).flatmap(lambda n: arrays(np.float64, (n, 2), elements=st.floats(-1e3, 1e3, width=32))),
    min_size=1, max_size=6,
)  # fmt: skip


def merged(batches, d=2):
    total = np.zeros(size(d))
    for batch in batches:
        merge(total, of_batch(np.asarray(batch, float)))
    return total


def test_two_workers_by_hand():
    """1, 2, 3 and 10, 20: mean 7.2, variance 50.96 (the mean of the two variances would be 12.83)."""
    total = merged([[[1], [2], [3]], [[10], [20]]], 1)
    assert total[0] == 5
    assert total[1] == pytest.approx(7.2)
    assert total[2] / total[0] == pytest.approx(50.96)
    mean, scale = mean_and_scale(total)
    assert mean[0] == pytest.approx(7.2)
    assert scale[0] == pytest.approx(1 / 50.96**0.5)


@given(BATCHES)
def test_merging_is_the_moments_of_all_rows_together(batches):
    total, rows = merged(batches), np.concatenate(batches)
    assert total[0] == len(rows)
    if len(rows):
        np.testing.assert_allclose(total[1:3], rows.mean(0), atol=1e-8)
        np.testing.assert_allclose(total[3:], ((rows - rows.mean(0)) ** 2).sum(0), atol=1e-4, rtol=1e-9)


@given(BATCHES)
def test_the_order_of_workers_does_not_matter(batches):
    np.testing.assert_allclose(merged(batches), merged(batches[::-1]), atol=1e-4, rtol=1e-7)


def test_large_offsets_do_not_cancel():
    """A sum of squares less the square of a sum would give garbage here."""
    rows = 1e8 + np.random.default_rng(0).normal(size=(1000, 1))
    total = merged([rows[:300], rows[300:]], 1)
    assert total[2] / total[0] == pytest.approx(rows.var(), rel=1e-6)


def test_a_constant_feature_gives_no_nan():
    total = merged([np.full((5, 2), [3.0, 0.0]), np.full((5, 2), [3.0, 1.0])])
    mean, scale = mean_and_scale(total)
    assert mean.tolist() == [3, 0.5]
    assert scale.tolist() == [1, 2]
    for few in (np.zeros(size(2)), of_batch(np.array([[5.0, 7.0]]))):  # nothing seen yet, and one row
        mean, scale = mean_and_scale(few)
        assert scale.tolist() == [1, 1]
        assert np.isfinite(mean).all()


# -- what is normalized ----------------------------------------------------------------------------


def test_observations_are_shifted_scaled_and_bounded():
    normalizer = Normalizer((2,), obs=True, reward=False, gamma=0.9)
    pulled = merged([[[0, 5], [4, 5]]])  # mean 2 and 5, std 2 and 0
    normalizer.use(pulled)
    out = np.zeros((3, 2), np.float32)
    normalizer.observations(np.array([[0, 5], [6, 6], [1e6, -1e6]], np.float32), out)
    np.testing.assert_allclose(out, [[-1, 0], [2, 1], [CLIP, -CLIP]])
    kept = pulled.copy()
    normalizer.observations(np.full((3, 2), 99, np.float32), out)
    np.testing.assert_array_equal(pulled, kept)


def test_rewards_are_scaled_never_shifted():
    normalizer = Normalizer((2,), obs=False, reward=True, gamma=0.9)
    assert normalizer.obs_size == 0
    normalizer.use(merged([[[100.0], [104.0]]], 1))  # standard deviation 2, mean 102
    reward = np.array([[0.0, 2.0, -4.0, 1e9]], np.float32)
    normalizer.rewards(reward)
    np.testing.assert_allclose(reward, [[0, 1, -2, CLIP]])


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_the_discounted_return_starts_anew_with_every_episode(kind, ends):
    """Discount 0.9, reward 1, episodes of 2 steps: the tracker is 1, 1.9, 1, 1.9 ... (not 1, 1.9, 2.71)."""
    env = helpers.rows(kind, lambda: helpers.CounterEnv(2, ends, reward=1.0), 1)
    collector = helpers.collector(env, 4, normalize=(False, True))
    total, samples = np.zeros(size(1)), 0
    for _ in range(6):
        rollout = collector.collect(0, lambda: False)
        merge(total, rollout.moments)
        samples += rollout.samples
    assert total[0] == samples
    mean, _ = mean_and_scale(total)
    assert mean[0] == pytest.approx(1.45)
    assert total[2] / total[0] == pytest.approx(0.45**2)


def test_an_open_episode_goes_on_in_the_next_rollout():
    env = helpers.rows("copies", lambda: helpers.CounterEnv(100, reward=1.0), 1)
    collector = helpers.collector(env, 2, normalize=(False, True))
    first, second = (collector.collect(0, lambda: False).moments.copy() for _ in range(2))
    assert first.tolist() == pytest.approx(of_batch(np.array([[1], [1.9]])).tolist())
    assert second.tolist() == pytest.approx(of_batch(np.array([[2.71], [3.439]])).tolist())


@pytest.mark.parametrize("kind", helpers.KINDS)
def test_every_observation_acted_on_is_counted_once(kind):
    """Observations in mid-episode are counted in one rollout only, and the network sees normalized ones."""
    env = helpers.rows(kind, lambda: helpers.CounterEnv(50), 2)
    collector = helpers.collector(env, 3, normalize=(True, False))
    total = np.zeros(size(1))
    for _ in range(4):
        rollout = collector.collect(0, lambda: False)
        merge(total, rollout.moments)
        np.testing.assert_allclose(rollout.obs, np.clip(collector.raw, -CLIP, CLIP))  # nothing pulled yet
    np.testing.assert_allclose(total, of_batch(np.repeat(np.arange(12.0), 2)[:, None]))
    collector.normalizer.use(total)
    rollout = collector.collect(0, lambda: False)
    expected = (np.arange(12, 16) - 5.5) / np.arange(12).std()
    np.testing.assert_allclose(rollout.obs[:, 0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(rollout.reward[:, 0], [13, 14, 15])  # raw: rewards are not normalized


@pytest.mark.parametrize("kind", ["same_step", "disabled"])
def test_the_final_observation_is_normalized_like_any_other(kind):
    """Its value is what the network says of the normalized one."""
    env = helpers.rows(kind, lambda: helpers.CounterEnv(3, "truncated"), 1)
    collector = helpers.collector(env, 3, normalize=(True, False))
    collector.normalizer.use(merged([[[0.0], [4.0]]], 1))  # mean 2, std 2
    rollout = collector.collect(0, lambda: False)
    assert rollout.bootstrap[2, 0] == pytest.approx((3 - 2) / 2)
    np.testing.assert_allclose(rollout.obs[:, 0, 0], [-1, -0.5, 0, -1])
