"""The nouns: what passes between the stages. All of them are frozen.

Shapes are written with these letters everywhere:
L decoder layers, H KV heads, D head dimension, N vision tokens of one span, T tokens of the prompt,
A position axes (1 or 3), C checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vlcache.rope import Rope

__all__ = [
    "LAYOUT",
    "Capture",
    "Context",
    "Entry",
    "EntryKey",
    "EntryLostError",
    "Geometry",
    "Header",
    "Span",
    "Stored",
]

LAYOUT = 1
"""Version of an entry's layout. An entry of another version is a miss."""

Capture = Literal["observed", "neutral"]

Stored = Literal["raw", "int8", "fp8"]
"""How a disk or a server keeps K and V: as computed, or in 8 bits with a scale per layer and head."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The decoder's shape, as far as reuse has to know it.

    Attributes
    ----------
    layers, kv_heads, head_dim, hidden : int
        L, H, D and the width of the hidden state.
    deepstack : int
        Leading layers after which encoder features are added to the vision tokens (Qwen3-VL); 0 elsewhere.
    rope : Rope
    """

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    deepstack: int
    rope: Rope

    @property
    def encoder_width(self) -> int:
        """Width of a span's encoder output: the embedding and the DeepStack features side by side."""
        return self.hidden * (1 + self.deepstack)


@dataclass(frozen=True, slots=True)
class EntryKey:
    """Identity of an entry: full SHA-256 digests, never a shortened one.

    Attributes
    ----------
    content : str
        The picture: its pixels, how they were read, and the processor's settings.
    scope : str
        Everything else that has to be equal: model, dtype, layout, tenant.
    """

    content: str
    scope: str


@dataclass(frozen=True, slots=True)
class Span:
    """One picture inside a prompt.

    Attributes
    ----------
    content : str
        Digest of the picture (`EntryKey.content`).
    start : int
        Index of its first vision token in the prompt.
    length : int
        N, its vision tokens.
    grid : tuple of int
        Patches (t, h, w) as the encoder sees them, before merging.
    """

    content: str
    start: int
    length: int
    grid: tuple[int, int, int]

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Header:
    """What an entry says about itself; compared in full on every hit, see `Entry.mismatch`.

    `model`, `processor` and `tenant` are digests.
    """

    key: EntryKey
    grid: tuple[int, int, int]
    tokens: int
    dtype: str
    geometry: Geometry
    model: str
    processor: str
    tenant: str
    layout: int = LAYOUT


@dataclass(frozen=True, slots=True)
class Context:
    """What stood before a picture when it was captured, as digests, see `vlcache.context`.

    Attributes
    ----------
    turn, neighbours : str
        Text, and pictures, before it in its own turn of the chat.
    pictures : str
        Pictures of earlier turns.
    """

    turn: str
    neighbours: str
    pictures: str


class EntryLostError(Exception):
    """An entry whose K/V were still arriving turned out damaged or did not arrive. Whoever uses the entry starts again
    without it; this never reaches a caller of the package.

    Attributes
    ----------
    key : EntryKey
    reason : str
        Short, to be counted.
    """

    def __init__(self, key: EntryKey, reason: str) -> None:
        super().__init__(f"entry {key.content[:12]}: {reason}")
        self.key = key
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Entry:
    """What the store keeps for one picture. Only exact values: repaired K/V never become an entry.

    Attributes
    ----------
    header : Header
    encoder : Tensor, `[N, hidden * (1 + deepstack)]`
        Encoder output. It depends on the picture alone, so it is always exact.
    positions : Tensor, int64, `[A, N]`
        Rotary positions at which the keys were captured.
    keys, values : Tensor or None, `[L, N, H, D]`
        Keys with their rotation in them, as attention saw them. None where the picture has only been seen
        behind repaired K/V so far: such an entry spares the encoder, not the prefill.
    checkpoints : mapping of int to Tensor, `[N, hidden]`
        Hidden states at the input of some layers, so that rows can enter there.
    capture : {"observed", "neutral"}
        The context of the keys: the request that first carried the picture, or the chat template's opening.
    context : Context or None
        Digests of that context; None: unknown.
    created_s : float
        Seconds since the epoch.
    cost_s : float
        Seconds that it took to compute, 0 if unknown.
    arriving : callable, optional
        Of an entry that comes from a disk or a server layer by layer: called with a layer, returns once its K/V are in
        `keys` and `values` and checked, or raises `EntryLostError`. None: all there.

    Tensors are shared, not copied: whoever holds an entry must not write to them.
    """

    header: Header
    encoder: Tensor
    positions: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    checkpoints: Mapping[int, Tensor] = field(default_factory=dict)
    capture: Capture = "observed"
    context: Context | None = None
    created_s: float = 0.0
    cost_s: float = 0.0
    arriving: Callable[[int], None] | None = None

    @property
    def has_kv(self) -> bool:
        return self.keys is not None and self.values is not None

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, `[N, H, D]` each, once they are there.

        Raises
        ------
        EntryLostError
            They did not arrive.
        """
        assert self.keys is not None
        assert self.values is not None
        if self.arriving is not None:
            self.arriving(layer)
        return self.keys[layer], self.values[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [self.encoder, self.positions, *self.checkpoints.values()]
        tensors += [t for t in (self.keys, self.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def mismatch(self, expected: Header) -> str | None:
        """Why this entry cannot stand in for `expected`, as a short reason to count; None if it can."""
        for name in ("layout", "key", "tenant", "model", "processor", "dtype", "geometry", "grid", "tokens"):
            if getattr(self.header, name) != getattr(expected, name):
                return name
        tensors = [self.encoder, *self.checkpoints.values()]
        tensors += [kv for kv in (self.keys, self.values) if kv is not None]
        if any(str(t.dtype) != expected.dtype for t in tensors) or self.positions.dtype != torch.int64:
            return "dtype"
        g, n = expected.geometry, expected.tokens
        if tuple(self.encoder.shape) != (n, g.encoder_width):
            return "shape"
        if tuple(self.positions.shape) != (g.rope.axes, n):
            return "shape"
        if self.has_kv:
            for kv in (self.keys, self.values):
                assert kv is not None
                if tuple(kv.shape) != (g.layers, n, g.kv_heads, g.head_dim):
                    return "shape"
        for layer, hidden in self.checkpoints.items():
            if not 0 < layer < g.layers or tuple(hidden.shape) != (n, g.hidden):
                return "shape"
        return None
