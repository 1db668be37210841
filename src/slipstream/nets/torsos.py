"""Torsos: observations `[N, *shape]` to features `[N, out_features]`. Floats as they come, uint8 images as bytes.

Bytes are scaled to [0, 1] by dividing the first layer's weights, not the images: that is thousands of numbers
instead of millions, and 0 … 255 are exact in bfloat16 too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.errors import ConfigError

SMALLEST = 36  # pixels a side below which the convolutions have nothing left


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
        self.channels, height, width, self.last = _image(shape)
        before, made = self.channels, []
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
        self.channels, height, width, self.last = _image(shape)
        before = self.channels
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
    return len(shape) == 3 and (
        (shape[0] <= 16 and min(shape[1:]) >= SMALLEST) or (shape[2] <= 16 and min(shape[:2]) >= SMALLEST)
    )


def _image(shape: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """(channels, height, width, whether channels come last)."""
    if not image_like(shape):
        raise ConfigError(
            f"net.torso: convolutions need images of at least {SMALLEST}x{SMALLEST} pixels and at most 16 channels, "
            f"observations are {shape}; use --net.torso mlp"
        )
    last = not (shape[0] <= 16 and min(shape[1:]) >= SMALLEST)
    return (shape[2], shape[0], shape[1], True) if last else (shape[0], shape[1], shape[2], False)


def _prepare(x: Tensor, last: bool) -> tuple[Tensor, float]:
    """Channels first, as floats of the kind the convolutions compute with, and the factor still to be applied."""
    if last:
        x = x.permute(0, 3, 1, 2)
    if x.dtype != torch.uint8:
        return x, 1.0
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    return x.to(kind), 1.0 / 255.0


def _scaled(layer: nn.Module, x: Tensor, scale: float) -> Tensor:
    """`layer(scale * x)` of a convolution, by scaling its weights."""
    if scale == 1.0:
        y: Tensor = layer(x)
        return y
    conv: nn.Conv2d = layer  # type: ignore[assignment]
    return F.conv2d(x, conv.weight * scale, conv.bias, conv.stride, conv.padding)
