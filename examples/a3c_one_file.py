"""A3C in one file: torch, NumPy and Gymnasium, nothing of Slipstream.

Run it with: python examples/a3c_one_file.py --total-steps 100000

One actor-learner over B copies of CartPole, the plain way: modules, `torch.distributions`, `torch.optim.Adam`.
It is the oracle of the tests: one worker of Slipstream with the same settings takes the same actions, gets the
same rewards and losses, and ends with the same weights to 1e-5. The two share no code, only the way seeds are
derived (`spawned`) and the noise that actions are drawn with (`act`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

WEIGHTS, ENVIRONMENT, ACTIONS = 0, 1, 2  # what a seed is for: first number of its spawn key


@dataclass(frozen=True)
class Settings:
    """Slipstream's preset for CartPole-v1."""

    seed: int = 0
    total_steps: int = 100_000
    max_episode_steps: int = 500
    copies: int = 8  # B
    rollout_steps: int = 16  # T
    gamma: float = 0.98
    gae_lambda: float = 0.95
    learning_rate: float = 3e-3
    schedule_steps: int = 400_000  # where the learning rate reaches 0
    entropy: float = 0.0
    value_coefficient: float = 0.1
    max_gradient_norm: float = 1.5


@dataclass
class Update:
    """What one update was made from."""

    obs: np.ndarray  # [T+1, B, 4]
    actions: np.ndarray  # [T, B]
    rewards: np.ndarray  # [T, B]
    loss: float
    norm: float  # of the gradient, before clipping
    learning_rate: float
    steps: int  # environment steps after it
    returns: list[float]  # of the episodes that ended in its rollout


def spawned(seed: int, *key: int) -> np.random.SeedSequence:
    """The seed of one role (of one worker, of one start of that worker)."""
    return np.random.SeedSequence(seed, spawn_key=key)


class ActorCritic(nn.Module):
    """Two towers of two tanh layers; orthogonal weights, zero biases."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 2), nn.Linear(64, 1)
        generator = torch.Generator().manual_seed(int(spawned(seed, WEIGHTS).generate_state(1)[0]))
        for layer in (*self.actor, *self.critic, self.pi, self.v):
            if isinstance(layer, nn.Linear):
                gain = 0.01 if layer is self.pi else 1.0 if layer is self.v else math.sqrt(2)
                nn.init.orthogonal_(layer.weight, gain, generator=generator)
                nn.init.zeros_(layer.bias)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [..., 2] and values [...]."""
        return self.pi(self.actor(obs)), self.v(self.critic(obs)).squeeze(-1)


@torch.no_grad()
def act(model: ActorCritic, obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A sample of the policy for each row: the largest of logits plus Gumbel noise."""
    logits, _ = model(torch.as_tensor(obs))
    return (logits.numpy() + rng.gumbel(size=(len(obs), 2))).argmax(-1)


def train(settings: Settings, model: ActorCritic) -> Iterator[Update]:
    """Train `model`; gives each update as it has been made."""
    s, T, B = settings, settings.rollout_steps, settings.copies
    env = gym.make_vec(
        "CartPole-v1", num_envs=B, vectorization_mode="vector_entry_point", max_episode_steps=s.max_episode_steps
    )
    resets = np.random.Generator(np.random.PCG64(spawned(s.seed, ENVIRONMENT, 0, 0)))
    rng = np.random.Generator(np.random.PCG64(spawned(s.seed, ACTIONS, 0, 0)))
    optimizer = torch.optim.Adam(model.parameters(), lr=s.learning_rate, eps=1e-5)
    obs, _ = env.reset(seed=int(resets.integers(2**31)))
    ended = np.zeros(B, bool)
    returns, steps = np.zeros(B), 0

    while steps < s.total_steps:
        S = np.zeros((T + 1, B, 4), np.float32)
        A = np.zeros((T, B), np.int64)
        R = np.zeros((T, B), np.float32)
        terminated, done, valid = (np.zeros((T, B), bool) for _ in range(3))
        finished: list[float] = []
        for t in range(T):
            S[t], A[t] = obs, act(model, obs, rng)
            valid[t] = ~ended  # the step after an end only resets (NEXT_STEP): nothing was done in it
            obs, R[t], terminated[t], truncated, _ = env.step(A[t])
            done[t] = ended = terminated[t] | truncated
            returns += R[t]
            finished += returns[ended].tolist()
            returns[ended] = 0
        S[T] = obs

        logits, values = model(torch.as_tensor(S))
        V = values.detach().numpy()
        advantages = np.zeros((T, B), np.float32)
        following = np.zeros(B, np.float32)
        for t in reversed(range(T)):  # S[t + 1] is the final observation where an episode ended at t
            delta = R[t] + s.gamma * V[t + 1] * ~terminated[t] - V[t]
            following = (delta + s.gamma * s.gae_lambda * ~done[t] * following) * valid[t]
            advantages[t] = following
        targets = torch.as_tensor(advantages + V[:-1])
        seen, count = torch.as_tensor(valid), valid.sum()

        policy = Categorical(logits=logits[:-1])
        policy_loss = -(policy.log_prob(torch.as_tensor(A)) * torch.as_tensor(advantages))[seen].sum() / count
        value_loss = 0.5 * (targets - values[:-1])[seen].square().sum() / count
        entropy = policy.entropy()[seen].sum() / count
        loss = policy_loss - s.entropy * entropy + s.value_coefficient * value_loss

        optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), s.max_gradient_norm))
        rate = s.learning_rate * max(0.0, 1 - steps / s.schedule_steps)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        steps += int(count)
        yield Update(S, A, R, loss.item(), norm, rate, steps, finished)


def main() -> None:
    """Train and print the mean return of the last 100 episodes now and then."""
    parser = argparse.ArgumentParser(description="A3C in one file.")
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(seed=options.seed, total_steps=options.total_steps)
    returns: list[float] = []
    for number, update in enumerate(train(settings, ActorCritic(settings.seed)), start=1):
        returns += update.returns
        if number % 50 == 0 or update.steps >= settings.total_steps:
            mean = np.mean(returns[-100:]) if returns else math.nan
            print(f"update {number}  steps {update.steps}  return {mean:.1f}  loss {update.loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
