"""Train a policy, load it, act with it, measure it.

Run it with: python examples/train_and_use.py --total-steps 200000
"""

from __future__ import annotations

import argparse

import gymnasium as gym

import slipstream as ss


def main() -> None:
    """Train on CartPole and play one episode with what was learned."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-steps", type=int, default=200_000)
    parser.add_argument("--run", help="directory of the run; default runs/<env>-<algorithm>-<time>")
    options = parser.parse_args()

    # stops early once the mean return of the last 100 episodes is 475, which the preset for CartPole asks for
    run = ss.train("CartPole-v1", total_steps=options.total_steps, run=options.run)
    print(f"trained for {run.steps} steps at {run.steps_per_second:.0f} steps/s; it is in {run.directory}")

    policy = ss.load(run)  # or ss.load("runs/..."), any time later
    env = gym.make("CartPole-v1")
    obs, _ = env.reset(seed=1)
    policy.reset()  # matters for networks with memory only
    total, ended = 0.0, False
    while not ended:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        total += float(reward)
        ended = terminated or truncated
    print(f"one episode: return {total:.0f}")

    result = ss.evaluate(run, episodes=20)
    print(f"{result.episodes} episodes: mean return {result.mean:.1f}, lowest {result.minimum:.0f}")


if __name__ == "__main__":
    main()
