"""bfloat16: the upper half of a float32, rounded to nearest, ties to even; 2 bytes an element.

Relative error at most 2^-8 above 2^-126, absolute error at most 2^-134 below. What would round to infinity is
sent as the greatest finite value (about 3.39e38).
"""

from __future__ import annotations

from functools import partial

from slipstream.compress._bits import bare
from slipstream.compress.float16 import Cast


def parse(argument: str, options: list[str]) -> partial[Cast]:
    """`bfloat16`.

    Raises:
        ConfigError: it takes no argument.
    """
    bare("bfloat16", argument, options)
    return partial(Cast, "bfloat16")
