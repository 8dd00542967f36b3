"""K and V that arrive layer by layer while the model already computes with those that are there.

    reader     layer 0 | layer 1 | layer 2 | ...        in a thread of the tier
    model                layer 0    | layer 1    | ...  waits only where the reader is behind

Bytes go straight into memory of this process and are checked there, so what was checked is what is used. (A memory map
would save the copy, but a file that another program cuts short would kill the process, and bytes could change after the
check.)
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from vlcache.keys import tensor_bytes
from vlcache.store.codec import Head, Part, check, layer_parts
from vlcache.store.eightbit import grow
from vlcache.types import Entry, EntryLostError

__all__ = ["Arrival", "Read", "fetch", "load_layers"]

Read = Callable[[Part, memoryview], None]
"""Fills the view with a part's bytes, or raises: DamagedError, or what its medium raises."""

_HUGE_BYTES = 4 << 20
TIMEOUT_S = 60.0
"""How long a layer is waited for before the entry counts as lost."""


def fetch(part: Part, read: Read, out: torch.Tensor | None = None) -> torch.Tensor:
    """Read one tensor and check it.

    Parameters
    ----------
    out : Tensor, optional
        Contiguous, of the part's dtype and shape; a new one otherwise.

    Raises
    ------
    DamagedError
        Other bytes than were written.
    """
    tensor = torch.empty(part.shape, dtype=part.dtype) if out is None else out
    view = tensor_bytes(tensor)
    read(part, view)
    check(part, view)
    return tensor


class Arrival:
    """An entry of which everything but K and V is there.

    Parameters
    ----------
    head : Head
    read : callable
        See `Read`; called from one thread at a time.
    late : callable
        Told the reason when a layer is waited for in vain.

    Attributes
    ----------
    entry : Entry
        Usable at once: whoever asks it for a layer waits for that layer.

    Raises
    ------
    DamagedError
    """

    def __init__(self, head: Head, read: Read, late: Callable[[str], object]) -> None:
        self.head = head
        self._late = late
        self._read = read
        self._there = 0
        self._lost: str | None = None
        self._changed = threading.Condition()
        parts, g, n = head.parts, head.header.geometry, head.header.tokens
        keys = values = None
        if head.has_kv:
            dtype = getattr(torch, head.header.dtype.removeprefix("torch."))
            keys, values = _memory((2, g.layers, n, g.kv_heads, g.head_dim), dtype)
        positions = fetch(parts["positions"], read)  # in the order of the file: what reads ahead relies on it
        self.entry = Entry(
            header=head.header,
            encoder=fetch(parts["encoder"], read),
            positions=positions,
            keys=keys,
            values=values,
            checkpoints={layer: fetch(parts[f"checkpoint.{layer:03d}"], read) for layer in head.checkpoints},
            capture="neutral" if head.capture == "neutral" else "observed",
            created_s=head.created_s,
            cost_s=head.cost_s,
            arriving=self.wait if head.has_kv else None,
        )

    def load(self, layer: int) -> None:
        """Read K and V of a layer; DamagedError or what the medium raises if they are not sound."""
        for name, all_layers in zip(layer_parts(layer), (self.entry.keys, self.entry.values), strict=True):
            assert all_layers is not None
            if self.head.stored == "raw":
                fetch(self.head.parts[name], self._read, all_layers[layer])
            else:
                scale = fetch(self.head.parts[f"{name}_scale"], self._read)
                grow(fetch(self.head.parts[name], self._read), scale, all_layers[layer])
        with self._changed:
            self._there = layer + 1
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Whoever waits, now or later, learns that the rest does not come."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        return self._lost is not None

    def wait(self, layer: int) -> None:
        """`Entry.arriving`."""
        if self._there > layer:
            return
        with self._changed:
            came = self._changed.wait_for(lambda: self._there > layer or self._lost is not None, TIMEOUT_S)
            if self._there > layer:
                return
            if not came:
                self._lost = f"no layer for {TIMEOUT_S:g} s"
                self._late(self._lost)
            raise EntryLostError(self.head.header.key, self._lost or "")


def _memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any values. A large one asks for huge pages: touching its memory for the first time, 4 kB at a time,
    would take three times as long as reading an entry into it."""
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def load_layers(arrivals: Sequence[Arrival], fault: Callable[[Arrival, Exception], str]) -> None:
    """Read the layers of several entries in the order in which a model needs them: layer 0 of all, layer 1 of all, ...

    Parameters
    ----------
    fault : callable
        Told of an arrival that failed and why; returns the reason to count.
    """
    coming = [arrival for arrival in arrivals if arrival.entry.has_kv]
    layers = max((arrival.entry.header.geometry.layers for arrival in coming), default=0)
    for layer in range(layers):
        for arrival in coming:
            if arrival.failed or layer >= arrival.entry.header.geometry.layers:
                continue
            try:
                arrival.load(layer)
            except Exception as error:
                arrival.fail(fault(arrival, error))
