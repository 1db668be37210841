"""The network over `[T, B, ...]`, and its parameters as views of one flat float32 vector."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.actions import Head
from slipstream.config import Net
from slipstream.errors import ConfigError, nearest
from slipstream.nets.cores import LSTM, Attention
from slipstream.nets.torsos import IMAGES, MLP, NAMES, OURS, image_like

ALIGN = 16  # float32 elements: each parameter starts on a cache line, whatever came before it


class Policy(nn.Module):
    """`policy(obs, state, starts) -> ((params, value), state)` over `[T, B, ...]` with T >= 1.

    `starts[t, b]` says that a new episode begins at t: the state is zeroed there, in acting and in
    learning alike. The caller keeps the state; a torso never sees it.
    """

    def __init__(self, shape: tuple[int, ...], head: Head, net: Net, torso: Any = None) -> None:
        """Build the network for observations of `shape`; `torso` overrides `net.torso` by a callable."""
        super().__init__()
        self.shape, self.head, self.net = shape, head, net
        self.torso = make_torso(shape, net, torso)
        plain = isinstance(self.torso, MLP) and net.core == "none"
        separate = net.critic == "separate" or (net.critic == "auto" and plain)
        self.value_torso = make_torso(shape, net, torso) if separate else None
        features = self.torso.out_features
        self.core = make_core(features, net)
        features = self.core.out_features if self.core is not None else features
        self.pi = nn.Linear(features, head.outputs)
        self.v = nn.Linear(features, 1)
        self.log_std = nn.Parameter(torch.full((len(head.sizes),), net.log_std)) if head.kind == "gaussian" else None
        if list(self.buffers()):
            raise ConfigError(
                f"net.torso: {net.torso} keeps buffers (running statistics, as in BatchNorm), which are not part "
                "of the shared weights; use LayerNorm or none"
            )

    @property
    def state_size(self) -> int:
        """Width of the recurrent state of one row."""
        return self.core.state_size if self.core is not None else 0

    def forward(
        self, obs: Tensor, state: Tensor, starts: Tensor, carry: bool = True
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Distribution parameters `[T, B, P]`, values `[T, B]`, and the state `[B, S]` after the last step.

        Args:
            obs: `[T, B, *shape]`.
            state: `[B, S]` before the first step.
            starts: bool `[T, B]`.
            carry: whether the state after the last step is wanted; learning is faster without.
        """
        T, B = obs.shape[:2]
        flat = obs.reshape(T * B, *self.shape)
        x = self.torso(flat)
        if self.core is not None:
            x, state = self.core(x.view(T, B, -1), state, starts, carry)
            x = x.reshape(T * B, -1)
        params = self.pi(x)
        value = self.v(x if self.value_torso is None else self.value_torso(flat))
        if self.log_std is not None:
            params = torch.cat([params, self.log_std.expand_as(params)], -1)
        return (params.view(T, B, -1), value.view(T, B)), state


def make_core(features: int, net: Net) -> LSTM | Attention | None:
    """The core named by `net.core`."""
    if net.core == "lstm":
        return LSTM(features, net.core_size)
    if net.core == "attention":
        if net.core_size % net.heads:
            raise ConfigError(f"net.heads: {net.heads} does not divide net.core_size {net.core_size}")
        return Attention(features, net.core_size, net.window, net.heads)
    return None


def make_torso(shape: tuple[int, ...], net: Net, given: Callable[..., Any] | None = None) -> Any:
    """The torso named by `net.torso`, or what `given(shape)` returns.

    Raises:
        ConfigError: it cannot be imported, has no `out_features`, or does not fit the observations.
    """
    if given is None:
        name = net.torso if net.torso != "auto" else "nature" if image_like(shape) else "mlp"
        if name == "mlp":
            return MLP(shape, net.hidden, net.activation)
        if name in IMAGES:
            return IMAGES[name](shape)
        path, _, attribute = net.torso.replace(":", ".").rpartition(".")
        try:
            given = getattr(importlib.import_module(path), attribute)
            if not callable(given):
                raise ValueError("not callable")
        except (ImportError, ValueError, AttributeError) as e:
            near = nearest(net.torso, NAMES)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"net.torso: {net.torso!r} is neither one of {', '.join(NAMES)} nor an importable "
                f"'package.module.Torso' ({e}).{hint}"
            ) from None
    torso = given(shape)
    if not isinstance(torso, nn.Module) or not hasattr(torso, "out_features"):
        raise ConfigError(f"net.torso: {net.torso} must return an nn.Module with an attribute out_features")
    return torso


def initialize(policy: Policy, seed: int) -> None:
    """Orthogonal weights, zero biases: gain sqrt(2) in torsos, 0.01 for the policy, 1 for the value.

    (Detail 2 of Huang et al. 2022, "The 37 implementation details of PPO".) Parameters of a torso of
    the user's keep their own initialization, drawn from the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = isinstance(policy.torso, OURS)
    for name, p in policy.named_parameters():
        ours = name.startswith(("pi.", "v.", "core.")) or (plain and "torso." in name)
        if not ours or "norm." in name or name.endswith("distance"):
            continue
        with torch.no_grad():
            if p.dim() < 2:
                p.zero_()
            else:
                gain = 0.01 if name.startswith("pi.") else 1.0 if name[:2] in ("v.", "co") else math.sqrt(2)
                nn.init.orthogonal_(p, gain, generator=generator)


@dataclass(frozen=True)
class Piece:
    """Where a parameter lies in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int


def pieces(policy: nn.Module) -> tuple[list[Piece], int]:
    """The place of each parameter, and the length of the flat vector."""
    found, offset = [], 0
    for name, p in policy.named_parameters():
        found.append(Piece(name, tuple(p.shape), offset))
        offset += -(-p.numel() // ALIGN) * ALIGN
    return found, offset


def flatten(policy: nn.Module) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Make every parameter and its gradient a view of one vector each; returns (weights, gradient).

    Afterwards copying weights is one memcpy and a gradient is one vector. The few elements of padding
    between parameters are always 0.
    """
    places, size = pieces(policy)
    weights, gradient = torch.zeros(size), torch.zeros(size)
    for piece, p in zip(places, policy.parameters(), strict=True):
        span = slice(piece.offset, piece.offset + p.numel())
        weights[span] = p.detach().reshape(-1)
        p.data = weights[span].view(piece.shape)
        p.grad = gradient[span].view(piece.shape)
    return weights.numpy(), gradient.numpy()
