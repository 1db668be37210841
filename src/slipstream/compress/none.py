"""No compression: the float32 values themselves, 4 bytes an element."""

from __future__ import annotations

import numpy as np

from slipstream.compress._bits import Bytes, Floats, Stateless, bare


class NoCompression(Stateless):
    """Sends a copy of the gradient."""

    def __init__(self, size: int, seed: np.random.SeedSequence) -> None:
        self.capacity = 4 * size

    def encode(self, gradient: Floats, steps: int) -> Bytes:
        """4 bytes an element."""
        return gradient.copy().view(np.uint8)

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Bit for bit what was sent."""
        out.view(np.uint8)[:] = payload


def parse(argument: str, options: list[str]) -> type[NoCompression]:
    """`none`.

    Raises:
        ConfigError: it takes no argument.
    """
    bare("none", argument, options)
    return NoCompression
