"""Attention over any set of rows, on every path, against dense attention in float64."""

from __future__ import annotations

import pytest
import torch

from vlcache.engines.transformers import attention
from vlcache.engines.transformers.attention import attend
from vlcache.ranges import Ranges, count, indices

ROWS = {
    "all": ((0, 50),),
    "front": ((0, 7),),
    "end": ((40, 50),),
    "two runs": ((0, 9), (45, 50)),
    "inside": ((3, 5), (20, 21), (30, 44)),
    "many": tuple((i, i + 1) for i in range(1, 50, 3)),
    "one": ((49, 50),),
}


def dense(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Ranges, scale: float) -> torch.Tensor:
    groups = queries.shape[0] // keys.shape[0]
    keys, values = (t.double().repeat_interleave(groups, 0) for t in (keys, values))
    seen = torch.arange(keys.shape[1]) <= torch.tensor(indices(rows))[:, None]
    scores = (queries.double() @ keys.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("heads", [2, 6])
def test_rows_see_what_comes_before_them(
    rows: Ranges, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    queries = (3 * torch.randn(heads, count(rows), 16)).to(dtype)
    keys, values = (3 * torch.randn(2, 50, 16)).to(dtype), torch.randn(2, 50, 16).to(dtype)
    bound = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for elements in (attention._ELEMENTS, 300):  # at once, and a few rows at a time
        monkeypatch.setattr(attention, "_ELEMENTS", elements)
        out = attend(queries, keys, values, rows, 0.25)
        assert out.dtype == dtype
        assert (out.double() - dense(queries, keys, values, rows, 0.25)).abs().max() < bound


def test_later_keys_do_not_matter() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(4, 5, 16), torch.randn(2, 50, 16), torch.randn(2, 50, 16)
    out = attend(queries, keys, values, ((10, 15),), 0.25)
    keys[:, 15:], values[:, 15:] = float("nan"), float("nan")
    assert torch.equal(attend(queries, keys, values, ((10, 15),), 0.25), out)


def test_bfloat16_scores_keep_more_than_bfloat16() -> None:
    """One rounded product would be off by a tenth at scores of 40."""
    torch.manual_seed(0)
    queries, keys, values = (
        (6 * torch.randn(2, 8, 64)).bfloat16(),
        (3 * torch.randn(2, 300, 64)).bfloat16(),
        torch.randn(2, 300, 64).bfloat16(),
    )
    last = ((299, 300),)
    exact = dense(queries[:, -1:], keys, values, last, 0.125)
    error = (attend(queries[:, -1:], keys, values, last, 0.125).double() - exact).abs().max()
    rounded = torch.softmax((queries[:, -1:] @ keys.transpose(1, 2)).float() * 0.125, -1).bfloat16() @ values
    coarse = (rounded.double() - exact).abs().max()
    assert coarse > 3 * error
