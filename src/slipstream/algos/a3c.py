"""A3C: advantage actor-critic with many actor-learners (Mnih et al. 2016, arXiv 1602.01783).

With the rule `sync` it is A2C. The supervising process reads only `Hyperparameters`; torch is imported
where the loss is computed, so that process starts without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slipstream.errors import ConfigError
from slipstream.rollout import Rollout, explained_variance, gae
from slipstream.schedule import Shape, scheduled

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.nets.policy import Policy


@dataclass(frozen=True)
class Hyperparameters:
    """Hyper-parameters of A3C."""

    rollout_steps: int = 16
    """T: steps of each environment copy in a rollout (the paper's t_max)."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 1.0
    """1 gives the paper's n-step returns."""
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    """Statistics are shared by all workers."""
    learning_rate: float = 7e-4
    """Initial learning rate."""
    learning_rate_schedule: Shape = "linear"
    """How it falls over global environment steps."""
    epsilon: float = 1e-5
    """Added to the square root by the optimizer."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp's statistics."""
    entropy: float = 0.01
    """beta: weight of the entropy bonus."""
    entropy_schedule: Shape = "constant"
    """How it falls over global environment steps."""
    schedule_steps: int = 0
    """Steps at which falling schedules reach 0; 0: the run's total_steps."""
    value_coefficient: float = 0.5
    """c_v: weight of the value loss."""
    max_gradient_norm: float = 0.5
    """Each worker's gradient is clipped to this global norm before it is pushed; 0: never."""
    normalize_advantages: bool = False
    """Subtract the rollout's mean advantage and divide by its standard deviation."""

    def check(self) -> None:
        """Raise ConfigError where a value is out of range."""
        for name in ("rollout_steps",):
            if getattr(self, name) < 1:
                raise ConfigError(f"algo.{name}: {getattr(self, name)} is too small, the least is 1")
        for name in ("gamma", "gae_lambda", "rmsprop_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"algo.{name}: {getattr(self, name)} is not between 0 and 1")
        for name in (
            "learning_rate", "epsilon", "entropy", "value_coefficient", "max_gradient_norm", "schedule_steps",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ConfigError(f"algo.{name}: {getattr(self, name)} is negative")


def loss(
    hyper: Hyperparameters, policy: Policy, rollout: Rollout, steps: int, horizon: int
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one rollout, and its terms for the metrics.

    -log pi(a|s) A - beta H(pi) + c_v (R - V)^2 / 2, the mean over valid rows (Mnih et al. 2016, alg. S3,
    with A and R by GAE).

    Args:
        hyper: hyper-parameters.
        policy: the network, holding the weights the rollout was acted with.
        rollout: `[T, B, ...]`.
        steps: global environment steps, for the entropy schedule.
        horizon: steps at which schedules end.
    """
    import torch

    from slipstream.nets.heads import log_prob_and_entropy

    T = len(rollout.action)
    (params, value), _ = policy(
        torch.from_numpy(rollout.obs), torch.from_numpy(rollout.state), torch.from_numpy(rollout.starts), carry=False
    )
    predicted = value.detach().numpy()
    r = rollout
    advantage = gae(
        r.reward, predicted, r.terminated, r.truncated, r.valid, r.bootstrap, r.has_bootstrap,
        hyper.gamma, hyper.gae_lambda,
    )  # fmt: skip
    target = advantage + predicted[:-1]
    if hyper.normalize_advantages and r.samples > 1:
        seen = advantage[r.valid]
        advantage = (advantage - seen.mean()) / (seen.std() + 1e-8)

    weight = torch.from_numpy(r.valid.astype("float32") / max(1, r.samples))
    mask = torch.from_numpy(r.mask) if r.mask is not None else None
    log_prob, entropy = log_prob_and_entropy(policy.head, params[:T], torch.from_numpy(r.action), mask)
    beta = scheduled(hyper.entropy, hyper.entropy_schedule, steps, hyper.schedule_steps or horizon)

    policy_loss = -(log_prob * torch.from_numpy(advantage) * weight).sum()
    value_loss = 0.5 * ((torch.from_numpy(target) - value[:T]).square() * weight).sum()
    mean_entropy = (entropy * weight).sum()
    total = policy_loss - beta * mean_entropy + hyper.value_coefficient * value_loss
    return total, {
        "loss": total.item(),
        "policy_loss": policy_loss.item(),
        "value_loss": value_loss.item(),
        "entropy": mean_entropy.item(),
        "explained_variance": explained_variance(predicted[:-1], target, r.valid),
    }


def learning_rate(hyper: Hyperparameters, steps: int, horizon: int) -> float:
    """Learning rate of an update made at `steps` global environment steps."""
    return scheduled(hyper.learning_rate, hyper.learning_rate_schedule, steps, hyper.schedule_steps or horizon)
