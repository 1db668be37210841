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

from slipstream.moments import merge
from slipstream.store import Contribution, Header, Slot, Store

Kind = Literal["adam", "rmsprop", "sgd"]
STATE = {"adam": ("exp_avg", "exp_avg_sq"), "rmsprop": ("square_avg",), "sgd": ()}


def state_layout(kind: Kind, size: int) -> tuple[tuple[str, int], ...]:
    """Name and number of float32 elements of each piece of state of an optimizer over `size` weights."""
    return (*((name, size) for name in STATE[kind]), ("step", 1))


class Stepper:
    """Applies gradients to slots, in place. One a handle.

    All state is in the slot, the step count of Adam included, so which worker makes a step does not
    matter: N workers with one step each equal one worker with N steps.
    """

    def __init__(
        self, store: Store, kind: Kind, epsilon: float, decay: float, moment_sizes: tuple[int, ...] = ()
    ) -> None:
        """Views of every slot; `moment_sizes` are the parts of a slot's moments, each merged by itself."""
        self.kind, self.epsilon, self.decay, self.moment_sizes = kind, epsilon, decay, moment_sizes
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
        """Make a slot the next version: one step with the mean gradient, weighted by samples.

        A gradient that is not finite changes no weight; its environment steps are counted all the same.
        The order of `contributions` is part of the result (floating-point sums). Returns whether a
        version was made.
        """
        rate = learning_rate(slot.steps)
        for c in contributions:
            slot.numbers[Header.STEPS] += c.samples
        good = [c for c in contributions if c.finite]
        for c in good:
            at = 0
            for size in self.moment_sizes:
                merge(slot.moments[at : at + size], c.moments[at : at + size])
                at += size
        if not good:
            return False
        if len(good) == 1:
            gradient = good[0].gradient
        else:
            total = np.float32(max(1, sum(c.samples for c in good)))  # 0: nothing but resets
            gradient = np.zeros_like(good[0].gradient)
            for c in good:
                gradient += c.gradient * (np.float32(c.samples) / total)
        self.step(slot, gradient, rate)
        slot.numbers[Header.VERSION] += 1
        return True
