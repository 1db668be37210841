"""The same work under each update rule: what waiting and staleness cost.

Run it with: python examples/compare_rules.py --total-steps 100000 --workers 2

`lock` applies gradients one at a time, `hogwild` all at once in place, `sync` waits for everybody and takes the
mean (A2C). Staleness is how many updates others made between pulling weights and applying the gradient.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import slipstream as ss


def main() -> None:
    """Train CartPole under each rule and print one line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--run", default="runs/rules", help="directory that gets one run for each rule")
    options = parser.parse_args()

    print(f"{'rule':<8} {'steps/s':>8} {'updates':>8} {'staleness':>10} {'99 %':>5} {'waiting':>8} {'return':>7}")
    for rule in ("lock", "hogwild", "sync"):
        run = ss.train(
            "CartPole-v1",
            update=rule,
            workers=options.workers,
            total_steps=options.total_steps,
            target_return=None,  # every rule does all the steps
            run=Path(options.run) / rule,
            show="none",
        )
        s = run.summary
        print(
            f"{rule:<8} {run.steps_per_second:>8.0f} {run.updates:>8} {s['staleness_mean']:>10.2f} "
            f"{s['staleness_p99']:>5.0f} {s['wait_share']:>8.1%} {run.mean_return:>7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
