"""Stochastic quantization by buckets (Alistarh et al. 2017, arXiv 1610.02132, section 3.1).

Of a bucket v of elements a step is sent in float32, and of each element an integer l with E[l step] = v_i:
v_i / step is rounded up with the probability of its fraction. s levels a side; step = norm(v) / s, where the norm
is that of the paper (`l2`) or the greatest magnitude (`max`), whose steps, and so whose variance, are never greater.
Either way the variance of a bucket of n is at most min(n / s^2, sqrt(n) / s) ||v||^2 (lemma 3.1).

Details that the maths leaves open:
- rounding is floor(v_i / step + r) with r uniform on the multiples of 2^-16 below 1. The r are read from a pool drawn
  anew for each gradient, from a random place for each piece of 65,536 elements: each r by itself is uniform,
  which is all that mean and variance ask for. The bias is at most 2^-16 of a step;
- the step is 2^-21 greater than norm / s, so that float32 rounding cannot give a level above s. Sender and receiver
  use the same float32 step, so this adds no bias;
- norms that float32 cannot square are taken in float64; a step beyond float32 becomes its greatest value, which no
  element exceeds; a received value beyond float32 saturates;
- a bucket whose norm is below 2^-100 is sent as zeros.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.compress._bits import BLOCK, MAX, Bytes, Floats, pack, packed, unpack

POOL = BLOCK + BLOCK // 4
LEAST = 2.0**-100
Norm = Literal["l2", "max"]


class Quantizer:
    """Sends `bits` bits an element (sign included) and 4 bytes a bucket."""

    def __init__(self, bits: int, norm: Norm, bucket: int, size: int, seed: np.random.SeedSequence) -> None:
        """`bucket`: its elements; a power of 2, so that a block holds whole buckets."""
        self.bits, self.norm, self.bucket, self.levels = bits, norm, bucket, 2 ** (bits - 1) - 1
        self.capacity = self.length(size)
        self.generator = np.random.PCG64(seed)
        self.scaled = np.empty(min(BLOCK, -(-size // bucket) * bucket), np.float32)

    def length(self, n: int) -> int:
        """Bytes sent for n elements."""
        return 4 * -(-n // self.bucket) + packed(n, self.bits)

    def encode(self, gradient: Floats, steps: int) -> Bytes:
        """`length(n)` bytes: the steps of all buckets, then the packed levels."""
        n, buckets = len(gradient), -(-len(gradient) // self.bucket)
        out = np.empty(4 * buckets + buckets * self.bucket, np.uint8)
        sizes, levels = out[: 4 * buckets].view(np.float32), out[4 * buckets :]
        pool = self.pool(min(POOL, 2 * len(levels)))
        starts = self.generator.random_raw(-(-n // BLOCK))
        for start, random in zip(range(0, n, BLOCK), starts, strict=True):
            x = gradient[start : start + BLOCK]
            if len(x) % self.bucket:
                x = np.concatenate((x, np.zeros(-len(x) % self.bucket, np.float32)))
            step = sizes[start // self.bucket :][: len(x) // self.bucket]
            step[:] = self.step(x)
            at = int(random) % (len(pool) - len(x) + 1)
            self.round(x, step, pool[at : at + len(x)], levels[start : start + len(x)])
        whole = -(-n // 8) * 8
        if self.bits == 8:
            return out[: 4 * buckets + whole]
        return np.concatenate((out[: 4 * buckets], pack(levels[:whole], self.bits)))

    def pool(self, n: int) -> Floats:
        """`[n]` of 2^(bits-1) + r, r uniform on [0, 1)."""
        out: Floats = self.generator.random_raw(-(-n // 4)).view(np.uint16)[:n].astype(np.float32)
        out *= np.float32(2.0**-16)
        out += np.float32(2 ** (self.bits - 1))
        return out

    def step(self, x: Floats) -> NDArray[np.float64]:
        """The step of each bucket of `x`."""
        if self.norm == "max":
            magnitude = np.abs(x, out=self.scaled[: len(x)])
            norm = np.maximum.reduceat(magnitude, np.arange(0, len(x), self.bucket)).astype(np.float64)
        else:
            rows = x.reshape(-1, self.bucket)
            with np.errstate(over="ignore"):
                squares = np.einsum("ij,ij->i", rows, rows)
            norm = np.sqrt(squares, dtype=np.float64)
            rough = ~((squares > 1e-30) & (squares < 1e38))
            if rough.any():
                norm[rough] = np.linalg.norm(rows[rough].astype(np.float64), axis=1)
        norm[norm < LEAST] = 0
        step: NDArray[np.float64] = np.minimum(norm * ((1 + 2.0**-21) / self.levels), MAX)
        return step

    def round(self, x: Floats, step: Floats, noise: Floats, levels: Bytes) -> None:
        """Levels of `x`, 2^(bits-1) standing for 0, in units of `step` of each bucket."""
        y = self.scaled[: len(x)]
        scale = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        np.multiply(x.reshape(-1, self.bucket), scale[:, None], out=y.reshape(-1, self.bucket))
        y += noise
        np.copyto(levels, y, casting="unsafe")  # never negative: truncation is floor

    def decode(self, payload: Bytes, out: Floats) -> None:
        """Levels times steps."""
        n, buckets = len(out), -(-len(out) // self.bucket)
        step = payload[: 4 * buckets].view(np.float32)
        levels = (unpack(payload[4 * buckets :], self.bits) - np.uint8(2 ** (self.bits - 1))).view(np.int8)
        full = n // self.bucket * self.bucket
        with np.errstate(over="ignore"):
            for start in range(0, full, BLOCK):
                x = out[start : min(full, start + BLOCK)]
                x[:] = levels[start : start + len(x)]
                rows = x.reshape(-1, self.bucket)
                rows *= step[start // self.bucket :][: len(rows), None]
            if full < n:
                out[full:] = levels[full:n] * step[-1]
        if step.max(initial=0) > MAX / (self.levels + 1):
            np.clip(out, -MAX, MAX, out=out)

    def save(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The state of the generator."""
        return {"generator": self.generator.state}, {}

    def restore(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Go on with the same random bits."""
        self.generator.state = values["generator"]
