"""Draw the learning curves of README.md: CartPole under each update rule, against steps and wall time.

    python benchmarks/picture.py --seeds 5 --out docs/cartpole.png

Every curve is of real runs made by this command (extra `plot`): the median over seeds of the mean return of
the last 100 episodes, with the band from the worst to the best seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

import slipstream as ss

RULES = {"lock": "#1f77b4", "hogwild": "#d62728", "sync": "#2ca02c"}


def curve(rule: str, seed: int, steps: int) -> list[tuple[int, float, float]]:
    """(steps, seconds, mean return) of one run."""
    with tempfile.TemporaryDirectory() as place:
        ss.train(
            "CartPole-v1", update=rule, workers=2, seed=seed, total_steps=steps, target_return=None,
            run=Path(place) / "run", show="none", record=False, watch={"every": 0.1, "tensorboard": False},
        )  # fmt: skip
        lines = (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(r["steps"], r["wall"], r["return"]) for r in rows if r["return"] is not None]


def band(curves: list[list[tuple[int, float, float]]], axis: int, grid: np.ndarray) -> np.ndarray:
    """Median, lowest and highest return `[3, len(grid)]` along steps (axis 0) or seconds (axis 1)."""
    rows = [np.interp(grid, [p[axis] for p in c], [p[2] for p in c]) for c in curves]
    return np.array([np.median(rows, 0), np.min(rows, 0), np.max(rows, 0)])


def main() -> None:
    """Train, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--out", default="docs/cartpole.png")
    options = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = {rule: [curve(rule, s, options.steps) for s in range(options.seeds)] for rule in RULES}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for i, (axis, label) in enumerate(zip(axes, ("environment steps", "seconds of training"), strict=True)):
        for rule, color in RULES.items():
            end = min(max(p[i] for p in c) for c in runs[rule])
            grid = np.linspace(0, end, 200)
            middle, low, high = band(runs[rule], i, grid)
            axis.plot(grid, middle, color=color, label=rule)
            axis.fill_between(grid, low, high, color=color, alpha=0.15, linewidth=0)
        axis.axhline(475, color="gray", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label)
    axes[0].set_ylabel("mean return, last 100 episodes")
    axes[1].legend(title="update rule", frameon=False)
    figure.suptitle(f"CartPole-v1, 2 workers, {options.seeds} seeds: median and range", fontsize=10)
    figure.tight_layout()
    figure.savefig(options.out, dpi=130)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
