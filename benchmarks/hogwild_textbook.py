"""Hogwild A3C as the textbook writes it, in one plain script: the yardstick of benchmarks/cartpole.py.

N processes, one CartPole each. The model and Adam's statistics lie in shared memory. Every process copies the
shared weights, acts for t_max steps with them, computes the n-step loss (Mnih et al. 2016, alg. S3), hands its
gradients to the shared parameters and steps the shared optimizer: no lock anywhere.

Nothing of Slipstream is used here. As such scripts do, it acts through torch, one environment at a time; the loss of a
rollout is one batched pass, the fastest plain way to write it. Prints one JSON object.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; spawned processes inherit it

import argparse
import json
import queue
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

GAMMA = 0.99
T_MAX = 20
LEARNING_RATE = 1e-3
ENTROPY = 0.01
VALUE = 0.5
MAX_NORM = 0.5


class ActorCritic(nn.Module):
    """One torso, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy = nn.Linear(64, 2)
        self.value = nn.Linear(64, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[..., 2]` and values `[...]`."""
        x = self.torso(obs)
        return self.policy(x), self.value(x).squeeze(-1)


class SharedAdam(torch.optim.Adam):
    """Adam whose statistics, step count included, lie in shared memory."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = torch.zeros(()).share_memory_()
                state["exp_avg"] = torch.zeros_like(p).share_memory_()
                state["exp_avg_sq"] = torch.zeros_like(p).share_memory_()


def work(
    index: int, seed: int, shared: ActorCritic, optimizer: SharedAdam, steps: Any, stop: Any, episodes: Any
) -> None:
    """One actor-learner: runs until `stop` is set. Finished episodes go to the queue as (return, steps)."""
    torch.set_num_threads(1)
    torch.manual_seed(1000 * seed + index)
    env = gym.make("CartPole-v1")
    local = ActorCritic()
    obs, _ = env.reset(seed=1000 * seed + index)
    total = 0.0
    while not stop.value:
        local.load_state_dict(shared.state_dict())
        seen, actions, rewards = [], [], []
        terminated = truncated = False
        with torch.no_grad():
            for _ in range(T_MAX):
                logits = local(torch.from_numpy(obs))[0]
                action = int(torch.multinomial(logits.softmax(-1), 1))
                seen.append(obs)
                actions.append(action)
                obs, reward, terminated, truncated, _ = env.step(action)
                rewards.append(float(reward))
                if terminated or truncated:
                    break
            # a time limit does not end the value of what follows
            target = 0.0 if terminated else float(local(torch.from_numpy(obs))[1])
        total += sum(rewards)
        with steps.get_lock():
            steps.value += len(rewards)
            now = steps.value
        if terminated or truncated:
            episodes.put((total, now))
            total = 0.0
            obs, _ = env.reset()
        targets = np.zeros(len(rewards), np.float32)
        for t in range(len(rewards) - 1, -1, -1):
            target = rewards[t] + GAMMA * target
            targets[t] = target
        logits, values = local(torch.from_numpy(np.stack(seen)))
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)
        advantage = torch.from_numpy(targets) - values
        loss = (
            -(chosen * advantage.detach()).mean()
            + ENTROPY * (log_probs.exp() * log_probs).sum(1).mean()
            + VALUE * 0.5 * advantage.square().mean()
        )
        local.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(local.parameters(), MAX_NORM)
        for p, q in zip(shared.parameters(), local.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
    env.close()


def main() -> None:
    """Train until the mean of the last 100 episodes reaches the target, or the steps are used up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--target", type=float, default=475.0)
    a = parser.parse_args()
    torch.manual_seed(a.seed)
    context = mp.get_context("spawn")
    shared = ActorCritic().share_memory()
    optimizer = SharedAdam(shared.parameters(), LEARNING_RATE)
    steps, stop, episodes = context.Value("q", 0), context.Value("b", 0), context.Queue()
    workers = [
        context.Process(target=work, args=(i, a.seed, shared, optimizer, steps, stop, episodes), daemon=True)
        for i in range(a.processes)
    ]
    for w in workers:
        w.start()
    returns: deque[float] = deque(maxlen=100)
    solved_at, first = None, 0.0
    while steps.value < a.max_steps and all(w.is_alive() for w in workers):
        if not first and steps.value:
            first = time.monotonic()
        try:
            value, at = episodes.get(timeout=0.005)
        except queue.Empty:
            continue
        returns.append(value)
        if len(returns) == 100 and sum(returns) / 100 >= a.target:
            solved_at = at
            break
    end, done = time.monotonic(), steps.value
    stop.value = 1
    while any(w.is_alive() for w in workers):  # a process ends only when its queue has been read
        with suppress(queue.Empty):
            episodes.get(timeout=0.05)
    print(
        json.dumps(
            {
                "steps": done,
                "seconds": end - first,
                "steps_per_second": done / (end - first),
                "solved_at": solved_at,
                "mean_return": sum(returns) / max(1, len(returns)),
                "first_step_clock": first,
            }
        )
    )


if __name__ == "__main__":
    main()
