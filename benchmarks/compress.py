"""What compressing gradients costs and saves, against the work of the update they belong to; all in one run, in turn.

    python benchmarks/compress.py           10,000 and 1,700,000 weights, about 50 s
    python benchmarks/compress.py --quick   fewer and shorter repeats
    python benchmarks/compress.py --json    one JSON object

The work of an update: forward and backward of an MLP with as many weights (two hidden layers, tanh) over 128 rows, a
`torch.optim.Adam(fused=True).step()` on one flat parameter, and a copy of weights and optimizer state (a slot).
One thread. Added CPU share: (encode + decode) / (gradient + update), ratio by ratio of the repeats.
Targets at 1,700,000 weights: float16 and int8 below 10 %, topk:0.01 below 30 %; 40 times fewer bytes with topk:0.01 at
both sizes. Every number is the median of the repeats, with their least and greatest in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
from store import about, aligned, number, spread, timed

from slipstream.compress import Compressor, make
from slipstream.cores import SINGLE_THREADED

SIZES = (10_000, 1_700_000)
ROWS = 128
SPECS = (
    "none", "float16", "bfloat16", "int8", "qsgd:4", "topk:0.01", "topk:0.01,float16", "topk:0.01,qsgd:8",
    "topk:0.01,momentum=0.9", "topk:0.01,feedback=no",
)  # fmt: skip
SHARES = {"float16": 0.10, "int8": 0.10, "topk:0.01": 0.30}
FEWER = {"topk:0.01": 40}


def gradient_of(size: int) -> tuple[Callable[[], None], int]:
    """Forward and backward over `ROWS` rows of an MLP of about `size` weights; and its weights."""
    import torch
    from torch import nn

    inputs, outputs = (8, 4) if size < 100_000 else (128, 16)
    around = inputs + outputs + 2
    width = round((-around + (around**2 + 4 * size) ** 0.5) / 2)
    net = nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )
    x = torch.randn(ROWS, inputs)

    def gradient() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    return gradient, sum(p.numel() for p in net.parameters())


def update_of(size: int) -> Callable[[], None]:
    """One Adam step on `size` weights, and the copy of a slot."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros(size))
    parameter.grad = torch.randn(size)
    optimizer = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    here, there = aligned(3 * size), aligned(3 * size)

    def update() -> None:
        np.copyto(there, here)
        optimizer.step()

    return update


def sides_of(compressor: Compressor, size: int) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Encode, decode, and the bytes of a gradient once the residual has filled."""
    rng, out = np.random.default_rng(0), aligned(size)
    gradients = [aligned(size) for _ in range(3)]
    for g in gradients:
        g[:] = 1e-3 * rng.normal(size=size)
    following = cycle(gradients)
    for _ in range(10):
        payload = compressor.encode(next(following), 0)

    def encode() -> None:
        compressor.encode(next(following), 0)

    def decode() -> None:
        compressor.decode(payload, out)

    return encode, decode, len(payload)


def measure(size: int, repeats: int, seconds: float) -> dict[str, Any]:
    """All compressors at one size."""
    gradient, weights = gradient_of(size)
    sides: dict[str, Callable[[], None]] = {"gradient": gradient, "update": update_of(size)}
    sent: dict[str, int] = {}
    for spec in SPECS:
        both = sides_of(make(spec, size, np.random.SeedSequence(0)), size)
        sides[f"encode {spec}"], sides[f"decode {spec}"], sent[spec] = both
    times = timed(sides, repeats, seconds)
    work = [g + u for g, u in zip(times["gradient"], times["update"], strict=True)]
    found: dict[str, Any] = {
        "network_weights": weights,
        "gradient_us": spread(times["gradient"]),
        "update_us": spread(times["update"]),
        "compressors": {},
    }
    for spec in SPECS:
        encode, decode = times[f"encode {spec}"], times[f"decode {spec}"]
        share = spread([(e + d) / w for e, d, w in zip(encode, decode, work, strict=True)])
        fewer = 4 * size / sent[spec]
        row = {"bytes": sent[spec], "fewer": fewer, "encode_us": spread(encode), "decode_us": spread(decode)}
        row |= {"share": share, "met": {}}
        if spec in SHARES and size == max(SIZES):
            row["met"][f"share below {SHARES[spec]:.0%}"] = share["median"] < SHARES[spec]
        if spec in FEWER:
            row["met"][f"{FEWER[spec]} times fewer bytes"] = fewer >= FEWER[spec]
        found["compressors"][spec] = row
    return found


def show(size: int, found: dict[str, Any], repeats: int) -> None:
    """The table of one size."""
    print(f"\n{size:,} weights, {repeats} repeats; microseconds")
    print(f"gradient{number(found['gradient_us'])} (an MLP of {found['network_weights']:,} weights, {ROWS} rows)")
    print(f"update  {number(found['update_us'])}")
    print(f"{'compress':24}{'bytes':>10}{'fewer':>8}  encode | decode | added CPU share")
    for spec, row in found["compressors"].items():
        share = {k: 100 * v for k, v in row["share"].items()}
        line = f"{spec:24}{row['bytes']:>10,}{row['fewer']:>7.1f}x "
        print(line + " |".join((number(row["encode_us"]), number(row["decode_us"]), number(share, "%"))))
        for what, met in row["met"].items():
            print(f"{'':24}target: {what}: {'met' if met else 'MISSED'}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    os.environ.update(SINGLE_THREADED)
    import torch

    torch.set_num_threads(1)
    repeats, seconds = (3, 0.3) if options.quick else (9, 1.0)
    result: dict[str, Any] = {"about": about(), "sizes": {}}
    if not options.json:
        for name, text in result["about"].items():
            print(f"{name:9} {text}")
    for size in SIZES:
        result["sizes"][size] = found = measure(size, repeats, seconds)
        if not options.json:
            show(size, found, repeats)
    if options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
