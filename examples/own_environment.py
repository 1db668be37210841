"""Train on an environment of your own, given as a class: no registration needed.

Run it with: python examples/own_environment.py --total-steps 60000

The task: stop a cart on a line at position 0 with pushes to the left and to the right.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np

import slipstream as ss


class Parking(gym.Env[np.ndarray, np.ndarray]):
    """A cart on a line. Observation: position and velocity. Action: a push between -1 and 1."""

    def __init__(self, limit: int = 50) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.limit = limit

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin somewhere, at rest."""
        super().reset(seed=seed)
        self.position, self.velocity, self.steps = self.np_random.uniform(-1, 1), 0.0, 0
        return self._see(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push; the reward is minus the distance. Leaving the line ends the episode, the time limit cuts it."""
        self.steps += 1
        self.velocity = 0.9 * self.velocity + 0.1 * float(action[0])
        self.position += self.velocity
        terminated = abs(self.position) > 2
        reward = -abs(self.position) - 20.0 * terminated
        return self._see(), reward, terminated, self.steps >= self.limit, {}

    def _see(self) -> np.ndarray:
        return np.array([self.position, self.velocity], np.float32)


def main() -> None:
    """Train, then compare with what random pushes get."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int, default=60_000)
    parser.add_argument("--run", help="directory of the run; default runs/<env>-<algorithm>-<time>")
    options = parser.parse_args()

    run = ss.train(
        Parking,  # any callable that makes an environment
        env_kwargs={"limit": 50},
        total_steps=options.total_steps,
        run=options.run,
        algo={"learning_rate": 3e-3, "gamma": 0.95, "gae_lambda": 0.95, "entropy": 0.0},
        net={"log_std": -0.5},
    )
    result = ss.evaluate(run, episodes=50, env=Parking)

    env = Parking()
    env.action_space.seed(0)
    total = 0.0
    for episode in range(50):
        env.reset(seed=episode)
        ended = False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += reward
            ended = terminated or truncated
    print(f"mean return {result.mean:.1f}; random pushes {total / 50:.1f}")


if __name__ == "__main__":
    main()
