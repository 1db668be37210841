"""float16 (IEEE binary16), rounded to nearest, ties away from zero; 2 bytes an element.

Relative error at most 2^-11 from 2^-14 on, absolute error at most 2^-25 (1 + 2^-12) below: the latter is where two
roundings meet. Values beyond 65504 are sent as 65504, never as infinity.

NumPy's own cast takes 5 to 10 ns an element where it is not compiled for F16C, which stock wheels are not. Here a
multiplication by 2^-112 moves the exponents of float32 onto those of float16, subnormal numbers included; then the
bits only have to be rounded and moved. It needs the processor's subnormal numbers: a thread that has them
flushed to zero (`torch.set_flush_denormal`) sends values below 2^-14 as 0.
"""

from __future__ import annotations

import numpy as np

from slipstream.compress._bits import BLOCK, Bytes, Floats, Stateless, bare, blocks

GREATEST = np.float32(65504)
DOWN, UP = np.float32(2.0**-112), np.float32(2.0**112)


class Float16(Stateless):
    """Sends float16."""

    def __init__(self, size: int, seed: np.random.SeedSequence) -> None:
        self.capacity = 2 * size
        self.scaled = np.empty(min(size, BLOCK), np.float32)
        self.sign = np.empty(min(size, BLOCK), np.uint16)
        self.negative = np.empty(min(size, BLOCK), np.bool_)

    def encode(self, gradient: Floats, steps: int) -> Bytes:
        """2 bytes an element."""
        sent = np.empty(len(gradient), np.uint16)
        for part in blocks(len(gradient)):
            x, out = gradient[part], sent[part]
            y, sign, negative = self.scaled[: len(x)], self.sign[: len(x)], self.negative[: len(x)]
            with np.errstate(over="ignore"):
                small = np.dot(x, x) < GREATEST * GREATEST  # the cheapest proof that nothing has to be cut
            np.multiply(x if small else np.clip(x, -GREATEST, GREATEST), DOWN, out=y)
            bits = y.view(np.uint32)
            bits += np.uint32(0x1000)  # half a unit; sign and magnitude do not mix
            bits >>= np.uint32(13)
            np.copyto(out, bits, casting="unsafe")  # leaves the sign out: it is bit 18 now
            np.copyto(sign, np.signbit(x, out=negative))
            sign <<= np.uint16(15)
            out |= sign
        return sent.view(np.uint8)

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Exact."""
        halves, bits = payload.view(np.int16), out.view(np.int32)
        for part in blocks(len(out)):
            b = bits[part]
            b[:] = halves[part]
            b <<= np.int32(13)
            b &= np.int32(-0x70002000)  # 0x8FFFE000: the sign, 5 bits of exponent, 10 of mantissa
            out[part] *= UP


def parse(argument: str, options: list[str]) -> type[Float16]:
    """`float16`.

    Raises:
        ConfigError: it takes no argument.
    """
    bare("float16", argument, options)
    return Float16
