"""Stock `torch.optim` steps whose parameter and state tensors are views of a parameter slot.

The functional forms are used: the same kernels as the classes, which import torch._dynamo when first made
(measured: 1.8 s and 150 MB in every worker). A test holds them equal to the classes, step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from slipstream.config import Rule
from slipstream.moments import merge
from slipstream.store import Contribution, Header, Slot, Store

Gradient = NDArray[np.float32]
Kind = Literal["adam", "rmsprop", "sgd"]
STATE = {"adam": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",), "sgd": ()}


def state_layout(kind: Kind, size: int, options: Rule | None = None) -> tuple[tuple[str, int], ...]:
    """Name and number of float32 elements of each piece of state of an optimizer over `size` weights."""
    adaptive = options is not None and options.delay_compensation == "adaptive"
    return (*((name, size) for name in (*STATE[kind], *(("mean_square",) if adaptive else ()))), ("step", 1))


class Stepper:
    """Applies gradients to slots, in place. One a handle.

    All state is in the slot, the step count of Adam included, so which worker makes a step does not
    matter: N workers with one step each equal one worker with N steps.
    """

    def __init__(
        self, store: Store, kind: Kind, epsilon: float, decay: float, moment_sizes: tuple[int, ...] = (),
        options: Rule | None = None,
    ) -> None:  # fmt: skip
        """Views of every slot; `moment_sizes` are the parts of a slot's moments, each merged by itself."""
        self.kind, self.epsilon, self.decay, self.moment_sizes = kind, epsilon, decay, moment_sizes
        self.options = options or Rule()
        self.views: dict[int, tuple[Tensor, list[Tensor], Tensor]] = {}
        for slot in store.slots:
            state = [torch.from_numpy(slot.optimizer[name]) for name in STATE[kind]]
            count = torch.from_numpy(slot.optimizer["step"]).view(())
            self.views[id(slot)] = torch.from_numpy(slot.weights), state, count

    @torch.no_grad()
    def step(self, slot: Slot, gradient: NDArray[np.float32], learning_rate: float) -> None:
        """One optimizer step on the weights of `slot`, in place."""
        weights, state, count = self.views[id(slot)]
        w, g, n = [weights], [torch.from_numpy(gradient)], [count]
        if self.kind == "adam":
            adam(
                w, g, [state[0]], [state[1]], [], n, fused=True, amsgrad=False, maximize=False,
                beta1=0.9, beta2=0.999, lr=learning_rate, weight_decay=0.0, eps=self.epsilon,
            )  # fmt: skip
        elif self.kind == "rmsprop":
            rmsprop(
                w, g, [state[0]], [], [], n, foreach=False, lr=learning_rate, alpha=self.decay,
                eps=self.epsilon, weight_decay=0.0, momentum=0.0, centered=False,
            )  # fmt: skip
        else:
            weights.sub_(g[0], alpha=learning_rate)
            count += 1

    def apply(self, slot: Slot, contributions: list[Contribution], learning_rate: Callable[[int], float]) -> bool:
        """Make a slot the next version: one step with the mean gradient, weighted by rows.

        A gradient that is not finite, or is dropped as stale, changes no weight; its environment steps are counted
        all the same. The order of `contributions` is part of the result (floating-point sums). Returns whether
        a version was made.
        """
        rate, version = learning_rate(slot.steps), slot.version
        for c in contributions:
            slot.numbers[Header.STEPS] += c.samples
        good = [c for c in contributions if c.finite]
        for c in good:
            at = 0
            for size in self.moment_sizes:
                merge(slot.moments[at : at + size], c.moments[at : at + size])
                at += size
        used = [c for c in good if c.rows and not self.dropped(version, c)]
        if not used:
            return False
        stale = [version - c.version for c in used]
        gradients = [self.compensated(slot, c) if s else c.gradient for c, s in zip(used, stale, strict=True)]
        total = sum(c.rows for c in used)
        shares = [c.rows / total for c in used]
        self.step(slot, self._mean(gradients, shares, stale), self.slower(rate, float(np.dot(shares, stale))))
        slot.numbers[Header.VERSION] += 1
        return True

    def _mean(self, gradients: list[Gradient], shares: list[float], stale: list[int]) -> Gradient:
        if self.options.stale == "scale":
            shares = [share / (1 + s) for share, s in zip(shares, stale, strict=True)]
        if len(gradients) == 1:
            return gradients[0] if shares[0] == 1 else gradients[0] * np.float32(shares[0])
        mean = np.zeros_like(gradients[0])
        for gradient, share in zip(gradients, shares, strict=True):
            mean += gradient * np.float32(share)
        return mean

    def dropped(self, version: int, contribution: Contribution) -> bool:
        """Whether a gradient is too old to be averaged into the version after `version`."""
        return self.options.stale == "drop" and contribution.version < version

    def slower(self, rate: float, staleness: float) -> float:
        """The learning rate of a step with this staleness: rate / (1 + staleness) (Zhang et al. 2015, eq. 6).

        The step is scaled rather than the gradient, whose scale Adam and RMSProp take out again.
        """
        return rate / (1.0 + staleness) if self.options.staleness_scaling else rate

    def compensated(self, slot: Slot, contribution: Contribution) -> Gradient:
        """g + lambda g*g*(w_now - w_read), elementwise (DC-ASGD, Zheng et al. 2017, eq. 10).

        `adaptive` uses lambda_0 / sqrt(mean_square + 1e-7) with mean_square <- m mean_square + (1 - m) g*g (eq. 14),
        which is state of the optimizer.
        """
        o, g, read = self.options, contribution.gradient, contribution.read
        if o.delay_compensation == "none" or read is None:
            return g
        square = g * g
        if o.delay_compensation == "constant":
            return np.asarray(g + np.float32(o.delay_lambda) * square * (slot.weights - read))
        mean = slot.optimizer["mean_square"]
        mean *= np.float32(o.delay_momentum)
        mean += np.float32(1 - o.delay_momentum) * square
        return np.asarray(
            g + np.float32(o.delay_lambda) * square / np.sqrt(mean + np.float32(1e-7)) * (slot.weights - read)
        )
