"""Trains environments with their presets, evaluates each policy over 100 episodes, and shows published figures beside.

    python benchmarks/environments.py                                 # every environment below, 5 seeds each
    python benchmarks/environments.py --envs Pendulum-v1 --seeds 2 --out results

The published figures are single runs of rl-baselines3-zoo's benchmark, with the steps they took. A seed that
fails, or misses its target, is counted and shown; nothing is left out and no seed is tried twice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """An environment, what is to be reached there, and what is published.

    Attributes:
        above: whether the evaluated mean must be at least `target` (else below it).
        options: laid over the environment's preset.
    """

    env: str
    target: float
    published: str
    above: bool = True
    options: tuple[str, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.label or self.env


HIDDEN = "slipstream/CartPoleHidden-v1"
PPO = ("--algorithm", "ppo")
TASKS = [
    Task("CartPole-v1", 475, "500 (A2C, 500 k)"),
    Task(HIDDEN, 400, "-", label="CartPoleHidden-v1, LSTM"),
    Task(HIDDEN, 150, "-", above=False, options=("--net.core", "none"), label="CartPoleHidden-v1, MLP"),
    Task("Pendulum-v1", -200, "-163 (A2C, 1 M)"),
    Task("Acrobot-v1", -90, "-83 (A2C, 500 k)"),
    Task("LunarLander-v3", 200, "156 (A2C, 200 k), 242 (PPO, 1 M)", label="LunarLander-v3, PPO (its preset)"),
    Task("CartPole-v1", 475, "500 (PPO, 100 k)", options=PPO, label="CartPole-v1, PPO"),
    Task("Pendulum-v1", -200, "-172 (PPO, 100 k)", options=PPO, label="Pendulum-v1, PPO"),
    Task("Acrobot-v1", -90, "-74 (PPO, 1 M)", options=PPO, label="Acrobot-v1, PPO"),
    Task("LunarLander-v3", 200, "156 (A2C, 200 k)", options=("--algorithm", "a3c"), label="LunarLander-v3, A3C"),
    Task("MountainCarContinuous-v0", 90, "91 (A2C, 100 k), 88 (PPO, 20 k)"),
]


def one_seed(task: Task, seed: int, place: Path, extra: list[str]) -> dict[str, Any]:
    """Train and evaluate once."""
    run = place / f"{task.name.replace('/', '-').replace(', ', '-')}-{seed}"
    slipstream = [sys.executable, "-m", "slipstream"]
    train = [*slipstream, "train", task.env, "--seed", str(seed), "--run", str(run), "--json", *task.options, *extra]
    evaluate = [*slipstream, "eval", str(run), "--episodes", "100", "--json"]
    begun = time.monotonic()
    trained = subprocess.run(train, capture_output=True, text=True)
    wall = time.monotonic() - begun
    found: dict[str, Any] = {"task": task.name, "seed": seed, "wall": wall}
    if trained.returncode != 0:
        return {**found, "met": False, "error": trained.stderr[-2000:]}
    t = json.loads(trained.stdout)
    evaluated = subprocess.run(evaluate, capture_output=True, text=True)
    if evaluated.returncode != 0:
        return {**found, "met": False, "error": evaluated.stderr[-2000:]}
    e = json.loads(evaluated.stdout)
    met = e["mean"] >= task.target if task.above else e["mean"] < task.target
    return {
        **found, "met": met, "steps": t["steps"], "steps_per_second": t["steps_per_second"],
        "training_return": t["mean_return"], "workers": t["workers"], "update": t["update"],
        **{k: e[k] for k in ("mean", "std", "iqm", "iqm_low", "iqm_high", "minimum", "maximum")},
    }  # fmt: skip


def report(task: Task, runs: list[dict[str, Any]]) -> list[str]:
    """Markdown of one environment: a line for each seed, and a summary."""
    good = [r for r in runs if "error" not in r]
    wanted = f"{'>=' if task.above else '<'} {task.target:g}"
    lines = [
        f"## {task.name}",
        "",
        f"Wanted: mean over 100 evaluated episodes {wanted}. Published: {task.published}.",
        "",
        "| seed | mean | IQM (95 % interval) | std | steps | steps/s | wall, s | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in runs:
        if "error" in r:
            lines.append(f"| {r['seed']} | failed: {r['error'].strip().splitlines()[-1]} | | | | | {r['wall']:.0f} | |")
            continue
        lines.append(
            f"| {r['seed']} | {r['mean']:.1f} | {r['iqm']:.1f} ({r['iqm_low']:.1f} to {r['iqm_high']:.1f}) | "
            f"{r['std']:.1f} | {r['steps']:,} | {r['steps_per_second']:,.0f} | {r['wall']:.0f} | "
            f"{'met' if r['met'] else 'NOT MET'} |"
        )
    if good:
        means = [r["mean"] for r in good]
        lines += [
            "",
            f"Median of the seeds {statistics.median(means):.1f} (least {min(means):.1f}, greatest {max(means):.1f}); "
            f"{sum(r['met'] for r in runs)} of {len(runs)} seeds as wanted; median wall "
            f"{statistics.median(r['wall'] for r in good):.0f} s.",
        ]
    return [*lines, ""]


def main() -> int:
    """Run the environments one after another; results so far are written after every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="*", default=[], help="parts of names; default: every environment")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--train", nargs=argparse.REMAINDER, default=[], help="options for slipstream train; the last")
    a = parser.parse_args()
    tasks = [t for t in TASKS if not a.envs or any(word.lower() in t.name.lower() for word in a.envs)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = [
        "# Environments with their presets", "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} cores, Python {platform.python_version()}. "
        f"{a.seeds} seeds each; deterministic policy, normalization frozen, raw returns.", "",
    ]  # fmt: skip
    everything: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-envs-") as place:
        for task in tasks:
            runs: list[dict[str, Any]] = []
            for seed in range(a.seeds):
                r = one_seed(task, seed, Path(place), a.train)
                runs.append(r)
                everything.append(r)
                told = "failed" if "error" in r else f"mean {r['mean']:.1f}, {r['steps']:,} steps"
                print(f"{task.name} seed {seed}: {told}, {r['wall']:.0f} s", file=sys.stderr, flush=True)
                if a.out:
                    a.out.with_suffix(".json").write_text(json.dumps(everything, indent=1))
                    a.out.with_suffix(".md").write_text("\n".join([*text, *report(task, runs)]))
            text += report(task, runs)
    print("\n".join(text))
    return 0 if all(r["met"] for r in everything) else 1


if __name__ == "__main__":
    sys.exit(main())
