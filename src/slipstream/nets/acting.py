"""Acting: observations to actions, one step of B rows, without gradients.

A plain MLP (with or without an LSTM) acts in NumPy, which for small networks takes a third of the time of
torch; anything else in torch's inference mode. Both read the same memory the weights are pulled into
and agree with the training forward to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.nets.cores import LSTM
from slipstream.nets.policy import Policy
from slipstream.nets.torsos import MLP

Array = NDArray[Any]
Forward = Callable[[Array, Array, Array], tuple[Array, Array]]


def torch_forward(policy: Policy) -> tuple[Forward, Forward]:
    """(parameters, values) of one step, computed by the training network in inference mode."""

    def run(obs: Array, state: Array, starts: Array) -> tuple[Array, Array, Array]:
        with torch.inference_mode():
            (params, value), after = policy(
                torch.from_numpy(obs)[None], torch.from_numpy(state), torch.from_numpy(starts)[None]
            )
        return params[0].numpy(), value[0].numpy(), after.numpy()

    def act(obs: Array, state: Array, starts: Array) -> tuple[Array, Array]:
        params, _, after = run(obs, state, starts)
        return params, after

    def value(obs: Array, state: Array, starts: Array) -> tuple[Array, Array]:
        _, v, after = run(obs, state, starts)
        return v, after

    return act, value


def numpy_forward(policy: Policy) -> tuple[Forward, Forward]:
    """(parameters, values) of one step, computed in NumPy from views of the policy's parameters."""
    torso = _numpy_mlp(cast(MLP, policy.torso))
    value_torso = _numpy_mlp(cast(MLP, policy.value_torso)) if policy.value_torso is not None else None
    core = _numpy_lstm(policy) if policy.core is not None else None
    pi_w, pi_b = _view(policy.pi.weight).T, _view(policy.pi.bias)
    v_w, v_b = _view(policy.v.weight).T, _view(policy.v.bias)
    log_std = _view(policy.log_std) if policy.log_std is not None else None

    def features(obs: Array, state: Array, starts: Array) -> tuple[Array, Array]:
        x = torso(obs)
        return core(x, state, starts) if core is not None else (x, state)

    def act(obs: Array, state: Array, starts: Array) -> tuple[Array, Array]:
        x, state = features(obs, state, starts)
        params = x @ pi_w
        params += pi_b
        if log_std is not None:
            params = np.concatenate([params, np.broadcast_to(log_std, params.shape)], -1)
        return params, state

    def value(obs: Array, state: Array, starts: Array) -> tuple[Array, Array]:
        if value_torso is not None:
            x = value_torso(obs)
        else:
            x, state = features(obs, state, starts)
        return (x @ v_w + v_b)[:, 0], state

    return act, value


def forward_for(policy: Policy) -> tuple[Forward, Forward]:
    """The fastest acting path this policy has."""
    plain = all(isinstance(t, MLP) for t in (policy.torso, policy.value_torso or policy.torso))
    plain = plain and (policy.core is None or isinstance(policy.core, LSTM))
    return numpy_forward(policy) if plain else torch_forward(policy)


def _view(p: Any) -> Array:
    return cast(Array, p.detach().numpy())  # shares memory: sees every pull


def _numpy_mlp(mlp: MLP) -> Callable[[Array], Array]:
    layers = [(_view(layer.weight).T, _view(layer.bias)) for layer in cast(Any, mlp.layers)]
    relu = mlp.activation_name == "relu"

    def forward(x: Array) -> Array:
        if x.ndim > 2:
            x = x.reshape(len(x), -1)
        if x.dtype == np.uint8:
            x = x.astype(np.float32) / np.float32(255)
        for w, b in layers:
            x = x @ w
            x += b
            x = np.maximum(x, 0, out=x) if relu else np.tanh(x, out=x)
        return x

    return forward


def _numpy_lstm(policy: Policy) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
    core = cast(LSTM, policy.core).cell
    w_in, w_rec = _view(core.weight_ih_l0).T, _view(core.weight_hh_l0).T
    b_in, b_rec = _view(core.bias_ih_l0), _view(core.bias_hh_l0)
    n = core.hidden_size

    def forward(x: Array, state: Array, starts: Array) -> tuple[Array, Array]:
        if starts.any():
            state = np.where(starts[:, None], np.float32(0), state)
        h, c = state[:, :n], state[:, n:]
        gates = x @ w_in
        gates += b_in
        gates += h @ w_rec
        gates += b_rec
        sig = np.float32(0.5) * (np.tanh(np.float32(0.5) * gates) + np.float32(1))  # i, f, (g), o; no overflow
        c = sig[:, n : 2 * n] * c + sig[:, :n] * np.tanh(gates[:, 2 * n : 3 * n])
        h = sig[:, 3 * n :] * np.tanh(c)
        return h, np.concatenate([h, c], -1)

    return forward
