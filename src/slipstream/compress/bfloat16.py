"""bfloat16: the upper half of a float32, rounded to nearest, ties to even; 2 bytes an element.

Relative error at most 2^-8 above 2^-126, absolute error at most 2^-134 below. What would round to infinity is
sent as the greatest finite value (about 3.39e38).
"""

from __future__ import annotations

from typing import Any

from slipstream.compress._bits import bare
from slipstream.compress.float16 import Float16


class BFloat16(Float16):
    """Sends the upper 16 bits."""

    greatest = 3.3895313892515355e38

    @staticmethod
    def type(torch: Any) -> Any:
        """What is sent."""
        return torch.bfloat16


def parse(argument: str, options: list[str]) -> type[BFloat16]:
    """`bfloat16`.

    Raises:
        ConfigError: it takes no argument.
    """
    bare("bfloat16", argument, options)
    return BFloat16
