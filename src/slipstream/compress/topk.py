"""topk: only the elements of greatest magnitude are sent; what is not sent is kept and added to the next gradient.

`topk:RATIO[,OPTION...]` sends exactly k = RATIO * size elements (rounded, at least 1), zeros if there is nothing else;
of equal magnitudes those that come first. Bytes: 8, then 1 to 2 for the position of each, or a bit for each
element of the gradient where that is less, then their values.

- Error feedback (Stich et al. 2018, arXiv 1809.07599, algorithm 1; Karimireddy et al. 2019, arXiv 1901.09847):
  e <- e + g; send top_k(e); e <- e - sent. `feedback=no` keeps nothing, and is worse.
- `momentum=m` corrects momentum for sparse updates (Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887,
  section 3.2 and algorithm 1): u <- m u + g; v <- v + u; send top_k(v); what is sent leaves v, and u is set
  to 0 there. It takes the place of the optimizer's momentum: meant for `sgd`.
- `warmup=N` (the same, section 3.3): over the first N environment steps the share sent falls exponentially from
  25 % to RATIO.
- A compressor without options (`float16`, `qsgd:8`, ...) sends the values; what it rounds off stays in the residual.

What holds bit for bit, element by element, in float32: after a call e = (e_before + g) - sent. With float32
values, and with float16 ones up to 65504, that difference is itself exact, so e + sent = e_before + g.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import compress
from slipstream.compress import _positions as positions
from slipstream.compress._bits import MAX, Bytes, Floats
from slipstream.errors import ConfigError, unknown

START = 0.25
"""Share sent when a warm-up begins."""
HEAD = 8
"""Bytes before the positions: k and the number of bytes of the positions, both uint32."""
OPTIONS = ("feedback", "momentum", "warmup")


@dataclass(frozen=True)
class Settings:
    """What a spec asks for."""

    ratio: float
    values: str = "none"
    feedback: bool = True
    momentum: float = 0.0
    warmup: int = 0

    def count(self, size: int, steps: int) -> int:
        """k for a gradient of `size` elements after `steps` environment steps."""
        ratio = self.ratio
        if ratio < START and steps < self.warmup:
            ratio = START * (ratio / START) ** (max(0, steps) / self.warmup)
        return max(1, min(size, round(ratio * size)))


class TopK:
    """Keeps the residual `[size]` and, with momentum, the velocity `[size]`."""

    def __init__(self, settings: Settings, size: int, seed: np.random.SeedSequence) -> None:
        self.settings, self.size = settings, size
        most = settings.count(size, 0)
        self.values = compress.make(settings.values, most, seed)
        self.capacity = HEAD + positions.length(size, most) + self.values.capacity
        self.residual = np.zeros(size if settings.feedback else 0, np.float32)
        self.velocity = np.zeros(size if settings.momentum else 0, np.float32)
        self.magnitude = np.empty(size, np.float32)

    def encode(self, gradient: Floats, steps: int) -> Bytes:
        """Positions and values of the greatest elements of gradient and residual together."""
        total = self.add(gradient)
        np.abs(total, out=self.magnitude)
        where = positions.greatest(self.magnitude, self.settings.count(self.size, steps))
        value = np.clip(total[where], -MAX, MAX)
        sent = self.values.encode(value, steps)
        if self.settings.feedback:
            received = np.empty_like(value)
            self.values.decode(sent, received)
            total[where] = value - received
        if self.settings.momentum:
            self.velocity[where] = 0
        code = positions.write(where, self.size)
        head = np.array([len(where), len(code)], np.uint32)
        return np.concatenate((head.view(np.uint8), code, sent))

    def add(self, gradient: Floats) -> Floats:
        """The vector to choose from: the residual with the gradient, or the velocity, added."""
        if not self.settings.feedback:
            return gradient
        with np.errstate(over="ignore"):  # sent as the greatest float32
            if self.settings.momentum:
                self.velocity *= np.float32(self.settings.momentum)
                self.velocity += gradient
                self.residual += self.velocity
            else:
                self.residual += gradient
        return self.residual

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Zeros but for the elements sent."""
        k, size = (int(x) for x in payload[:HEAD].view(np.uint32))
        where = positions.read(payload[HEAD : HEAD + size], len(out), k)
        value = np.empty(k, np.float32)
        self.values.decode(payload[HEAD + size :], value)
        out[:] = 0
        out[where] = value

    def save(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Residual, velocity, and the state of what sends the values (which has no arrays)."""
        return self.values.save()[0], {"residual": self.residual.copy(), "velocity": self.velocity.copy()}

    def restore(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Go on."""
        self.residual[:], self.velocity[:] = arrays["residual"], arrays["velocity"]
        self.values.restore(values, {})


def parse(argument: str, options: list[str]) -> partial[TopK]:
    """`topk:RATIO`, options in any order.

    Raises:
        ConfigError: names what is wrong and what is allowed.
    """
    found: dict[str, Any] = {"ratio": number("topk ratio", argument, 0, 1, "above 0 and at most 1")}
    if found["ratio"] == 0:
        raise ConfigError("compress: topk ratio '0' is not above 0 and at most 1, as 'topk:0.01'")
    for option in options:
        name, equals, value = option.partition("=")
        if equals and name not in OPTIONS:
            raise unknown("compress: option of topk", name, OPTIONS)
        field = name if equals else "values"
        if field in found:
            raise ConfigError(f"compress: topk is given {field} twice, the second time by {option!r}")
        found[field] = READ[field](value if equals else option)
    settings = Settings(**found)
    if settings.momentum and not settings.feedback:
        raise ConfigError("compress: momentum of topk lives in what is kept, so it needs 'feedback=yes'")
    return partial(TopK, settings)


def number(what: str, text: str, low: float, high: float, allowed: str) -> float:
    """A number from a spec."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"compress: {what} {text!r} is not a number {allowed}, as 'topk:0.01,momentum=0.9'")
    return value


def feedback(text: str) -> bool:
    """`yes` or `no`."""
    if text not in ("yes", "no"):
        raise unknown("compress: feedback", text, ("yes", "no"))
    return text == "yes"


def momentum(text: str) -> float:
    """From 0 to below 1."""
    return number("momentum", text, 0, 1 - 1e-9, "from 0 to below 1")


def warmup(text: str) -> int:
    """Environment steps."""
    if not text.isdecimal():
        raise ConfigError(f"compress: warmup {text!r} is not a whole number of environment steps, as 'warmup=20000'")
    return int(text)


def values(text: str) -> str:
    """A compressor that is not `topk` again."""
    if text.partition(":")[0] in OPTIONS:
        raise ConfigError(f"compress: option {text!r} of topk needs a value, as 'momentum=0.9'")
    if text.partition(":")[0] == "topk":
        raise ConfigError(f"compress: {text!r} cannot send the values of topk; one of none, float16, int8, qsgd:8 can")
    compress.check(text)
    return text


READ = {"feedback": feedback, "momentum": momentum, "warmup": warmup, "values": values}
