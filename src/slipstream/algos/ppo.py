"""PPO: proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347), clipped.

Details follow Huang et al. 2022, "The 37 implementation details of PPO". With the rule `sync` the workers' minibatches
meet in each step of the optimizer: N workers with M rows each make one minibatch of N·M rows. Under the other rules
it is asynchronous: a worker goes over its own rollout with whatever the others have made of the weights meanwhile,
and the ratio is still that of the weights the rollout was collected with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.rollout import Rollout, explained_variance, gae
from slipstream.schedule import Shape, scheduled

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.nets.policy import Policy

Array = NDArray[Any]


@dataclass(frozen=True)
class Hyperparameters:
    """Hyper-parameters of PPO."""

    rollout_steps: int = 128
    """T: steps of each environment copy in a rollout."""
    epochs: int = 4
    """Times a rollout is gone over."""
    minibatches: int = 4
    """Parts of a worker's rollout in each epoch; with a recurrent core whole columns of copies."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation."""
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    """Statistics are shared by all workers."""
    learning_rate: float = 3e-4
    """Initial learning rate."""
    learning_rate_schedule: Shape = "linear"
    """How it falls over global environment steps."""
    epsilon: float = 1e-5
    """Added to the square root by the optimizer."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp's statistics."""
    clip_range: float = 0.2
    """The ratio of probabilities is clipped to 1 - this … 1 + this."""
    clip_schedule: Shape = "constant"
    """How the clip range falls over global environment steps."""
    value_clip: float = 0.0
    """Values may move so far from those at collection before their loss stops falling; 0: no limit."""
    target_kl: float = 0.0
    """A rollout is left when its policy has moved 1.5 times so far (nats); 0: never."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    entropy_schedule: Shape = "constant"
    """How it falls over global environment steps."""
    schedule_steps: int = 0
    """Steps at which falling schedules reach 0; 0: the run's total_steps."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    max_gradient_norm: float = 0.5
    """Each worker's gradient is clipped to this global norm before it is pushed; 0: never."""
    normalize_advantages: bool = True
    """Subtract the minibatch's mean advantage and divide by its standard deviation."""

    def check(self) -> None:
        """Raise ConfigError where a value is out of range."""
        for name in ("rollout_steps", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algo.{name}: {getattr(self, name)} is too small, the least is 1")
        for name in ("gamma", "gae_lambda", "rmsprop_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"algo.{name}: {getattr(self, name)} is not between 0 and 1")
        for name in (
            "learning_rate", "epsilon", "entropy", "value_coefficient", "max_gradient_norm", "schedule_steps",
            "clip_range", "value_clip", "target_kl",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ConfigError(f"algo.{name}: {getattr(self, name)} is negative")


def prepare(hyper: Hyperparameters, policy: Policy, rollout: Rollout, rng: np.random.Generator) -> dict[str, Array]:
    """A rollout as the arrays its minibatches are cut from: log-probabilities, values, advantages, targets, order.

    Without a core, rows stand for themselves: `[1, rows, ...]`, those that are not valid left out. With one, columns
    stay whole: `[T, B, ...]`. `order` holds the columns of each minibatch, -1 where it has fewer than the others.
    """
    import torch

    from slipstream.nets.heads import log_prob_and_entropy

    r, T = rollout, len(rollout.action)
    with torch.no_grad():
        (params, value), _ = policy(
            torch.from_numpy(r.obs), torch.from_numpy(r.state), torch.from_numpy(r.starts), carry=False
        )  # fmt: skip
        mask = torch.from_numpy(r.mask) if r.mask is not None else None
        log_prob, _ = log_prob_and_entropy(policy.head, params[:T], torch.from_numpy(r.action), mask)
    predicted = value.numpy()
    advantage = gae(
        r.reward, predicted, r.terminated, r.truncated, r.valid, r.bootstrap, r.has_bootstrap,
        hyper.gamma, hyper.gae_lambda,
    )  # fmt: skip
    data = {
        "obs": r.obs[:T], "action": r.action, "log_prob": log_prob.numpy(), "value": predicted[:T],
        "advantage": advantage, "target": advantage + predicted[:T], "valid": r.valid, "starts": r.starts[:T],
    }  # fmt: skip
    if r.mask is not None:
        data["mask"] = r.mask
    if policy.state_size:
        data = {k: v.copy() for k, v in data.items()}  # the rollout is overwritten by the next one
        state = r.state.copy()
    else:
        kept = r.valid.reshape(-1) if r.valid.any() else np.ones(r.valid.size, bool)  # of weight 0 then
        data = {k: v.reshape(-1, *v.shape[2:])[kept][None] for k, v in data.items()}
        state = np.zeros((data["valid"].shape[1], 0), np.float32)
    columns = len(state)
    parts = min(hyper.minibatches, columns)
    width = -(-columns // parts)
    order = np.full((hyper.epochs, parts, width), -1, np.int64)
    for epoch in order:
        for part, chosen in zip(epoch, np.array_split(rng.permutation(columns), parts), strict=True):
            part[: len(chosen)] = chosen
    return {**data, "state": state, "order": order.reshape(hyper.epochs * parts, width)}


def minibatch(data: dict[str, Array], part: int) -> dict[str, Array]:
    """One minibatch of what `prepare` returned: the columns in row `part` of its order."""
    chosen = data["order"][part]
    chosen = chosen[chosen >= 0]
    cut = {k: v[:, chosen] for k, v in data.items() if k not in ("state", "order")}
    return {**cut, "state": data["state"][chosen]}


def loss(
    hyper: Hyperparameters, policy: Policy, batch: dict[str, Array], steps: int, horizon: int
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one minibatch, and its terms for the metrics.

    -min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta H(pi) + c_v (R - V)^2 / 2, the mean over valid rows (Schulman
    et al. 2017, eqs. 7 and 9), rho = pi(a|s) / pi_old(a|s). `approx_kl` is the mean of (rho - 1) - log rho (Schulman
    2020, "Approximating KL divergence", k3).

    Args:
        hyper: hyper-parameters.
        policy: the network, holding the newest weights pulled.
        batch: what `minibatch` returned, `[T, M, ...]`.
        steps: global environment steps, for the schedules.
        horizon: steps at which schedules end.
    """
    import torch

    from slipstream.nets.heads import log_prob_and_entropy

    cut = {k: torch.from_numpy(v) for k, v in batch.items()}
    valid = cut["valid"]
    samples = max(1, int(valid.sum()))
    weight = valid.float() / samples
    end = hyper.schedule_steps or horizon

    (params, value), _ = policy(cut["obs"], cut["state"], cut["starts"], carry=False)
    log_prob, entropy = log_prob_and_entropy(policy.head, params, cut["action"], cut.get("mask"))
    advantage = cut["advantage"]
    if hyper.normalize_advantages and samples > 1:
        seen = advantage[valid]
        advantage = (advantage - seen.mean()) / (seen.std(correction=0) + 1e-8)
    # rows that are not valid hold anything: their ratio must not become 0 * inf
    change = torch.where(valid, log_prob - cut["log_prob"], torch.zeros(()))
    ratio = change.exp()
    reach = scheduled(hyper.clip_range, hyper.clip_schedule, steps, end)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - reach, 1 + reach) * advantage)
    policy_loss = -(gain * weight).sum()

    error = (value - cut["target"]).square()
    if hyper.value_clip > 0:
        near = cut["value"] + (value - cut["value"]).clamp(-hyper.value_clip, hyper.value_clip)
        error = torch.maximum(error, (near - cut["target"]).square())
    value_loss = 0.5 * (error * weight).sum()
    mean_entropy = (entropy * weight).sum()
    beta = scheduled(hyper.entropy, hyper.entropy_schedule, steps, end)
    total = policy_loss - beta * mean_entropy + hyper.value_coefficient * value_loss
    moved = ratio.detach() - 1
    return total, {
        "loss": total.item(),
        "policy_loss": policy_loss.item(),
        "value_loss": value_loss.item(),
        "entropy": mean_entropy.item(),
        "explained_variance": explained_variance(
            cut["value"].numpy(), cut["target"].numpy(), cut["valid"].numpy()
        ),
        "approx_kl": ((moved - change.detach()) * weight).sum().item(),
        "clip_fraction": ((moved.abs() > reach).float() * weight).sum().item(),
    }  # fmt: skip


def too_far(hyper: Hyperparameters, terms: dict[str, float]) -> bool:
    """Whether the policy has moved so far that the rest of the rollout is left."""
    return hyper.target_kl > 0 and terms["approx_kl"] > 1.5 * hyper.target_kl


def learning_rate(hyper: Hyperparameters, steps: int, horizon: int) -> float:
    """Learning rate of an update made at `steps` global environment steps."""
    return scheduled(hyper.learning_rate, hyper.learning_rate_schedule, steps, hyper.schedule_steps or horizon)
