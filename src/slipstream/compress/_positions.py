"""Which k of n elements: finding the greatest magnitudes, and writing their positions in few bytes."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from slipstream.compress._bits import Bytes, Floats

Positions = NDArray[np.intp]

SAMPLE = 32_768
"""Magnitudes that the threshold is guessed from; of shorter vectors, all."""


@cache
def places(n: int) -> Positions:
    """Where an n-vector is sampled: at random, as a stride could fall in with a layer's width; always the same."""
    return np.random.default_rng(0).integers(0, n, SAMPLE)


def greatest(magnitude: Floats, k: int) -> Positions:
    """Positions, ascending, of exactly the k greatest of `magnitude` `[n]`; of equals, those that come first.

    The threshold guessed from a sample (Lin et al. 2018, section 5) lets about k and three standard deviations of
    the guess pass; among those the exact one is found. A guess too high, about one in a thousand, is replaced by
    the exact threshold of all.
    """
    n = len(magnitude)
    if k >= n:
        return np.arange(n, dtype=np.intp)
    found = passing(magnitude, guess(magnitude, k))
    if len(found) < k:
        found = passing(magnitude, np.partition(magnitude, n - k)[n - k])
    if len(found) < k:  # not so many differ from zero: the first zeros make up the number
        return np.sort(np.concatenate((found, np.flatnonzero(magnitude[:k] == 0)[: k - len(found)])))
    value = magnitude[found]
    cut = np.partition(value, len(value) - k)[len(value) - k]
    keep = value > cut
    keep[np.flatnonzero(value == cut)[: k - np.count_nonzero(keep)]] = True
    chosen: Positions = found[keep]
    return chosen


def guess(magnitude: Floats, k: int) -> np.float32:
    """A threshold that at least k elements reach, nearly always."""
    n = len(magnitude)
    if n <= SAMPLE:
        threshold: np.float32 = np.partition(magnitude, n - k)[n - k]
        return threshold
    expected = k / n * SAMPLE
    rank = int(expected + 3 * expected**0.5 + 1)
    if rank >= SAMPLE:
        return np.float32(0)
    threshold = np.partition(magnitude[places(n)], SAMPLE - rank)[SAMPLE - rank]
    return threshold


def passing(magnitude: Floats, threshold: np.float32) -> Positions:
    """Positions that reach a threshold; zeros never do."""
    return np.flatnonzero(magnitude >= threshold if threshold > 0 else magnitude > 0)


# -- positions as bytes --------------------------------------------------------------------------------


def length(n: int, k: int) -> int:
    """The most bytes that k positions of n take."""
    return min(-(-n // 8), k + n // 255, 2 * (k + n // 65535))


def layout(n: int, k: int) -> type[np.uint8] | type[np.uint16] | None:
    """The cheapest in the worst case: gaps in one byte, gaps in two, or None, a bit for each element."""
    if -(-n // 8) == length(n, k):
        return None
    return np.uint8 if k + n // 255 == length(n, k) else np.uint16


def write(positions: Positions, n: int) -> Bytes:
    """Ascending positions below n as bytes.

    A gap is the number of elements passed over. One unit holds up to its greatest value less one; the greatest says
    "as many, and no element yet". At 1 % one byte is enough for 12 gaps of 13.
    """
    kind = layout(n, len(positions))
    if kind is None:
        chosen = np.zeros(n, np.bool_)
        chosen[positions] = True
        return np.packbits(chosen, bitorder="little")
    top = np.iinfo(kind).max
    more, rest = np.divmod(np.diff(positions, prepend=-1) - 1, top)
    ends = np.cumsum(more + 1) - 1
    units = np.full(ends[-1] + 1, top, kind)
    units[ends] = rest
    return units.view(np.uint8)


def read(code: Bytes, n: int, k: int) -> Positions:
    """The k positions that `write` wrote."""
    kind = layout(n, k)
    if kind is None:
        return np.flatnonzero(np.unpackbits(code, count=n, bitorder="little"))
    units = code.view(kind)
    passed: Positions = np.cumsum(units, dtype=np.intp)[units != np.iinfo(kind).max]
    passed += np.arange(k)
    return passed
