"""Cores: memory between torso and heads, over `[T, B, F]` with a state `[B, S]` and `starts [T, B]`.

`core(x, state, starts, carry) -> (features [T, B, out_features], state)`. The state is zeroed where an episode
starts, in acting and in learning alike. With `carry=False` the state after the last step is not wanted (learning
never does) and the one given comes back: episodes are then computed side by side instead of one after another.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn


class LSTM(nn.Module):
    """Long short-term memory (Hochreiter and Schmidhuber 1997)."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(features, size)
        self.size = self.out_features = size
        self.state_size = 2 * size  # hidden and cell values side by side

    def forward(self, x: Tensor, state: Tensor, starts: Tensor, carry: bool = True) -> tuple[Tensor, Tensor]:
        """Outputs `[T, B, size]` and the state after the last step."""
        inside = bool(starts[1:].any())
        if inside and not carry:
            return self._episodes(x, state, starts), state
        # one call of the cell for each stretch without a start
        cuts = [0, *(t for t in range(1, len(x)) if inside and bool(starts[t].any())), len(x)]
        outputs = []
        for begin, end in pairwise(cuts):
            # where, not times: a NaN in an old state must not survive the start of an episode
            state = torch.where(starts[begin].unsqueeze(-1), torch.zeros(()), state)
            out, state = self._run(x[begin:end], state)
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _run(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h, c = (part.unsqueeze(0).contiguous() for part in state.chunk(2, -1))
        out, (h, c) = self.cell(x, (h, c))
        return out, torch.cat([h[0], c[0]], -1)

    def _episodes(self, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """Each stretch of an episode is a column of its own; those of like length are computed in one call.

        A call of the cell costs mostly its overhead: `[T, B]` with an episode's start in every other row would be
        T/2 calls otherwise. Columns shorter than the longest of their call run on over rows nobody reads.
        """
        T, B = x.shape[:2]
        first = starts.numpy().T.copy()
        fresh = first[:, 0].copy()
        first[:, 0] = True
        column, begin = np.nonzero(first)  # in order of time within a column
        end = np.append(begin[1:], T)
        end[np.flatnonzero(np.append(column[1:] != column[:-1], True))] = T
        length = end - begin
        group = np.ceil(np.log2(length)).astype(np.int64)
        zero = (begin > 0) | fresh[column]
        flat, place = x.reshape(T * B, -1), np.zeros((T, B), np.int64)
        outputs, taken = [], 0
        for g in np.unique(group):
            chosen = np.flatnonzero(group == g)
            longest, wide = int(length[chosen].max()), len(chosen)
            rows = begin[chosen] + np.arange(longest)[:, None]  # [longest, wide]
            at = taken + np.arange(longest)[:, None] * wide + np.arange(wide)
            read = rows < end[chosen]
            place[rows[read], np.broadcast_to(column[chosen], rows.shape)[read]] = at[read]
            index = np.minimum(rows, T - 1) * B + column[chosen]
            opening = torch.where(
                torch.from_numpy(zero[chosen]).unsqueeze(-1), torch.zeros(()), state[torch.from_numpy(column[chosen])]
            )
            out, _ = self._run(flat[torch.from_numpy(index.reshape(-1))].view(longest, wide, -1), opening)
            outputs.append(out.reshape(longest * wide, -1))
            taken += longest * wide
        return torch.cat(outputs)[torch.from_numpy(place.reshape(-1))].view(T, B, -1)


class Attention(nn.Module):
    """An LSTM whose outputs attend to those of the last `window` steps of the same episode.

    y_t = h_t + W_o softmax(q_t K / sqrt(d) + b) V (Vaswani et al. 2017, eq. 1) with layer-normalized h for q, K and V,
    and a learned bias b of each head for each distance in time (Raffel et al. 2020, sec. 2.1). The state holds the
    LSTM's own, the last `window - 1` outputs, and how many of them belong to this episode.
    """

    def __init__(self, features: int, size: int, window: int, heads: int) -> None:
        super().__init__()
        self.lstm = LSTM(features, size)
        self.norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.distance = nn.Parameter(torch.zeros(heads, window))  # the last entry is the step itself
        self.size, self.window, self.heads, self.out_features = size, window, heads, size
        self.state_size = self.lstm.state_size + (window - 1) * size + 1

    def forward(self, x: Tensor, state: Tensor, starts: Tensor, carry: bool = True) -> tuple[Tensor, Tensor]:
        """Outputs `[T, B, size]` and the state after the last step."""
        T, B, W = len(x), x.shape[1], self.window
        n = self.lstm.state_size
        own, seen, held = state[:, :n], state[:, n:-1], state[:, -1:]
        h, own = self.lstm(x, own, starts, carry)
        before, past = self._before(held[:, 0], starts), seen.view(B, W - 1, self.size).transpose(0, 1)
        known = torch.arange(W - 1, 0, -1).unsqueeze(-1) <= held[:, 0].nan_to_num()
        past = torch.where(known.unsqueeze(-1), past, torch.zeros(()))
        line = torch.cat([past, h])  # [W - 1 + T, B, size]
        q, k, v = self.qkv(self.norm(line)).chunk(3, -1)
        d = self.size // self.heads
        q = q[W - 1 :].reshape(T, B, self.heads, d)
        k, v = (part.unfold(0, W, 1).reshape(T, B, self.heads, d, W) for part in (k, v))
        score = torch.einsum("tbhd,tbhdw->tbhw", q, k) / math.sqrt(d) + self.distance
        far = torch.arange(W - 1, -1, -1)  # steps back of each place in the window
        score = score.masked_fill((far > before.unsqueeze(-1)).unsqueeze(2), -math.inf)
        mixed = torch.einsum("tbhw,tbhdw->tbhd", score.softmax(-1), v).reshape(T, B, self.size)
        y = h + self.out(mixed)
        if not carry:
            return y, state
        held = (before[-1] + 1).clamp(max=W - 1).unsqueeze(-1).float()
        mine = far[1:].unsqueeze(-1) <= before[-1]  # the rest is another episode's
        kept = (
            torch.where(mine.unsqueeze(-1), line[T:], torch.zeros(())).transpose(0, 1).reshape(B, (W - 1) * self.size)
        )
        return y, torch.cat([own, kept, held], -1)

    def _before(self, held: Tensor, starts: Tensor) -> Tensor:
        """Steps of the same episode before each one that it may look back to, `[T, B]`, at most `window - 1`."""
        row = torch.arange(len(starts)).unsqueeze(-1)
        last = torch.where(starts, row, torch.full((), -1)).cummax(0).values
        count = torch.where(last >= 0, row - last, held.nan_to_num().long() + row)
        return count.clamp(max=self.window - 1)
