"""float16 (IEEE binary16), rounded to nearest, ties to even; 2 bytes an element.

Relative error at most 2^-11 from 2^-14 on, absolute error at most 2^-25 below. Values beyond 65504 are sent as 65504,
never as infinity. The casts are torch's, which uses the processor's instructions; those of stock NumPy wheels do not
and take ten times as long.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from slipstream.compress._bits import Bytes, Floats, Stateless, bare


class Cast(Stateless):
    """Sends a torch type of 16 bits."""

    def __init__(self, kind: str, size: int, seed: np.random.SeedSequence) -> None:
        import torch

        self.capacity = 2 * size
        self.torch, self.kind = torch, getattr(torch, kind)
        self.greatest = torch.finfo(self.kind).max

    def encode(self, gradient: Floats, steps: int) -> Bytes:
        """2 bytes an element."""
        sent = np.empty(len(gradient), np.int16)
        values = self.torch.from_numpy(gradient)
        with np.errstate(over="ignore"):
            small = np.dot(gradient, gradient) < np.float32(self.greatest) ** 2  # then nothing has to be cut
        if not small:
            values = values.clamp(-self.greatest, self.greatest)
        self.torch.from_numpy(sent).view(self.kind).copy_(values)
        return sent.view(np.uint8)

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Exact."""
        self.torch.from_numpy(out).copy_(self.torch.from_numpy(payload.view(np.int16)).view(self.kind))


def parse(argument: str, options: list[str]) -> partial[Cast]:
    """`float16`.

    Raises:
        ConfigError: it takes no argument.
    """
    bare("float16", argument, options)
    return partial(Cast, "float16")
