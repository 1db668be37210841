"""Running mean and variance that many workers can add to (Chan, Golub & LeVeque 1979).

A set of moments is one float64 vector `[count, mean (D), sum of squared deviations (D)]`, so it
lives in a parameter slot beside the weights it belongs to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def size(features: int) -> int:
    """Length of the vector that holds the moments of `features` features."""
    return 1 + 2 * features


def of_batch(x: NDArray[np.floating]) -> Vector:
    """Moments of the rows of `x [N, D]`."""
    n, d = x.shape
    out = np.zeros(size(d))
    if n:
        wide = x.astype(np.float64)
        mean = wide.mean(axis=0)
        out[0] = n
        out[1 : 1 + d] = mean
        out[1 + d :] = ((wide - mean) ** 2).sum(axis=0)
    return out


def merge(into: Vector, other: Vector) -> None:
    """Add `other` to `into` in place; the result is that of all rows together."""
    d = (len(into) - 1) // 2
    if other[0] == 0:
        return
    total = into[0] + other[0]
    delta = other[1 : 1 + d] - into[1 : 1 + d]
    into[1 + d :] += other[1 + d :] + delta**2 * (into[0] * other[0] / total)
    into[1 : 1 + d] += delta * (other[0] / total)
    into[0] = total


def mean_and_scale(moments: Vector, floor: float = 1e-8) -> tuple[Vector, Vector]:
    """Mean and 1/std, each `[D]`. A feature that never varied is left unscaled, never divided by 0.

    Before two rows have been seen the scale is 1.
    """
    d = (len(moments) - 1) // 2
    if moments[0] < 2:
        return moments[1 : 1 + d].copy(), np.ones(d)
    variance = moments[1 + d :] / moments[0]
    scale = np.where(variance > floor, 1.0 / np.sqrt(np.maximum(variance, floor)), 1.0)
    return moments[1 : 1 + d].copy(), scale
