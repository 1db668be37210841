"""Log-probabilities and entropies of action distributions, for learning; see actions.py for the acting side."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.actions import MASKED, Head


def log_prob_and_entropy(
    head: Head, params: Tensor, action: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log pi(a|s) and the entropy of pi(.|s), both `[...]`.

    Args:
        head: what actions look like.
        params: `[..., P]`.
        action: `[...]` for a single choice, else `[..., components]`; the raw sample, never a clipped one.
        mask: `[..., P]`, True where an action is allowed; masked ones have no probability and no entropy.
    """
    if head.kind == "gaussian":
        mean, log_std = params.chunk(2, -1)
        if action.shape != mean.shape:
            raise ValueError(f"actions {tuple(action.shape)} do not fit means {tuple(mean.shape)}")
        z = (action - mean) * torch.exp(-log_std)
        log_prob = (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        return log_prob, (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
    if head.kind == "categorical":
        return _categorical(params, action, mask)
    if action.shape != (*params.shape[:-1], len(head.sizes)):
        raise ValueError(f"actions {tuple(action.shape)} do not fit {len(head.sizes)} choices of {tuple(params.shape)}")
    log_prob, entropy, at = torch.zeros(()), torch.zeros(()), 0
    for i, n in enumerate(head.sizes):
        part = mask[..., at : at + n] if mask is not None else None
        one, h = _categorical(params[..., at : at + n], action[..., i], part)
        log_prob, entropy, at = log_prob + one, entropy + h, at + n
    return log_prob, entropy


def _categorical(logits: Tensor, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if action.shape != logits.shape[:-1]:
        raise ValueError(f"actions {tuple(action.shape)} do not fit logits {tuple(logits.shape)}")
    if mask is not None:
        logits = logits.masked_fill(~mask, MASKED)
    logp = F.log_softmax(logits, -1)
    chosen = logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    p = logp.exp()  # 0 * a very negative number is 0: no 0 * inf
    return chosen, -(p * logp).sum(-1)
