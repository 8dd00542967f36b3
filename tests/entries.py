"""Small entries for tests of what keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vlcache.rope import Rope
from vlcache.store import Store
from vlcache.store.codec import encode
from vlcache.types import Entry, EntryKey, Geometry, Header

GEOMETRY = Geometry(layers=3, kv_heads=2, head_dim=4, hidden=8, deepstack=1, rope=Rope("mrope", (1.0, 0.1), (0, 1, 1)))
TOKENS = 64


def make_key(number: int) -> EntryKey:
    return EntryKey(f"picture {number}", "scope")


def make_entry(number: int, tokens: int = TOKENS, fill: float | None = None, **changes: Any) -> Entry:
    """An entry whose every tensor holds `fill`, its own number unless given."""
    g, value = GEOMETRY, float(number if fill is None else fill)
    header = Header(make_key(number), (1, 2, 2 * tokens), tokens, "torch.float32", g, "model", "processor", "tenant")
    kv = (g.layers, tokens, g.kv_heads, g.head_dim)
    made = Entry(
        header=header,
        encoder=torch.full((tokens, g.encoder_width), value),
        positions=torch.full((3, tokens), int(value)),
        keys=torch.full(kv, value),
        values=torch.full(kv, value),
        checkpoints={2: torch.full((tokens, g.hidden), value)},
    )
    return replace(made, **changes)


def holds(entry: Entry, value: float) -> bool:
    """All tensors of an entry hold one value."""
    tensors = [entry.encoder, entry.positions, *entry.checkpoints.values()]
    tensors += [kv for layer in range(GEOMETRY.layers) for kv in entry.kv(layer)]
    return all(bool((t == value).all()) for t in tensors)


def kept(store: Store, *numbers: int) -> list[int]:
    """Which of these pictures the store has; looked up one at a time, in order."""
    return [n for n in numbers if make_key(n) in store.get_many([make_key(n)])]


def file_size(entry: Entry) -> int:
    """Bytes of an entry as the disk and the server keep it."""
    return encode(entry).head.size
