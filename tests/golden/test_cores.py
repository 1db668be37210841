"""Cores: a step at a time, a whole sequence, episodes side by side: the same numbers, wherever episodes start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.actions import Head
from slipstream.config import Net
from slipstream.errors import ConfigError
from slipstream.nets.cores import LSTM, Attention
from slipstream.nets.policy import Policy, initialize
from slipstream.nets.torsos import IMAGES

CORES = {
    "lstm": lambda: LSTM(5, 8),
    "attention": lambda: Attention(5, 8, 4, 2),
    "window 1": lambda: Attention(5, 8, 1, 1),
}


def case(kind: str, T: int, B: int, seed: int, rate: float) -> tuple[LSTM | Attention, Tensor, Tensor, Tensor]:
    """A core with random parameters, input, a state in the midst of episodes, and starts."""
    torch.manual_seed(seed)
    core = CORES[kind]()
    for p in core.parameters():
        p.data.normal_(0, 0.5)
    _, state = core(torch.randn(3, B, 5), torch.zeros(B, core.state_size), torch.zeros(3, B, dtype=torch.bool))
    return core, torch.randn(T, B, 5), state.detach(), torch.rand(T, B) < rate


@pytest.mark.parametrize("kind", CORES)
@given(
    T=st.integers(1, 12), B=st.integers(1, 4), seed=st.integers(0, 10**6), rate=st.sampled_from([0.0, 0.1, 0.5, 1.0])
)
@settings(max_examples=40, deadline=None)
def test_acting_equals_learning(kind: str, T: int, B: int, seed: int, rate: float) -> None:
    """One step at a time, [T, B] at once with and without the state carried, to 1e-5; gradients too."""
    core, x, state, starts = case(kind, T, B, seed, rate)
    s, steps = state, []
    for t in range(T):
        y, s = core(x[t : t + 1], s, starts[t : t + 1])
        steps.append(y)
    one = torch.cat(steps)
    whole, after = core(x, state, starts)
    fast, _ = core(x, state, starts, carry=False)
    torch.testing.assert_close(whole, one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after, s, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast, one, rtol=1e-5, atol=1e-5)
    weight, found = torch.randn_like(one), []
    for out in (one, fast):
        grads = torch.autograd.grad((out * weight).sum(), list(core.parameters()), retain_graph=True)
        found.append(torch.cat([g.reshape(-1) for g in grads]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("carry", [True, False])
def test_nothing_passes_the_start_of_an_episode(kind: str, carry: bool) -> None:
    """Not even a NaN from the episode before, in the state or in the input."""
    core, x, state, _ = case(kind, 6, 2, 0, 0.0)
    starts = torch.zeros(6, 2, dtype=torch.bool)
    starts[3, 0] = starts[0, 1] = True
    good, _ = core(x, state, starts, carry)
    spoilt = state.clone()
    spoilt[1] = float("nan")
    other = x.clone()
    other[:3, 0] += 7.0
    bad, _ = core(other, spoilt, starts, carry)
    torch.testing.assert_close(bad[3:, 0], good[3:, 0])
    torch.testing.assert_close(bad[:, 1], good[:, 1])
    assert not torch.allclose(bad[:3, 0], good[:3, 0])


def test_attention_sees_its_window_and_no_further() -> None:
    """What was put out `window` steps ago is out of sight; the step after it is not."""
    core, x, state, _ = case("attention", 6, 1, 0, 0.0)
    W, own, size = core.window, core.lstm.state_size, core.size
    starts = torch.zeros(1, 1, dtype=torch.bool)
    base, _ = core(x[:1], state, starts)
    for back in range(1, W):
        other = state.clone()
        at = own + (W - 1 - back) * size
        other[:, at : at + size] += torch.randn(size)
        changed = not torch.allclose(core(x[:1], other, starts)[0], base, atol=1e-6)
        assert changed == (back <= int(state[0, -1])), back


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("core", ["none", "lstm", "attention"])
def test_bytes_are_scaled_as_images_would_be(name: str, core: str) -> None:
    """Dividing the first weights by 255 gives what dividing the images by 255 gives; channels first or last."""
    head = Head("categorical", (3,))
    policy = Policy((4, 44, 40), head, Net(torso=name, core=core, core_size=16))
    initialize(policy, 1)
    obs = torch.randint(0, 256, (2, 3, 4, 44, 40), dtype=torch.uint8)
    state, starts = torch.zeros(3, policy.state_size), torch.zeros(2, 3, dtype=torch.bool)
    (params, value), _ = policy(obs, state, starts)
    (scaled, scaled_value), _ = policy(obs.float() / 255, state, starts)
    torch.testing.assert_close(params, scaled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value, scaled_value, rtol=1e-4, atol=1e-5)
    last = Policy((44, 40, 4), head, Net(torso=name, core=core, core_size=16))
    initialize(last, 1)
    (turned, _), _ = last(obs.permute(0, 1, 3, 4, 2), state, starts)
    torch.testing.assert_close(turned, params, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_named() -> None:
    """Observations that are no images, heads that do not divide, a torso misspelt."""
    head = Head("categorical", (3,))
    for shape, net, words in (
        ((4,), Net(torso="nature"), "net.torso.*images"),
        ((4,), Net(core="attention", core_size=10, heads=4), "net.heads: 4"),
        ((4,), Net(torso="natur"), "Did you mean nature"),
    ):
        with pytest.raises(ConfigError, match=words):
            Policy(shape, head, net)
