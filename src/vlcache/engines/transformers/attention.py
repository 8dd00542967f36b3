"""Causal attention of some rows of a prompt over everything before each of them.

    keys      0 1 2 3 4 5 6 7 8 9
    row 1     # #
    row 2     # # #                    run (1, 3): its keys end at 3
    row 8     # # # # # # # # #
    row 9     # # # # # # # # # #      run (8, 10): its keys end at 10

Each run of rows is one sequence whose context is everything before its end, so no run pays for keys that only a
later one sees. Query heads that share a KV head are laid one after the other as rows of that head: the keys, which
outnumber a hit's rows by far, are not copied per query head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vlcache.ranges import Ranges, count, indices

__all__ = ["attend"]

# More runs than this are taken together: each would cost more in calls than it saves in keys
_RUNS = 8
# Bound on rows x keys at a time, per KV head
_ELEMENTS = 1 << 22


def attend(queries: Tensor, keys: Tensor, values: Tensor, rows: Ranges, scale: float) -> Tensor:
    """Softmax attention of `rows` over the prompt.

    Parameters
    ----------
    queries : Tensor, `[heads, count(rows), D]`
    keys, values : Tensor, `[H, T, D]`
        Of the whole prompt; those after the last row are not read.
    rows : Ranges
        Prompt indices of the queries. Row i sees keys 0 to i.
    scale : float

    Returns
    -------
    Tensor, `[heads, count(rows), D]`
    """
    groups = queries.shape[0] // keys.shape[0]
    out = torch.empty_like(queries)
    at = 0
    for some in [(run,) for run in rows] if len(rows) <= _RUNS else [rows]:
        n = count(some)
        if len(some) == 1 and some[0][0] == 0:
            out[:, at : at + n] = F.scaled_dot_product_attention(
                queries[None, :, at : at + n],
                keys[None, :, : some[0][1]],
                values[None, :, : some[0][1]],
                is_causal=True,
                scale=scale,
                enable_gqa=groups > 1,
            )[0]
        else:
            chunk = max(1, _ELEMENTS // (groups * keys.shape[1]))
            for start in range(0, n, chunk):
                stop = min(n, start + chunk)
                first, hidden = _hidden_keys(some, start, stop, groups, queries.device)
                part = slice(at + start, at + stop)
                out[:, part] = _over_context(queries[:, part], keys, values, first, hidden, scale)
        at += n
    return out


@lru_cache(maxsize=16)
def _hidden_keys(rows: Ranges, start: int, stop: int, groups: int, device: torch.device) -> tuple[int, Tensor]:
    """What rows number `start` to `stop` of `rows` must not see: of the keys from the first of them on (all see
    those before it) to the last, `[groups * (stop - start), keys]`; and the index of that first key.

    The same rows come layer after layer, hence the memory.
    """
    where = torch.tensor(indices(rows)[start:stop], device=device)
    first = int(where[0])
    hidden = torch.arange(first, int(where[-1]) + 1, device=device) > where[:, None]
    return first, hidden.repeat(groups, 1)


def _over_context(queries: Tensor, keys: Tensor, values: Tensor, first: int, hidden: Tensor, scale: float) -> Tensor:
    heads, n, dim = queries.shape
    folded = queries.reshape(keys.shape[0], -1, dim)
    stop = first + hidden.shape[1]
    keys, values = keys[:, :stop], values[:, :stop]
    if queries.device.type == "cpu" and queries.dtype == torch.bfloat16:
        mixed = _by_products(folded, keys, values, hidden, scale)
    else:
        seen = torch.ones(hidden.shape[0], stop, dtype=torch.bool, device=hidden.device)
        seen[:, first:] = ~hidden
        mixed = F.scaled_dot_product_attention(folded[None], keys[None], values[None], seen, scale=scale)[0]
    return mixed.reshape(heads, n, dim)


def _by_products(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Attention by two matrix products, twice as fast in bfloat16 on CPUs as the fused kernel.

    A bfloat16 product sums in float32 but rounds its result, which is too coarse for scores (0.1 at 40). A second
    product that subtracts the rounded result before it is rounded itself gives what was lost, so their sum has 16
    bits.
    """
    turned = keys.transpose(-1, -2)
    rounded = torch.bmm(queries, turned)
    lost = torch.baddbmm(rounded, queries, turned, beta=-1)
    scores = rounded.float().add_(lost).mul_(scale)
    scores[:, :, scores.shape[2] - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    return torch.bmm(torch.softmax(scores, dim=-1).to(values.dtype), values)
