"""Torsos: observations `[N, *shape]` to features `[N, out_features]`. Floats as they come, uint8 images as bytes.

Images are scaled to [0, 1] by dividing the first layer's weights: thousands of numbers instead of millions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError

SMALLEST = 36  # pixels a side below which the convolutions have nothing left
MOST_CHANNELS = 16


class MLP(nn.Module):
    """Fully connected torso; uint8 input is scaled to [0, 1] here."""

    def __init__(self, shape: tuple[int, ...], hidden: tuple[int, ...], activation: str) -> None:
        super().__init__()
        sizes = [math.prod(shape), *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = torch.tanh if activation == "tanh" else torch.relu
        self.activation_name = activation
        self.out_features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of observations."""
        x = x.flatten(1).float() / 255.0 if x.dtype == torch.uint8 else x.flatten(1)
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class Convolutions(nn.Module):
    """Convolutions with ReLU, then a fully connected layer with ReLU."""

    def __init__(
        self, shape: tuple[int, ...], layers: tuple[tuple[int, int, int], ...], features: int
    ) -> None:  # fmt: skip
        """`layers`: (channels, kernel, stride) of each convolution."""
        super().__init__()
        before, height, width, self.last = _image(shape)
        made = []
        for channels, kernel, stride in layers:
            made.append(nn.Conv2d(before, channels, kernel, stride))
            height, width, before = (height - kernel) // stride + 1, (width - kernel) // stride + 1, channels
        self.layers = nn.ModuleList(made)
        self.fc = nn.Linear(before * height * width, features)
        self.out_features = features

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of images."""
        x, scale = _prepare(x, self.last)
        for i, layer in enumerate(self.layers):
            x = torch.relu_(_scaled(layer, x, scale if i == 0 else 1.0))
        return torch.relu(self.fc(x.flatten(1)))


class Residual(nn.Module):
    """IMPALA's deep network: three sections of a convolution, a max-pool and two residual blocks (fig. 3)."""

    def __init__(self, shape: tuple[int, ...], depths: tuple[int, ...] = (16, 32, 32), features: int = 256) -> None:
        super().__init__()
        before, height, width, self.last = _image(shape)
        entries: list[nn.Module] = []
        blocks: list[nn.Module] = []
        for depth in depths:
            entries.append(nn.Conv2d(before, depth, 3, padding=1))
            blocks.extend(nn.Conv2d(depth, depth, 3, padding=1) for _ in range(4))
            height, width, before = -(-height // 2), -(-width // 2), depth
        self.entries, self.blocks = nn.ModuleList(entries), nn.ModuleList(blocks)
        self.fc = nn.Linear(before * height * width, features)
        self.out_features = features

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of images."""
        x, scale = _prepare(x, self.last)
        for i, entry in enumerate(self.entries):
            x = _scaled(entry, x, scale if i == 0 else 1.0)
            x = F.max_pool2d(x, 3, 2, padding=1)
            for first, second in zip(
                self.blocks[4 * i : 4 * i + 4 : 2], self.blocks[4 * i + 1 : 4 * i + 4 : 2], strict=True
            ):
                x = x + second(torch.relu(first(torch.relu(x))))
        return torch.relu(self.fc(torch.relu(x).flatten(1)))


IMAGES: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    # Mnih et al. 2015, "Human-level control through deep reinforcement learning"
    "nature": lambda shape: Convolutions(shape, ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512),
    # Mnih et al. 2016 with twice the channels
    "a3c": lambda shape: Convolutions(shape, ((32, 8, 4), (64, 4, 2)), 256),
    # Espeholt et al. 2018, fig. 3, right
    "impala": Residual,
}
NAMES = ("auto", "mlp", *IMAGES)
OURS = (MLP, Convolutions, Residual)


def image_like(shape: tuple[int, ...]) -> bool:
    """Whether observations of this shape are images large enough for convolutions."""
    return _layout(shape) is not None


def _layout(shape: tuple[int, ...]) -> tuple[int, int, int, bool] | None:
    """(channels, height, width, whether channels come last) of images, channels first if both would do."""
    if len(shape) == 3:
        for (channels, height, width), last in ((shape, False), ((shape[2], *shape[:2]), True)):
            if channels <= MOST_CHANNELS and min(height, width) >= SMALLEST:
                return channels, height, width, last
    return None


def _image(shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
    found = _layout(shape)
    if found is None:
        raise ConfigError(
            f"net.torso: convolutions need images of at least {SMALLEST}x{SMALLEST} pixels and at most "
            f"{MOST_CHANNELS} channels, observations are {shape}; use --net.torso mlp"
        )
    return found


def _prepare(x: Tensor, last: bool) -> tuple[Tensor, float]:
    """Floats with channels first, and the factor still to be applied."""
    if last:
        x = x.permute(0, 3, 1, 2)
    return (x.float(), 1.0 / 255.0) if x.dtype == torch.uint8 else (x, 1.0)


def _scaled(layer: nn.Module, x: Tensor, scale: float) -> Tensor:
    """`layer(scale * x)` of a convolution, by scaling its weights."""
    if scale == 1.0:
        y: Tensor = layer(x)
        return y
    conv = cast(nn.Conv2d, layer)
    return F.conv2d(x, conv.weight * scale, conv.bias, conv.stride, conv.padding)
