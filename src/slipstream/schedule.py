"""Learning rate and entropy bonus as functions of global environment steps.

They never count a worker's own steps and keep no state, so a resumed run continues exactly
where it was.
"""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


def scheduled(initial: float, shape: Shape, steps: int, horizon: int) -> float:
    """Value at `steps` global environment steps.

    Args:
        initial: value at step 0.
        shape: `constant`, or `linear` / `cosine` decay to 0 at `horizon`.
        steps: environment steps taken by all workers together.
        horizon: steps at which a decaying schedule reaches 0; it stays there.
    """
    if shape == "constant":
        return initial
    left = max(0.0, 1.0 - steps / max(1, horizon))
    if shape == "linear":
        return initial * left
    return initial * 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
