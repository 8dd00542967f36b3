"""K and V in 8 bits: one scale per layer and head, so that a head of small values is not drowned by a large one.

Lossy, and off unless asked for. What was rounded once and is stored again is not rounded further (in float32).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vlcache.types import Entry

__all__ = ["EIGHT_BIT", "grow", "rounded", "shrink"]

EIGHT_BIT = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Dtype and largest value by name."""


def shrink(tensor: Tensor, stored: str) -> tuple[Tensor, Tensor]:
    """`[N, H, D]` in 8 bits, and a scale per head, float32 `[H]`."""
    dtype, largest = EIGHT_BIT[stored]
    wide = tensor.float()
    scale = wide.abs().amax(dim=(0, 2)).clamp_min(torch.finfo(torch.float32).tiny) / largest
    small = wide / scale[:, None]
    return scale, (small.round() if stored == "int8" else small).clamp(-largest, largest).to(dtype)


def grow(small: Tensor, scale: Tensor, out: Tensor) -> None:
    """8-bit `[N, H, D]` and its scale `[H]` back to values, written to `out`."""
    out.copy_(small.float() * scale[:, None])


def rounded(entry: Entry, stored: str) -> Entry:
    """An entry as a tier that stores K and V so gives it back."""
    if stored == "raw" or entry.keys is None or entry.values is None:
        return entry
    keys, values = torch.empty_like(entry.keys), torch.empty_like(entry.values)
    for layer in range(len(keys)):
        for tensor, out in zip(entry.kv(layer), (keys[layer], values[layer]), strict=True):
            scale, small = shrink(tensor, stored)
            grow(small, scale, out)
    return replace(entry, keys=keys, values=values, arriving=None)
