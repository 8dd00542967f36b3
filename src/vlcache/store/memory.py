"""Entries in this process's memory: bounded in bytes, the least recently used goes first."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from vlcache.store.base import StoreStats, Tally, check_capacity
from vlcache.types import Entry, EntryKey

__all__ = ["MemoryStore"]


class MemoryStore:
    """A byte-bounded LRU store.

    Parameters
    ----------
    capacity_bytes : int
        Bound on the bytes of all tensors held; never exceeded, also not for pinned entries: what finds no room
        beside them is not kept.
    """

    def __init__(self, capacity_bytes: int) -> None:
        check_capacity("memory", capacity_bytes)
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[EntryKey, Entry] = OrderedDict()
        self._pins: Counter[EntryKey] = Counter()
        self._held = 0
        self._tally = Tally()

    def get_many(self, keys: Sequence[EntryKey]) -> Mapping[EntryKey, Entry]:
        found = {}
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                self._tally.add("hits" if entry is not None else "misses")
                if entry is not None:
                    self._entries.move_to_end(key)
                    found[key] = entry
        return found

    def put(self, entry: Entry) -> bool:
        key, size = entry.header.key, entry.nbytes
        with self._lock:
            old = self._entries.get(key)
            if old is not None and old.has_kv and not entry.has_kv:
                return True  # what is there says all that the new one does
            spare = self._capacity - self._held + (old.nbytes if old is not None else 0)
            victims = self._victims(size - spare, but=key)
            if victims is None:
                self._tally.add("refusals")
                return False
            for victim in victims:
                self._drop(victim)
                self._tally.add("evictions")
            if old is not None:
                self._drop(key)
            self._entries[key] = entry
            self._held += size
            self._tally.add("puts")
            return True

    @contextmanager
    def pin(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        keys = tuple(keys)
        with self._lock:
            self._pins.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._pins.subtract(keys)
                self._pins = +self._pins

    def stats(self) -> StoreStats:
        with self._lock:
            return self._tally.stats(len(self._entries), self._held, self._capacity, {})

    def clear(self) -> None:
        """Drop every entry."""
        with self._lock:
            self._entries.clear()
            self._held = 0

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._held = 0
            self._capacity = 0

    def _victims(self, need: int, but: EntryKey) -> list[EntryKey] | None:
        """The oldest unpinned entries that free `need` bytes; None if there are not enough of them."""
        victims = []
        for key, entry in self._entries.items():
            if need <= 0:
                break
            if key != but and not self._pins[key]:
                victims.append(key)
                need -= entry.nbytes
        return victims if need <= 0 else None

    def _drop(self, key: EntryKey) -> None:
        self._held -= self._entries.pop(key).nbytes
