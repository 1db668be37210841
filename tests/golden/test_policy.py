"""The network: flat parameters, initialization, memory, and acting equal to learning."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import helpers
from slipstream import build
from slipstream.actions import Head
from slipstream.config import Given, Net, from_dict
from slipstream.errors import ConfigError
from slipstream.nets.acting import forward_for, numpy_forward, torch_forward
from slipstream.nets.policy import ALIGN, Policy, flatten, initialize, pieces

CATEGORICAL = helpers.HEADS["categorical"]
PATHS = {"numpy": numpy_forward, "torch": torch_forward}


def forward(policy, obs, state=None, starts=None):
    """The learning forward over `[T, B]` arrays: (params, value, state)."""
    T, B = obs.shape[:2]
    state = np.zeros((B, policy.state_size), np.float32) if state is None else state
    starts = np.zeros((T, B), bool) if starts is None else starts
    (params, value), after = policy(torch.as_tensor(obs), torch.as_tensor(state), torch.as_tensor(starts))
    return params, value, after


def observations(shape, T, B, seed=0):
    return np.random.default_rng(seed).normal(size=(T, B, *shape)).astype(np.float32)


# -- one flat vector -------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("head", helpers.HEADS.values(), ids=helpers.HEADS)
def test_one_memcpy_changes_the_whole_module(head, core):
    policy, weights, gradient = helpers.network(head, core=core)
    other, others, _ = helpers.network(head, core=core, seed=1)
    assert weights.shape == gradient.shape
    assert weights.dtype == gradient.dtype == np.float32
    assert not any(torch.equal(p, q) for p, q in zip(policy.parameters(), other.parameters(), strict=True))
    weights[:] = others
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), other.parameters(), strict=True))
    obs = observations((4,), 5, 2)
    for a, b in zip(forward(policy, obs), forward(other, obs), strict=True):
        assert torch.equal(a, b)


def test_places_are_aligned_and_do_not_overlap():
    policy, weights, _ = helpers.network(CATEGORICAL, (3,), hidden=(5, 7))
    places, size = pieces(policy)
    assert size == len(weights)
    at = 0
    for place, (name, p) in zip(places, policy.named_parameters(), strict=True):
        assert (place.name, place.shape, place.offset) == (name, tuple(p.shape), at)
        assert at % ALIGN == 0
        np.testing.assert_array_equal(weights[at : at + p.numel()], p.detach().numpy().ravel())
        assert p.data_ptr() == weights.ctypes.data + 4 * at
        at += math.ceil(p.numel() / ALIGN) * ALIGN


def test_gradients_gather_in_the_flat_vector_and_the_padding_stays_0():
    policy, weights, gradient = helpers.network(CATEGORICAL, (3,), hidden=(5, 7), core="lstm")
    used = np.zeros(len(weights), bool)
    for place in pieces(policy)[0]:
        used[place.offset : place.offset + math.prod(place.shape)] = True
    assert 0 < used.sum() < len(used)
    params, value, _ = forward(policy, observations((3,), 6, 2))
    total = (params.square().sum() + value.sum()) / 10
    expected = torch.autograd.grad(total, list(policy.parameters()), retain_graph=True)
    for times in (1, 2):  # backward adds
        total.backward(retain_graph=True)
        for place, g in zip(pieces(policy)[0], expected, strict=True):
            got = gradient[place.offset : place.offset + g.numel()]
            np.testing.assert_allclose(got, times * g.numpy().ravel(), rtol=1e-4, atol=1e-6)
    assert not gradient[~used].any()
    assert not weights[~used].any()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in policy.parameters()))
    assert np.linalg.norm(gradient) == pytest.approx(norm, rel=1e-5)


# -- initialization --------------------------------------------------------------------------------


def test_weights_begin_orthogonal_with_the_gains_of_the_paper():
    policy = Policy((10,), CATEGORICAL, Net(hidden=(32, 16)))
    initialize(policy, 0)
    for name, p in policy.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
            continue
        gain = 0.01 if name.startswith("pi.") else 1.0 if name.startswith("v.") else math.sqrt(2)
        np.testing.assert_allclose(torch.linalg.svdvals(p.detach()), gain, rtol=1e-4, err_msg=name)
    assert not torch.equal(policy.torso.layers[0].weight, policy.value_torso.layers[0].weight)


def test_the_core_begins_orthogonal_and_log_std_as_asked():
    policy = Policy((10,), helpers.HEADS["gaussian"], Net(core="lstm", core_size=12, log_std=-0.5))
    assert policy.value_torso is None
    before = policy.log_std.detach().clone()
    initialize(policy, 0)
    for weight in (policy.core.cell.weight_ih_l0, policy.core.cell.weight_hh_l0):
        np.testing.assert_allclose(torch.linalg.svdvals(weight.detach()), 1.0, rtol=1e-4)
    assert torch.equal(before, policy.log_std.detach())
    assert policy.log_std.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("torso", ["mlp", "helpers.Normed"])
def test_a_seed_gives_the_same_weights_and_leaves_torch_alone(torso):
    made, drawn = [], []
    for seed in (3, 3, 4):
        run = from_dict({"env": "CartPole-v1", "seed": seed, "net": {"torso": torso}})
        env = build.environment(run, Given(), 1, build.seeds(run, build.Role.EVALUATION))
        torch.manual_seed(99)
        made.append(flatten(build.policy_for(run, Given(), env))[0])
        drawn.append(torch.rand(1).item())
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).mean() > 0.5
    assert len(set(drawn)) == 1


# -- memory ----------------------------------------------------------------------------------------


def step_by_step(policy, path, obs, state, starts):
    """Act through `obs [T, B]` as a worker does: (params, value, state)."""
    act, value = path(policy)
    params, values = [], []
    for t in range(len(obs)):
        v, _ = value(obs[t], state, starts[t])
        p, state = act(obs[t], state, starts[t])
        params.append(p)
        values.append(v)
    return np.stack(params), np.stack(values), state


def assert_acting_is_learning(policy, path, obs, state=None, starts=None, chunk=None):
    T, B = obs.shape[:2]
    state = np.zeros((B, policy.state_size), np.float32) if state is None else state
    starts = np.zeros((T, B), bool) if starts is None else starts
    acted = step_by_step(policy, path, obs, state, starts)
    learned = []
    with torch.no_grad():
        for t in range(0, T, chunk or T):
            span = slice(t, t + (chunk or T))
            params, value, state = forward(policy, obs[span], state, starts[span])
            learned.append((params.numpy(), value.numpy()))
    np.testing.assert_allclose(acted[0], np.concatenate([x[0] for x in learned]), atol=1e-5)
    np.testing.assert_allclose(acted[1], np.concatenate([x[1] for x in learned]), atol=1e-5)
    np.testing.assert_allclose(acted[2], state, atol=1e-5)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_acting_with_memory_equals_learning_over_1000_steps(path):
    """Random starts, runs of starts (episodes of length 1), and rollouts that begin in mid-episode."""
    policy, _, _ = helpers.network(CATEGORICAL, core="lstm")
    rng = np.random.default_rng(0)
    starts = rng.random((1000, 3)) < 0.05
    starts[200:230, 1] = True
    starts[500] = True
    obs = observations((4,), 1000, 3)
    assert_acting_is_learning(policy, path, obs, starts=starts, chunk=16)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_ten_step_episode_in_chunks_of_four(path):
    policy, _, _ = helpers.network(CATEGORICAL, core="lstm")
    assert_acting_is_learning(policy, path, observations((4,), 10, 1), chunk=4)


@settings(max_examples=25)
@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=9), st.integers(0, 99))
def test_a_start_forgets_exactly_what_was_before(flags, seed):
    """The definition: each episode alone, from a state of zeros, gives the same outputs."""
    policy, _, _ = helpers.network(CATEGORICAL, core="lstm")
    starts = np.array(flags)
    T, B = starts.shape
    obs = observations((4,), T, B, seed)
    state = np.random.default_rng(seed).normal(size=(B, policy.state_size)).astype(np.float32)
    with torch.no_grad():
        params, value, after = forward(policy, obs, state, starts)
        for b in range(B):
            cuts = [0, *(t for t in range(1, T) if starts[t, b]), T]
            for begin, end in itertools.pairwise(cuts):
                first = np.zeros_like(state[:1]) if starts[begin, b] else state[b : b + 1]
                p, v, last = forward(policy, obs[begin:end, b : b + 1], first)
                torch.testing.assert_close(p[:, 0], params[begin:end, b], atol=1e-5, rtol=0)
                torch.testing.assert_close(v[:, 0], value[begin:end, b], atol=1e-5, rtol=0)
            torch.testing.assert_close(last[0], after[b], atol=1e-5, rtol=0)


def test_an_end_in_one_row_does_not_touch_another():
    """Row 0 starts anew at 3; row 1 goes on."""
    policy, _, _ = helpers.network(CATEGORICAL, core="lstm", torso=helpers.Normed)
    obs, starts = observations((4,), 6, 2), np.zeros((6, 2), bool)
    starts[3, 0] = True
    with torch.no_grad():
        together, _, _ = forward(policy, obs, None, starts)
        fresh, _, _ = forward(policy, obs[3:, :1])
        through, _, _ = forward(policy, obs[:, 1:])
        without, _, _ = forward(policy, obs)
    torch.testing.assert_close(together[3:, :1], fresh, atol=1e-6, rtol=0)
    torch.testing.assert_close(together[:, 1:], through, atol=1e-6, rtol=0)
    assert (together[3:, 0] - without[3:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("start", [None, 2, 3, 4])
def test_gradients_flow_through_time_but_not_across_a_start(start):
    """d value(t=4) / d obs(t=1) is 0 exactly where an episode begins in between."""
    policy, _, _ = helpers.network(CATEGORICAL, core="lstm")
    obs = torch.from_numpy(observations((4,), 5, 2)).requires_grad_()
    starts = torch.zeros(5, 2, dtype=torch.bool)
    if start is not None:
        starts[start, 0] = True
    (_, value), _ = policy(obs, torch.zeros(2, policy.state_size), starts)
    value[4].sum().backward()
    assert obs.grad[1, 1].abs().max() > 1e-6
    if start is None:
        assert obs.grad[1, 0].abs().max() > 1e-6
    else:
        assert not obs.grad[:start, 0].any()
        assert obs.grad[start:, 0].abs().max() > 1e-6


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_nan_in_an_old_state_does_not_survive_a_start(path):
    policy, _, gradient = helpers.network(CATEGORICAL, core="lstm")
    obs = observations((4,), 4, 2)
    state = np.full((2, policy.state_size), np.nan, np.float32)
    starts = np.zeros((4, 2), bool)
    starts[0] = True
    params, value, after = forward(policy, obs, state, starts)
    fresh = forward(policy, obs, np.zeros_like(state))
    for a, b in zip((params, value, after), fresh, strict=True):
        assert torch.equal(a, b)
    (params.sum() + value.sum()).backward()
    assert np.isfinite(gradient).all()
    acted = step_by_step(policy, path, obs, state, starts)
    assert all(np.isfinite(x).all() for x in acted)


def test_the_state_handed_on_has_no_graph_in_acting():
    policy, _, _ = helpers.network(CATEGORICAL, core="lstm")
    for path in PATHS.values():
        _, state = path(policy)[0](observations((4,), 1, 2)[0], np.zeros((2, 16), np.float32), np.ones(2, bool))
        assert isinstance(state, np.ndarray)


# -- acting ----------------------------------------------------------------------------------------

NETS = {
    "tanh": {}, "relu": {"activation": "relu"}, "shared": {"critic": "shared"}, "lstm": {"core": "lstm"},
    "linear": {"hidden": ()}, "one layer": {"hidden": (7,)},
}  # fmt: skip


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
@pytest.mark.parametrize("head", helpers.HEADS.values(), ids=helpers.HEADS)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_acting_equals_learning(path, head, net):
    policy, _, _ = helpers.network(head, (3, 2), **net)
    assert_acting_is_learning(policy, path, observations((3, 2), 5, 4) * 3)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_images_are_scaled_once(path):
    policy, _, _ = helpers.network(CATEGORICAL, (2, 3), hidden=(8,))
    image = np.random.default_rng(0).integers(0, 256, (4, 3, 2, 3), dtype=np.uint8)
    image[0] = 255
    assert_acting_is_learning(policy, path, image)
    scaled = image.astype(np.float32) / 255
    for a, b in zip(forward(policy, image), forward(policy, scaled), strict=True):
        torch.testing.assert_close(a, b)
    ones = forward(policy, np.ones((1, 3, 2, 3), np.float32))
    torch.testing.assert_close(forward(policy, image[:1])[0], ones[0])


def test_large_gates_do_not_overflow_in_numpy():
    policy, weights, _ = helpers.network(CATEGORICAL, core="lstm")
    weights *= 200
    with np.errstate(over="raise", invalid="raise"):
        assert_acting_is_learning(policy, numpy_forward, observations((4,), 1, 2) * 100)


def test_acting_sees_weights_copied_in_later():
    policy, weights, _ = helpers.network(CATEGORICAL, core="lstm")
    _, others, _ = helpers.network(CATEGORICAL, core="lstm", seed=5)
    obs, state, starts = observations((4,), 1, 2)[0], np.zeros((2, 16), np.float32), np.ones(2, bool)
    for path in PATHS.values():
        act, value = path(policy)
        before = act(obs, state, starts)[0].copy(), value(obs, state, starts)[0].copy()
        kept = weights.copy()
        weights[:] = others
        assert not np.allclose(act(obs, state, starts)[0], before[0])
        assert not np.allclose(value(obs, state, starts)[0], before[1])
        weights[:] = kept


def test_plain_networks_act_in_numpy_and_others_in_torch():
    plain, _, _ = helpers.network(CATEGORICAL)
    own, _, _ = helpers.network(CATEGORICAL, torso=helpers.Normed)
    assert "numpy_forward" in forward_for(plain)[0].__qualname__
    assert "torch_forward" in forward_for(own)[0].__qualname__


# -- torsos of the user's --------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_torso_named_in_the_configuration_or_given_in_python(core):
    image = np.random.default_rng(0).integers(0, 256, (3, 2, 1, 7, 7), dtype=np.uint8)
    for torso in ("helpers.Convolution", "helpers:Convolution", helpers.Convolution):
        policy, _, gradient = helpers.network(CATEGORICAL, (1, 7, 7), torso=torso, core=core)
        assert isinstance(policy.torso, helpers.Convolution)
        assert policy.value_torso is None
        assert_acting_is_learning(policy, forward_for, image)
        params, value, _ = forward(policy, image)
        assert params.shape == (3, 2, 3)
        assert value.shape == (3, 2)
        (params.square().sum() + value.sum()).backward()
        place = next(p for p in pieces(policy)[0] if p.name == "torso.body.0.weight")
        assert np.count_nonzero(gradient[place.offset : place.offset + math.prod(place.shape)])


def test_a_torso_keeps_its_own_initialization():
    class Constant(helpers.Normed):
        def __init__(self, shape):
            super().__init__(shape)
            nn.init.constant_(self.body[1].weight, 0.25)

    policy = Policy((4,), CATEGORICAL, Net(), Constant)
    initialize(policy, 0)
    assert (policy.torso.body[1].weight == 0.25).all()
    np.testing.assert_allclose(torch.linalg.svdvals(policy.pi.weight.detach()), 0.01, rtol=1e-4)


@pytest.mark.parametrize(
    ("torso", "said"),
    [
        ("helpers.Batched", "BatchNorm"),
        ("helpers.Nameless", "out_features"),
        ("helpers.MODES", "helpers.MODES"),
        ("helpers.Missing", "helpers.Missing"),
        ("nowhere.Torso", "nowhere.Torso"),
        ("cnn", "neither one of auto, mlp"),
        ("helpers.each", "out_features"),
    ],
)
def test_a_torso_that_does_not_fit_is_refused(torso, said):
    with pytest.raises(ConfigError, match=r"net\.torso") as e:
        Policy((4,), CATEGORICAL, Net(torso=torso))
    assert said in str(e.value)


def test_head_sizes_are_the_outputs():
    for head in (Head("categorical", (7,)), Head("multi", (2, 3)), Head("gaussian", (1, 1, 1))):
        policy, _, _ = helpers.network(head)
        params, _, _ = forward(policy, observations((4,), 2, 2))
        assert params.shape[-1] == head.outputs * (2 if head.kind == "gaussian" else 1)
