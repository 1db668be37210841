"""bfloat16: the upper half of a float32, rounded to nearest, ties to even; 2 bytes an element.

Relative error at most 2^-8 above 2^-126, absolute error at most 2^-134 below. What would round to infinity is
sent as the greatest finite value (about 3.39e38).
"""

from __future__ import annotations

import numpy as np

from slipstream.compress._bits import BLOCK, Bytes, Floats, Stateless, bare, blocks

INFINITY = np.uint16(0x7F80)  # its bits; one less are those of the greatest finite value


class BFloat16(Stateless):
    """Sends the upper 16 bits."""

    def __init__(self, size: int, seed: np.random.SeedSequence) -> None:
        self.capacity = 2 * size
        self.odd, self.sum = np.empty((2, min(size, BLOCK)), np.uint32)

    def encode(self, gradient: Floats, steps: int) -> Bytes:
        """2 bytes an element."""
        bits, sent = gradient.view(np.uint32), np.empty(len(gradient), np.uint16)
        for part in blocks(len(gradient)):
            x, out = bits[part], sent[part]
            odd, total = self.odd[: len(x)], self.sum[: len(x)]
            np.right_shift(x, 16, out=odd)
            odd &= np.uint32(1)
            odd += np.uint32(0x7FFF)  # half a unit, less a bit when the last kept bit is even
            np.add(x, odd, out=total)
            total >>= np.uint32(16)
            np.copyto(out, total, casting="unsafe")
            out -= (out & np.uint16(0x7FFF)) == INFINITY
        return sent.view(np.uint8)

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Exact."""
        bits = out.view(np.uint32)
        halves = payload.view(np.uint16)
        for part in blocks(len(out)):
            bits[part] = halves[part]
            bits[part] <<= np.uint32(16)


def parse(argument: str, options: list[str]) -> type[BFloat16]:
    """`bfloat16`.

    Raises:
        ConfigError: it takes no argument.
    """
    bare("bfloat16", argument, options)
    return BFloat16
