"""What rules measure: how far fresh values are from cached ones, and where attention goes.

Everything is computed in float32 and without a copy of the whole prompt's K per query head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlcache.ranges import Ranges, indices, normal

__all__ = ["attention_paid", "moved_attention", "moved_values"]


# Attention weights of so many rows are held at a time
_ROWS = 64


def moved_values(fresh: Tensor, cached: Tensor) -> Tensor:
    """Squared distance of each token's values, `[N, H, D]` both, over heads and dimensions: `[N]`."""
    return (fresh.float() - cached.float()).square().sum((1, 2))


def attention_paid(queries: Tensor, keys: Tensor, rows: Ranges, scale: float) -> Tensor:
    """The attention weights of some rows.

    Parameters
    ----------
    queries : Tensor, `[heads, count(rows), D]`
    keys : Tensor, `[T, H, D]`
        Of the whole prompt, or of its first tokens if no row is behind them.
    rows : Ranges
        Prompt indices of the queries. Row i sees keys 0 to i.
    scale : float

    Returns
    -------
    Tensor, float32, `[heads, count(rows), T]`
    """
    heads, n, dim = queries.shape
    folded = queries.float().reshape(keys.shape[1], -1, dim)
    scores = torch.bmm(folded, keys.float().permute(1, 2, 0)).mul_(scale).view(heads, n, len(keys))
    where = torch.tensor(indices(rows), device=keys.device)
    hidden = torch.arange(len(keys), device=keys.device) > where[:, None]
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1)


def moved_attention(queries: Tensor, keys: Tensor, cached: Tensor, rows: Ranges, start: int, scale: float) -> Tensor:
    """How far the attention that rows pay to a span's tokens moves when its cached keys are taken: `[N]`.

    Parameters
    ----------
    queries : Tensor, `[heads, count(rows), D]`
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
        now, then = (attention_paid(part, k, some, scale)[:, :, start:stop] for k in (keys, old))
        moved += (now - then).abs().sum((0, 1))
    return moved
