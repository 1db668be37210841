"""Compression of gradients on their way to a server, one compressor a file; its name is its name in `compress`.

A compressor is named by a spec, `NAME[:ARGUMENT][,OPTION...]`: `none`, `float16`, `bfloat16`, `int8`, `qsgd:4`,
`topk:0.01`, `topk:0.01,qsgd:8`, `topk:0.01,feedback=no`, `topk:0.01,momentum=0.9,warmup=20000`. Each file offers
`parse(argument, options)`, which checks them and returns what makes the compressor from a size and a seed.

All take finite gradients and send finite values; an element that is 0 arrives as 0. Numbers travel little-endian.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import unknown


class Compressor(Protocol):
    """One worker's way of sending gradients `[size]`; state (residual, random bits) is the sender's alone."""

    capacity: int
    """The most bytes that `encode` returns."""

    def encode(self, gradient: NDArray[np.float32], steps: int) -> NDArray[np.uint8]:
        """The bytes to send for `gradient` `[n]`, n at most size; `steps`: environment steps of the run so far.

        Moves the state on; leaves `gradient` as it is. The same state and gradient give the same bytes.
        """
        ...

    def decode(self, payload: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Fill `out` `[n]` with what `encode` sent for a gradient of n elements; uses no state."""
        ...

    def save(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """JSON values and arrays from which `restore` goes on bit for bit; copies."""
        ...

    def restore(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Go on from what `save` of a compressor of the same spec and size returned."""
        ...


Make = Callable[[int, np.random.SeedSequence], Compressor]


def make(spec: str, size: int, seed: np.random.SeedSequence) -> Compressor:
    """The compressor named by `spec` for gradients of `size` elements.

    Raises:
        ConfigError: as `check`.
    """
    return parse(spec)(size, seed)


def check(spec: str) -> None:
    """Raise what is wrong with a spec, if anything is.

    Raises:
        ConfigError: names the option `compress`, the value, what is allowed and the nearest valid name.
    """
    parse(spec)


def parse(spec: str) -> Make:
    """What makes the compressor named by `spec`; raises as `check`."""
    head, *options = [part.strip() for part in spec.split(",")]
    name, _, argument = head.partition(":")
    names = [f.stem for f in Path(__file__).parent.glob("*.py") if not f.stem.startswith("_")]
    if name not in names:
        raise unknown("compress", name, names)
    found: Make = importlib.import_module(f"{__name__}.{name}").parse(argument, options)
    return found
