"""Advantages against numbers worked out by hand, identities, and the definition as a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout import explained_variance, gae


def one(reward, value, after, gamma, lam, terminated=(), truncated=(), invalid=(), final=None):
    """Advantages of one stream; `final` maps rows to the value of their final observation."""
    T = len(reward)
    column = lambda rows: np.isin(np.arange(T), list(rows))[:, None]  # noqa: E731
    bootstrap, final = np.zeros((T, 1), np.float32), final or {}
    for t, v in final.items():
        bootstrap[t] = v
    values = np.array([*value, after], np.float32)[:, None]
    rewards = np.array(reward, np.float32)[:, None]
    arguments = column(terminated), column(truncated), ~column(invalid), bootstrap, column(final)
    return gae(rewards, values, *arguments, gamma, lam)[:, 0]


ONES, HALVES = [1, 1, 1, 1], [0.5] * 4


def test_termination_belongs_to_the_transition_that_ended():
    got = one(ONES, HALVES, 10, 0.9, 0.8, terminated=[1])
    np.testing.assert_allclose(got, [1.31, 0.5, 7.79, 9.5], rtol=1e-6)


def test_the_value_after_the_rollout_counts_once():
    np.testing.assert_allclose(one(ONES, HALVES, 10, 0.9, 1.0), [9.5] * 4, rtol=1e-6)


def test_truncation_bootstraps_from_the_final_observation_and_cuts_the_trace():
    got = one(ONES, HALVES, 10, 0.9, 0.8, truncated=[1], final={1: 4})
    np.testing.assert_allclose(got, [3.902, 4.1, 7.79, 9.5], rtol=1e-6)


@pytest.mark.parametrize(("r", "v", "final"), [([1], [0.5], 100)])
def test_terminated_wins_where_both_flags_are_set(r, v, final):
    target = one(r, v, 10, 0.9, 1.0, terminated=[0], truncated=[0], final={0: final}) + v
    np.testing.assert_allclose(target, [1.0])


def test_a_rollout_of_one_step_has_an_advantage():
    np.testing.assert_allclose(one([1], [0.5], 10, 0.9, 1.0), [9.5], rtol=1e-6)


def test_n_step_target_stops_at_any_end():
    """Rewards 1, 2, 4, 8, discount 0.5; the targets of the step with reward 2."""
    r, v = [1, 2, 4, 8], [3.0, 5.0, 7.0, 9.0]
    terminated = one(r, v, 100, 0.5, 1.0, terminated=[2]) + v
    truncated = one(r, v, 100, 0.5, 1.0, truncated=[2], final={2: 8}) + v
    assert terminated[1] == pytest.approx(4)
    assert truncated[1] == pytest.approx(2 + 2 + 0.25 * 8)
    cut_short = one(r[:3], v[:3], 100, 0.5, 1.0, truncated=[2], final={2: 8}) + v[:3]
    assert cut_short[1] == pytest.approx(6)


def test_a_time_limit_is_not_an_end():
    """Reward 1 for ever is worth 10 at discount 0.9, whatever the limit of 10 steps says."""
    v, rows = [10.0] * 20, [9, 19]
    limited = one([1] * 20, v, 10, 0.9, 1.0, truncated=rows, final=dict.fromkeys(rows, 10)) + v
    np.testing.assert_allclose(limited, 10.0, rtol=1e-6)
    ended = one([1] * 20, v, 10, 0.9, 1.0, terminated=rows) + v
    assert ended[0] == pytest.approx(6.5132, abs=1e-4)
    assert ended[10] == ended[0]


def test_two_episodes_in_one_rollout_do_not_mix():
    got = one([1] * 6, [0] * 6, 50, 0.5, 1.0, terminated=[2, 5])
    np.testing.assert_allclose(got, [1.75, 1.5, 1, 1.75, 1.5, 1])


def test_a_row_that_is_not_valid_gives_and_passes_on_nothing():
    """Row 1 ended, row 2 is the reset (observation: the final one, value 4), row 3 begins an episode."""
    got = one([1, 1, 77, 1], [0.5, 0.5, 4, 0.5], 10, 0.9, 0.8, truncated=[1], invalid=[2])
    np.testing.assert_allclose(got, [3.902, 4.1, 0, 9.5], rtol=1e-6)


def test_a_row_of_unknown_outcome_cuts_the_stream_before_it():
    """Row 1 failed: row 0 still bootstraps from what was observed there."""
    got = one([1, 5, 1], [0.5, 2, 0.5], 10, 0.9, 0.8, invalid=[1])
    np.testing.assert_allclose(got, [1 + 0.9 * 2 - 0.5, 0, 9.5], rtol=1e-6)


# -- properties ------------------------------------------------------------------------------------


@st.composite
def experience(draw):
    """Arguments of `gae` but gamma and lambda, of small random shapes and flags."""
    T, B = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    flags = lambda p: rng.random((T, B)) < p  # noqa: E731
    p = draw(st.sampled_from([0.0, 0.3, 0.8]))
    truncated = flags(p)
    return (
        numbers(T, B), numbers(T + 1, B), flags(p), truncated, ~flags(draw(st.sampled_from([0.0, 0.3]))),
        numbers(T, B), truncated & flags(0.5),
    )  # fmt: skip


def by_definition(reward, value, terminated, truncated, valid, bootstrap, has_bootstrap, gamma, lam):
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, up to the end of the episode (eq. 16)."""
    T, B = reward.shape
    out = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                if not valid[k, b]:
                    break
                after = bootstrap[k, b] if has_bootstrap[k, b] else value[k + 1, b]
                if terminated[k, b]:
                    after = 0.0
                out[t, b] += weight * (reward[k, b] + gamma * after - value[k, b])
                if terminated[k, b] or truncated[k, b]:
                    break
                weight *= gamma * lam
    return out


RATES = st.tuples(st.floats(0, 1), st.floats(0, 1))


@given(experience(), RATES)
def test_equals_the_definition(data, rates):
    np.testing.assert_allclose(gae(*data, *rates), by_definition(*data, *rates), atol=2e-5)


@given(experience(), st.floats(0, 1))
def test_lambda_1_is_the_monte_carlo_return_less_the_value(data, gamma):
    reward, value, terminated, truncated, valid, bootstrap, has_bootstrap = data
    valid = np.ones_like(valid)
    T, B = reward.shape
    got = gae(reward, value, terminated, truncated, valid, bootstrap, has_bootstrap, gamma, 1.0)
    for b in range(B):
        total = value[T, b]
        for t in reversed(range(T)):
            if truncated[t, b]:
                total = bootstrap[t, b] if has_bootstrap[t, b] else value[t + 1, b]
            total = reward[t, b] + gamma * (0.0 if terminated[t, b] else total)
            assert got[t, b] == pytest.approx(total - value[t, b], abs=2e-5)


@given(experience(), RATES)
def test_streams_computed_together_equal_each_alone(data, rates):
    together = gae(*data, *rates)
    for b in range(together.shape[1]):
        alone = gae(*(x[:, b : b + 1] for x in data), *rates)
        np.testing.assert_array_equal(together[:, b : b + 1], alone)


@given(experience(), RATES, st.integers(0, 6))
def test_a_rollout_joined_at_an_end_equals_its_two_halves(data, rates, cut):
    T = len(data[0])
    cut = cut % T
    data[2][cut] = True  # everything ended by row `cut`
    first = tuple(x[: cut + 1] if i != 1 else x[: cut + 2] for i, x in enumerate(data))
    second = tuple(x[cut + 1 :] for x in data)
    joined = gae(*data, *rates)
    np.testing.assert_array_equal(joined[: cut + 1], gae(*first, *rates))
    np.testing.assert_array_equal(joined[cut + 1 :], gae(*second, *rates))


@given(experience(), RATES)
def test_what_stands_in_invalid_rows_is_irrelevant(data, rates):
    changed = [x.copy() for x in data]
    invalid = ~data[4]
    for i in (0, 5):
        changed[i][invalid] = 1e3
    for i in (2, 3, 6):
        changed[i][invalid] ^= True
    got = gae(*changed, *rates)
    np.testing.assert_array_equal(got, gae(*data, *rates))
    assert not got[invalid].any()


@pytest.mark.parametrize("wrong", range(7))
@pytest.mark.parametrize("shape", ["column", "short", "flat"])
def test_shapes_that_would_be_broadcast_are_refused(wrong, shape):
    T, B = 3, 3
    z, f = np.zeros((T, B), np.float32), np.zeros((T, B), bool)
    arguments = [z, np.zeros((T + 1, B), np.float32), f, f, ~f, z, f]
    x = arguments[wrong]
    arguments[wrong] = {"column": x[..., None], "short": x[:-1], "flat": x[0]}[shape]
    with pytest.raises(ValueError, match="fit"):
        gae(*arguments, 0.9, 0.9)


def test_explained_variance():
    y = np.array([[1.0, 2.0], [3.0, 1e9]])
    valid = np.array([[True, True], [True, False]])
    assert explained_variance(y, y, valid) == 1.0
    assert explained_variance(np.zeros((2, 2)), y, valid) == 0.0
    assert explained_variance(np.array([[1, 2], [4.5, 0]]), y, valid) == pytest.approx(1 - 0.5 / (2 / 3))
    assert np.isnan(explained_variance(y, np.ones((2, 2)), valid))
    assert np.isnan(explained_variance(y, y, np.zeros((2, 2), bool)))
