"""What compressors share: working in pieces that fit the cache, packing small integers, refusing arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK = 65_536
"""Elements worked on at a time, small enough for the cache, large enough that calls cost little (measured)."""
MAX = np.finfo(np.float32).max


class Stateless:
    """A compressor that keeps nothing from one gradient to the next."""

    def save(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Nothing."""
        return {}, {}

    def restore(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Nothing to do."""


def bare(name: str, argument: str, options: list[str]) -> None:
    """Refuse what was given to a compressor that takes nothing.

    Raises:
        ConfigError: an argument or options were given.
    """
    given = [*([f":{argument}"] if argument else []), *options]
    if given:
        raise ConfigError(f"compress: {name} takes no argument and no options, got {', '.join(given)!r}; use {name!r}")


def packed(n: int, bits: int) -> int:
    """Bytes of n integers of `bits` bits each: whole groups of 8."""
    return bits * (-(-n // 8))


def pack(levels: Bytes, bits: int) -> Bytes:
    """`levels [n]`, each below 2^bits, as `packed(n, bits)` bytes; n is a multiple of 8.

    The bits of an integer are split into fields of 4, 2 and 1 (7 = 4 + 2 + 1), and each field is stored as
    planes: 2, 4 or 8 consecutive parts of the vector share a byte. So all work is on contiguous arrays.
    """
    if bits == 8:
        return levels
    out, shift = [], 0
    for width in (4, 2, 1):
        if bits & width:
            planes = ((levels >> np.uint8(shift)) & np.uint8((1 << width) - 1)).reshape(8 // width, -1)
            whole = planes[0]
            for j in range(1, len(planes)):
                whole |= planes[j] << np.uint8(j * width)
            out.append(whole)
            shift += width
    return np.concatenate(out)


def unpack(payload: Bytes, bits: int) -> Bytes:
    """The levels that `pack` packed."""
    if bits == 8:
        return payload
    n, at, shift = len(payload) // bits * 8, 0, 0
    levels = np.zeros(n, np.uint8)
    for width in (4, 2, 1):
        if bits & width:
            planes = levels.reshape(8 // width, -1)
            whole = payload[at : at + planes.shape[1]]
            for j in range(len(planes)):
                field = (whole >> np.uint8(j * width)) & np.uint8((1 << width) - 1)
                planes[j] |= field << np.uint8(shift)
            at += planes.shape[1]
            shift += width
    return levels
