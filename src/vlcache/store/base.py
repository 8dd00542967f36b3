"""What a store is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from vlcache.errors import ConfigError
from vlcache.types import Entry, EntryKey

__all__ = ["Store", "StoreStats", "Tally", "check_capacity"]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and what it holds now."""

    entries: int
    held_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    puts: int
    evictions: int
    refusals: int
    """Entries not kept: larger than the store, no room beside pinned ones, or a fault."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """What went wrong with an entry or the medium, by reason."""


class Tally:
    """What a store has done. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: Counter[str] = Counter()

    def add(self, what: str, times: int = 1) -> None:
        """`hits`, `misses`, `puts`, `evictions` or `refusals`."""
        with self._lock:
            self._times[what] += times

    def add_put(self, kept: bool | None) -> bool:
        """An attempt to keep an entry: kept, refused (None), or not needed (False). Returns what `Store.put` does."""
        if kept is not False:
            self.add("refusals" if kept is None else "puts")
        return kept is not None

    def stats(self, entries: int, held_bytes: int, capacity_bytes: int, faults: Mapping[str, int]) -> StoreStats:
        with self._lock:
            return StoreStats(
                entries=entries,
                held_bytes=held_bytes,
                capacity_bytes=capacity_bytes,
                hits=self._times["hits"],
                misses=self._times["misses"],
                puts=self._times["puts"],
                evictions=self._times["evictions"],
                refusals=self._times["refusals"],
                faults=faults,
            )


def check_capacity(store: str, capacity_bytes: int) -> None:
    """Refuse a bound that is none.

    Raises
    ------
    ConfigError
    """
    if capacity_bytes < 0:
        raise ConfigError(f"{store} store: capacity {capacity_bytes} bytes is negative; 0 turns it off")


class Store(Protocol):
    """A place for entries. Safe to call from several threads.

    A store never raises for what befalls an entry (damage, no space, no server): it answers with a miss.
    """

    def get_many(self, keys: Sequence[EntryKey]) -> Mapping[EntryKey, Entry]:
        """The entries that are there. Their tensors stay valid while the caller holds them, and are not to be
        written to. K/V may still be arriving, see `Entry.arriving`."""
        ...

    def put(self, entry: Entry) -> bool:
        """Keep an entry under its header's key, in place of an older one; False if it was not kept.

        An entry without K/V never takes the place of one with.
        """
        ...

    def pin(self, keys: Sequence[EntryKey]) -> AbstractContextManager[None]:
        """While the context lasts, these entries are not evicted (those that are there)."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Release everything. A closed store misses and keeps nothing."""
        ...
