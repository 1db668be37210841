"""QSGD (Alistarh et al. 2017, arXiv 1610.02132): stochastic rounding to levels of the L2 norm of each bucket of 512.

`qsgd:b` sends b bits an element, the sign included: s = 2^(b-1) - 1 levels a side. Unbiased. Integers have a fixed
width here; the Elias code of the paper pays only for very few levels.
"""

from __future__ import annotations

from functools import partial

from slipstream.compress._quantize import Quantizer
from slipstream.errors import ConfigError


def parse(argument: str, options: list[str]) -> partial[Quantizer]:
    """`qsgd:BITS`.

    Raises:
        ConfigError: not 2 to 8 bits, or options were given.
    """
    if options:
        raise ConfigError(f"compress: qsgd takes no options, got {', '.join(options)!r}; use 'qsgd:BITS', as 'qsgd:4'")
    if argument not in {str(b) for b in range(2, 9)}:
        raise ConfigError(f"compress: 'qsgd:{argument}' needs a whole number of bits from 2 to 8, as 'qsgd:4'")
    return partial(Quantizer, int(argument), "l2", 512)
