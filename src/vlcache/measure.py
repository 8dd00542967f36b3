"""What rules measure: how far fresh values are from cached ones, and where attention goes.

Everything is computed in float32 and without a copy of the whole prompt's K per query head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vlcache.ranges import Ranges, indices, intersect, normal, places

__all__ = ["Gaze", "attention_paid", "divergence", "moved_attention", "moved_values", "preference"]


# Attention weights of so many rows are held at a time
_ROWS = 64


def divergence(logits: Tensor, before: Tensor) -> float:
    """How far a distribution over the vocabulary moved: KL of the new from the old one, nats; `[vocabulary]` both.

    What is no number moved by infinity.
    """
    new, old = logits.float().log_softmax(-1), before.float().log_softmax(-1)
    terms = torch.where(new == -torch.inf, 0.0, new.exp() * (new - old))
    moved = float(terms.sum())
    return math.inf if math.isnan(moved) else max(0.0, moved)


def preference(logits: Tensor, before: Tensor) -> float:
    """By how much a distribution prefers another token to the first choice of the one before, difference of
    log-probabilities; `[vocabulary]` both. Negative where the choice is the same."""
    new, old = logits.float().log_softmax(-1), int(before.argmax())
    others = torch.cat((new[:old], new[old + 1 :]))
    return float(others.max() - new[old])


def moved_values(fresh: Tensor, cached: Tensor) -> Tensor:
    """Squared distance of each token's values, `[N, H, D]` both, over heads and dimensions: `[N]`."""
    return (fresh.float() - cached.float()).square().sum((1, 2))


def attention_paid(queries: Tensor, keys: Tensor, rows: Ranges) -> Tensor:
    """The attention weights of some rows.

    Parameters
    ----------
    queries : Tensor, `[heads, count(rows), D]`
        Times the attention's scale.
    keys : Tensor, `[T, H, D]`
        Of the whole prompt, or of its first tokens if no row is behind them.
    rows : Ranges
        Prompt indices of the queries. Row i sees keys 0 to i.

    Returns
    -------
    Tensor, float32, `[heads, count(rows), T]`
    """
    heads, n, dim = queries.shape
    folded = queries.float().reshape(keys.shape[1], -1, dim)
    scores = torch.bmm(folded, keys.float().permute(1, 2, 0)).view(heads, n, len(keys))
    where = torch.tensor(indices(rows), device=keys.device)
    hidden = torch.arange(len(keys), device=keys.device) > where[:, None]
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1)


def moved_attention(queries: Tensor, keys: Tensor, cached: Tensor, rows: Ranges, start: int) -> Tensor:
    """How far the attention that rows pay to a span's tokens moves when its cached keys are taken: `[N]`.

    Parameters
    ----------
    queries : Tensor, `[heads, count(rows), D]`
        Times the attention's scale.
    keys : Tensor, `[T, H, D]`
        Of the whole prompt, the span's fresh.
    cached : Tensor, `[N, H, D]`
        The span's cached keys, moved.
    start : int
        Of the span.

    Returns
    -------
    Tensor, float32, `[N]`
        Absolute differences, summed over heads and rows.
    """
    stop = start + len(cached)
    old = torch.cat((keys[:start], cached, keys[stop:]))
    where, moved = indices(rows), torch.zeros(len(cached), device=keys.device)
    for at in range(0, len(where), _ROWS):
        some = normal((row, row + 1) for row in where[at : at + _ROWS])
        part = queries[:, at : at + _ROWS]
        now, then = (attention_paid(part, k, some)[:, :, start:stop] for k in (keys, old))
        moved += (now - then).abs().sum((0, 1))
    return moved


class Gaze:
    """Attention that a prompt's last rows pay to its tokens, summed over the layers from one on: half of it the last
    row's, half the mean of all of them, in the mean over heads.

    An adapter calls `see` in each layer with the queries that it has anyway.

    Parameters
    ----------
    rows : Ranges
        Prompt indices.
    first_layer : int
    """

    def __init__(self, rows: Ranges, first_layer: int) -> None:
        self._rows = rows
        self._first = first_layer
        self.paid: Tensor | None = None

    def again(self) -> Gaze:
        """One that has seen nothing yet."""
        return Gaze(self._rows, self._first)

    def see(self, layer: int, queries: Tensor, keys: Tensor, rows: Ranges) -> None:
        """Take one layer in.

        Parameters
        ----------
        queries : Tensor, `[heads, count(rows), D]`
            Times the attention's scale.
        keys : Tensor, `[T, H, D]`
        rows : Ranges
        """
        mine = intersect(self._rows, rows)  # the last layer has the wanted rows only
        if layer < self._first or not mine:
            return
        where = torch.tensor(indices(places(mine, rows)), device=queries.device)
        paid = attention_paid(queries[:, where], keys[: self._rows[-1][1]], mine).mean(0)
        paid = paid[-1] + paid.mean(0)
        self.paid = paid if self.paid is None else self.paid + paid
