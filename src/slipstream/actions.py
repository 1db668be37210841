"""What actions look like, and how they are drawn from a network's output: the acting side, in NumPy.

Parameters are the last axis: logits for choices (one block after the other for several), means then log
standard deviations for Gaussian ones. The learning side is nets/heads.py. No torch here: the supervising
process imports this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MASKED = -1e9  # finite, so that masked rows give no NaN


@dataclass(frozen=True)
class Head:
    """What actions look like.

    Attributes:
        kind: `categorical` (one choice), `multi` (several) or `gaussian`.
        sizes: choices of each component; for `gaussian` one 1 for each dimension.
    """

    kind: Literal["categorical", "multi", "gaussian"]
    sizes: tuple[int, ...]

    @property
    def outputs(self) -> int:
        """Outputs of the policy's last layer (log standard deviations are not among them)."""
        return sum(self.sizes)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action: () for a single choice, else (components,)."""
        return () if self.kind == "categorical" else (len(self.sizes),)

    @property
    def action_dtype(self) -> type:
        """Type in which actions are stored."""
        return np.float32 if self.kind == "gaussian" else np.int64


def sample(head: Head, params: Array, rng: np.random.Generator, mask: Array | None = None) -> Array:
    """Draw actions `[B, ...]` from parameters `[B, P]` (Gumbel-max for choices)."""
    if head.kind == "gaussian":
        mean, log_std = np.split(params, 2, -1)
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        return np.asarray(mean + np.exp(log_std) * noise)
    noisy = params + rng.gumbel(size=params.shape)
    return _choose(head, noisy, mask)


def mode(head: Head, params: Array, mask: Array | None = None) -> Array:
    """The most likely actions `[B, ...]`."""
    if head.kind == "gaussian":
        return np.split(params, 2, -1)[0]
    return _choose(head, params, mask)


def _choose(head: Head, scores: Array, mask: Array | None) -> Array:
    if mask is not None:
        scores = np.where(mask, scores, MASKED * 10)
    if head.kind == "categorical":
        return np.asarray(scores.argmax(-1))
    parts = np.split(scores, np.cumsum(head.sizes)[:-1], -1)
    return np.stack([p.argmax(-1) for p in parts], -1)
