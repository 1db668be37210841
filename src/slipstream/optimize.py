"""Stock `torch.optim` optimizers whose parameter and state are views of a parameter slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.moments import merge
from slipstream.store import Contribution, Header, Slot, Store

Kind = Literal["adam", "rmsprop", "sgd"]


def make(kind: Kind, weights: torch.nn.Parameter, epsilon: float, decay: float) -> torch.optim.Optimizer:
    """The optimizer named `kind` over one flat parameter. The learning rate is set at each step."""
    if kind == "adam":
        return torch.optim.Adam([weights], lr=0.0, eps=epsilon, fused=True)
    if kind == "rmsprop":
        return torch.optim.RMSprop([weights], lr=0.0, eps=epsilon, alpha=decay, foreach=False)
    return torch.optim.SGD([weights], lr=0.0, foreach=False)


def state_layout(kind: Kind, size: int) -> tuple[tuple[str, int], ...]:
    """Name and number of float32 elements of each piece of state, asked of the optimizer itself."""
    weights = torch.nn.Parameter(torch.zeros(size))
    weights.grad = torch.zeros(size)
    optimizer = make(kind, weights, 1e-8, 0.99)
    optimizer.step()
    state = optimizer.state[weights]
    return tuple((name, t.numel()) for name, t in state.items() if isinstance(t, torch.Tensor))


class Stepper:
    """Applies gradients to slots. One a handle; its optimizers are made once for each slot.

    All state is in the slot, the step count of Adam included, so which worker makes a step does not
    matter: N workers with one step each equal one worker with N steps.
    """

    def __init__(
        self, store: Store, kind: Kind, epsilon: float, decay: float, moment_sizes: tuple[int, ...] = ()
    ) -> None:
        """Optimizers for every slot; `moment_sizes` are the parts of a slot's moments, each merged by itself."""
        self.moment_sizes = moment_sizes
        self.optimizers: dict[int, tuple[torch.optim.Optimizer, torch.nn.Parameter]] = {}
        for slot in store.slots:
            weights = torch.nn.Parameter(torch.from_numpy(slot.weights))
            optimizer = make(kind, weights, epsilon, decay)
            state = {}
            for name, view in slot.optimizer.items():
                tensor = torch.from_numpy(view)
                state[name] = tensor.view(()) if tensor.numel() == 1 else tensor
            if state:
                optimizer.state[weights] = state
            self.optimizers[id(slot)] = (optimizer, weights)

    def step(self, slot: Slot, gradient: NDArray[np.float32], learning_rate: float) -> None:
        """One optimizer step on the weights of `slot`, in place."""
        optimizer, weights = self.optimizers[id(slot)]
        weights.grad = torch.from_numpy(gradient)
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()

    def apply(
        self, slot: Slot, contributions: list[Contribution], learning_rate: Callable[[int], float]
    ) -> bool:
        """Make a slot the next version: one step with the mean gradient, weighted by samples.

        A gradient that is not finite changes no weight; its environment steps are counted all the same.
        The order of `contributions` is part of the result (floating-point sums). Returns whether a
        version was made.
        """
        rate = learning_rate(slot.steps)
        for c in contributions:
            slot.header[Header.STEPS] += c.samples
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
            total = np.float32(sum(c.samples for c in good))
            gradient = np.zeros_like(good[0].gradient)
            for c in good:
                gradient += c.gradient * (np.float32(c.samples) / total)
        self.step(slot, gradient, rate)
        slot.header[Header.VERSION] += 1
        return True
