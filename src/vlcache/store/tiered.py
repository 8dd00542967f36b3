"""Several stores as one, the fastest first: memory, then a disk, then a server.

    lookup     memory -> disk -> Redis      what a slower tier has moves up once all of it is there and checked
    put        memory at once; the slower tiers from a queue, behind the request

The queue is bounded in bytes: a put waits a moment for room, then the slower tiers go without that entry, and it is
counted. What waits to be written is found meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from vlcache.store.base import Store, StoreStats, Tally
from vlcache.store.faults import Faults
from vlcache.types import Entry, EntryKey, EntryLostError

__all__ = ["DROPPED", "TieredStore"]

DROPPED = "write-behind queue full"
"""The reason under which an entry that the slower tiers did not get is counted."""


class TieredStore:
    """Tiers by name, fastest first; closes them when it is closed.

    Parameters
    ----------
    tiers : mapping of str to Store
        At least one.
    queue_bytes : int
        Bound on what waits to be written or to move up.
    patience_s : float
        How long a put waits for room in the queue.
    """

    def __init__(self, tiers: Mapping[str, Store], queue_bytes: int = 1 << 30, patience_s: float = 0.5) -> None:
        self.tiers = dict(tiers)
        self._levels = list(self.tiers.values())
        self._queue_bytes = queue_bytes
        self._patience_s = patience_s
        self._tally = Tally()
        self._faults = Faults("write-behind", "tiers")
        self._waiting = 0
        self._moving: set[EntryKey] = set()
        self._unwritten: dict[EntryKey, Entry] = {}
        self._room = threading.Condition()
        self._jobs: queue.SimpleQueue[tuple[Entry, Sequence[Store]] | None] = queue.SimpleQueue()
        self._closed = False
        self._writer = threading.Thread(target=self._work, name="vlcache-write-behind", daemon=True)
        self._writer.start()

    def get_many(self, keys: Sequence[EntryKey]) -> Mapping[EntryKey, Entry]:
        """The entries that are there, each from the fastest tier that has it with K/V, or without if none has."""
        keys = list(dict.fromkeys(keys))
        with self._room:
            found = {key: self._unwritten[key] for key in keys if key in self._unwritten}
        missing = [] if self._closed else [key for key in keys if key not in found or not found[key].has_kv]
        for level, tier in enumerate(self._levels):
            if not missing:
                break
            for key, entry in tier.get_many(missing).items():
                if key not in found or entry.has_kv:
                    found[key] = entry
                    if level:
                        self._move_up(entry, level)
            missing = [key for key in missing if key not in found or not found[key].has_kv]
        self._tally.add("hits", len(found))
        self._tally.add("misses", len(keys) - len(found))
        return found

    def put(self, entry: Entry) -> bool:
        if self._closed:
            return False
        kept = self._levels[0].put(entry)
        if len(self._levels) > 1:
            queued = self._enqueue(entry, self._levels[1:], self._patience_s, unwritten=True)
            kept = kept or queued
        self._tally.add("puts" if kept else "refusals")
        return kept

    @contextmanager
    def pin(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        with ExitStack() as stack:
            for tier in self._levels:
                stack.enter_context(tier.pin(keys))
            yield

    def stats(self) -> StoreStats:
        """Lookups and puts of the whole; what is held, evicted and went wrong summed over the tiers."""
        each = [tier.stats() for tier in self._levels]
        faults: Counter[str] = Counter()
        for one in each:
            faults.update(one.faults)
        own = self._tally.stats(
            entries=sum(one.entries for one in each),
            held_bytes=sum(one.held_bytes for one in each),
            capacity_bytes=sum(one.capacity_bytes for one in each),
            faults=dict(faults + Counter(self._faults.by_reason())),
        )
        return replace(own, evictions=sum(one.evictions for one in each))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to be written; whether it is so."""
        with self._room:
            return self._room.wait_for(lambda: self._waiting == 0, timeout_s)

    def close(self) -> None:
        """Write what waits, then close the tiers."""
        with self._room:
            if self._closed:
                return
            self._closed = True
            self._unwritten.clear()
        self._jobs.put(None)
        self._writer.join()
        for tier in self._levels:
            tier.close()

    def _move_up(self, entry: Entry, level: int) -> None:
        key = entry.header.key
        with self._room:
            if key in self._moving:
                return
            self._moving.add(key)
        if not self._enqueue(entry, self._levels[:level], 0):
            with self._room:
                self._moving.discard(key)

    def _enqueue(self, entry: Entry, tiers: Sequence[Store], patience_s: float, unwritten: bool = False) -> bool:
        size = entry.nbytes
        with self._room:
            fits = self._room.wait_for(
                lambda: self._waiting == 0 or self._waiting + size <= self._queue_bytes, patience_s
            )
            if not fits or self._closed:
                self._faults.note(DROPPED)
                return False
            self._waiting += size
            if unwritten and (entry.has_kv or entry.header.key not in self._unwritten):
                self._unwritten[entry.header.key] = entry
            self._jobs.put((entry, tiers))
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            entry, tiers = job
            try:
                whole = _whole(entry)
                for tier in tiers:
                    self._put(tier, whole)
            except EntryLostError:
                pass  # the tier that it came from has counted it
            finally:
                with self._room:
                    self._waiting -= entry.nbytes
                    self._moving.discard(entry.header.key)
                    if self._unwritten.get(entry.header.key) is entry:
                        del self._unwritten[entry.header.key]
                    self._room.notify_all()

    def _put(self, tier: Store, entry: Entry) -> None:
        try:
            tier.put(entry)
        except Exception as error:
            self._faults.meet(error)


def _whole(entry: Entry) -> Entry:
    """An entry whose K/V are all there.

    Raises
    ------
    EntryLostError
    """
    if entry.arriving is not None:
        entry.arriving(entry.header.geometry.layers - 1)
    return replace(entry, arriving=None)
