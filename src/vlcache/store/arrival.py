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
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from vlcache.keys import tensor_bytes
from vlcache.store.codec import Head, Part, check, layer_parts
from vlcache.store.eightbit import grow
from vlcache.types import Entry, EntryKey, EntryLostError

__all__ = ["Arrival", "Read", "fetch", "load_layers"]

Read = Callable[[Part, memoryview], None]
"""Fills the view with a part's bytes, or raises: DamagedError, or what its medium raises."""

_HUGE_BYTES = 1 << 20
TIMEOUT_S = 60.0
"""How long a layer is waited for before the entry counts as lost."""


def fetch(part: Part, read: Read) -> torch.Tensor:
    """Read one tensor and check it.

    Raises
    ------
    DamagedError
        Other bytes than were written.
    """
    tensor = _memory(part.shape, part.dtype)
    view = tensor_bytes(tensor)
    read(part, view)
    check(part, view)
    return tensor


class _Progress:
    """Which layers of an entry are there.

    What an entry holds on to is this and not its `Arrival`, which holds the entry: a cycle would keep dead entries'
    memory until the collector comes by.
    """

    def __init__(self, key: EntryKey, layers: int, late: Callable[[str], object]) -> None:
        self._key = key
        self._late = late
        self._loaded = [False] * layers
        self._there = 0  # layers from the first on
        self._wanted = layers  # the first layer that somebody waits for
        self._changed = threading.Condition()
        self.lost: str | None = None

    def note(self, layer: int) -> None:
        """A layer is there."""
        with self._changed:
            self._loaded[layer] = True
            while self._there < len(self._loaded) and self._loaded[self._there]:
                self._there += 1
            if self._there > self._wanted:  # waking whoever waits for more would only slow the reading
                self._wanted = len(self._loaded)
                self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The rest does not come."""
        with self._changed:
            self.lost = reason
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """`Entry.arriving`."""
        if self._there > layer:
            return
        with self._changed:
            came = self._changed.wait_for(lambda: self._came(layer), TIMEOUT_S)
            if self._there > layer:
                return
            if not came:
                self.lost = f"no layer for {TIMEOUT_S:g} s"
                self._late(self.lost)
            raise EntryLostError(self._key, self.lost or "")

    def _came(self, layer: int) -> bool:
        self._wanted = min(self._wanted, layer)
        return self._there > layer or self.lost is not None


class Arrival:
    """An entry of which everything but K and V is there.

    Parameters
    ----------
    head : Head
    read : callable
        See `Read`; called from as many threads as load layers.
    late : callable
        Told the reason when a layer is waited for in vain.

    Attributes
    ----------
    entry : Entry
        Usable at once: whoever asks it for a layer waits for that layer and those before it.
    layers : int
        L, 0 of an entry without K/V.

    Raises
    ------
    DamagedError
    """

    def __init__(self, head: Head, read: Read, late: Callable[[str], object]) -> None:
        self.head = head
        self.layers = head.header.geometry.layers if head.has_kv else 0
        self._read = read
        self._progress = _Progress(head.header.key, self.layers, late)
        parts, g, n = head.parts, head.header.geometry, head.header.tokens
        keys = values = None
        if head.has_kv:
            dtype = getattr(torch, head.header.dtype.removeprefix("torch."))
            self._kv = _memory((2, g.layers, n, g.kv_heads, g.head_dim), dtype)
            self._views = tensor_bytes(self._kv)
            keys, values = self._kv
        positions = fetch(parts["positions"], read)  # in the order of the file: what reads ahead relies on it
        self.entry = Entry(
            header=head.header,
            encoder=fetch(parts["encoder"], read),
            positions=positions,
            keys=keys,
            values=values,
            checkpoints={layer: fetch(parts[f"checkpoint.{layer:03d}"], read) for layer in head.checkpoints},
            capture="neutral" if head.capture == "neutral" else "observed",
            context=head.context,
            created_s=head.created_s,
            cost_s=head.cost_s,
            arriving=self._progress.wait if head.has_kv else None,
        )

    def load(self, layer: int) -> None:
        """Read K and V of a layer; DamagedError or what the medium raises if they are not sound."""
        for name, kind in zip(layer_parts(layer), (0, 1), strict=True):
            part = self.head.parts[name]
            if self.head.stored == "raw":
                start = (kind * self.layers + layer) * part.nbytes
                view = self._views[start : start + part.nbytes]
                self._read(part, view)
                check(part, view)
            else:
                scale = fetch(self.head.parts[f"{name}_scale"], self._read)
                grow(fetch(part, self._read), scale, self._kv[kind, layer])
        self._progress.note(layer)

    def fail(self, reason: str) -> None:
        """Whoever waits, now or later, learns that the rest does not come."""
        self._progress.fail(reason)

    @property
    def failed(self) -> bool:
        return self._progress.lost is not None


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


def load_layers(
    arrivals: Sequence[Arrival],
    fault: Callable[[Arrival, Exception], str],
    done: Callable[[float], None],
    submit: Callable[[Callable[[], None]], object],
    readers: int = 1,
) -> None:
    """Read the layers of several entries in the background, in the order in which a model needs them: layer 0 of all,
    layer 1 of all, ...

    Parameters
    ----------
    fault : callable
        Told of an arrival that failed and why; returns the reason to count.
    done : callable
        Called at the end with the seconds that it took.
    submit : callable
        Has a thread run something; RuntimeError if it cannot any more.
    readers : int
        Threads that take turns at the layers.
    """
    layers = max((arrival.layers for arrival in arrivals), default=0)
    start, left, lock = time.perf_counter(), [readers], threading.Lock()
    started: set[int] = set()

    def read(first: int) -> None:
        with lock:  # a pool that cannot start a thread may have kept the job all the same
            if first in started:
                return
            started.add(first)
        for layer in range(first, layers, readers):
            for arrival in arrivals:
                if layer < arrival.layers and not arrival.failed:
                    try:
                        arrival.load(layer)
                    except Exception as error:
                        arrival.fail(fault(arrival, error))
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            done(time.perf_counter() - start)

    for first in range(readers):
        try:
            submit(partial(read, first))
        except RuntimeError:
            read(first)
