"""Exact prefixes: the K/V of earlier prompts, for a prompt that begins like one of them to the token.

    earlier   s s s P P P P q q q
    now       s s s P P P P q q a a a a u u        chat turn: 9 tokens of exact K/V, nothing recomputed

Only K/V that a full prefill computed come in here; where a prompt was repaired, only the part before the repair.
Tokens alone do not say what a picture shows, so vision tokens compare by their picture's digest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlcache.types import Span

__all__ = ["ExactPrefix", "ExactPrefixes", "common_tokens", "cut"]


@dataclass(frozen=True, slots=True)
class ExactPrefix:
    """An earlier prompt's beginning.

    Attributes
    ----------
    ids : Tensor, int64, `[T]`
    spans : tuple of Span
        The pictures in it.
    keys, values : sequence of Tensor, `[1, H, T, D]`
        Per layer; not to be written to.
    """

    ids: Tensor
    spans: tuple[Span, ...]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in (*self.keys, *self.values))

    def common(self, ids: Tensor, spans: Sequence[Span]) -> int:
        """Tokens from the start that are the same, up to the edge of a picture rather than into it."""
        n = common_tokens(self.ids, ids)
        mine = {span.start: span for span in self.spans}
        for span in spans:
            if span.start < n and (mine.get(span.start) != span or span.stop > n):
                n = span.start
        for span in self.spans:
            if span.start < n < span.stop:
                n = span.start
        return n


class ExactPrefixes:
    """The latest prompts' exact K/V, bounded in bytes. Safe to call from several threads.

    Parameters
    ----------
    capacity_bytes : int
        Bound on the bytes held; 0 turns it off.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._prefixes: OrderedDict[int, ExactPrefix] = OrderedDict()
        self._next = 0

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(p.nbytes for p in self._prefixes.values())

    def longest(self, ids: Tensor, spans: Sequence[Span]) -> tuple[ExactPrefix | None, int]:
        """The prefix that shares most tokens with a prompt, and how many."""
        best, length = None, 0
        with self._lock:
            for number, prefix in self._prefixes.items():
                common = prefix.common(ids, spans)
                if common > length:
                    best, length = number, common
            if best is None:
                return None, 0
            self._prefixes.move_to_end(best)
            return self._prefixes[best], length

    def put(self, prefix: ExactPrefix) -> bool:
        """Keep a prompt's exact K/V; those that it continues are dropped. False if it was not kept."""
        size, total = prefix.nbytes, len(prefix.ids)
        if size > self._capacity or not total:
            return False
        with self._lock:
            for number, other in list(self._prefixes.items()):
                common = other.common(prefix.ids, prefix.spans)
                if common == total:
                    return False
                if common == len(other.ids):
                    del self._prefixes[number]
            held = sum(p.nbytes for p in self._prefixes.values())
            while held + size > self._capacity:
                _, old = self._prefixes.popitem(last=False)
                held -= old.nbytes
            self._prefixes[self._next] = prefix
            self._next += 1
            return True

    def clear(self) -> None:
        with self._lock:
            self._prefixes.clear()


def common_tokens(one: Tensor, other: Tensor) -> int:
    """How many token ids two prompts, `[T]` each, have in common from the start."""
    n = min(len(one), len(other))
    differ = (one[:n] != other[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


def cut(tensor: Tensor, stop: int) -> Tensor:
    """The first `stop` tokens of `[1, H, T, D]`, without holding on to the rest."""
    return tensor if tensor.shape[2] == stop else tensor[:, :, :stop].clone(memory_format=torch.contiguous_format)
