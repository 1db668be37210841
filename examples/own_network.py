"""Train with a network of your own: a torso with LayerNorm.

Run it with: python examples/own_network.py --total-steps 100000

A torso maps observations `[N, *shape]` to features `[N, out_features]`; Slipstream adds the heads for actions and
value, and a memory if `net.core` asks for one. In a file of your own it can also be named on the command line:
`slipstream train CartPole-v1 --net.torso mypackage.Torso`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import slipstream as ss


class Torso(nn.Module):
    """Two layers, each normalized. BatchNorm would be refused: its running statistics are not weights."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.out_features = 64  # Slipstream reads this
        self.layers = nn.Sequential(
            nn.Linear(shape[0], 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Features of a batch of observations."""
        features: torch.Tensor = self.layers(obs)
        return features


def main() -> None:
    """Train, load, and show what was trained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--run", help="directory of the run; default runs/<env>-<algorithm>-<time>")
    options = parser.parse_args()

    run = ss.train("CartPole-v1", torso=Torso, total_steps=options.total_steps, run=options.run)
    policy = ss.load(run, torso=Torso)
    gain = policy.network.torso.layers[1].weight.detach()
    print(f"LayerNorm gains began at 1 and are now {float(gain.min()):.3f} to {float(gain.max()):.3f}")
    result = ss.evaluate(run, episodes=20, torso=Torso)
    print(f"mean return {result.mean:.1f} over {result.episodes} episodes")


if __name__ == "__main__":
    main()
