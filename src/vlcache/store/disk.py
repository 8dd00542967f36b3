"""Entries in a directory, for this process and the others on the machine."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from vlcache.errors import ConfigError
from vlcache.store.arrival import Arrival, load_layers
from vlcache.store.base import StoreStats
from vlcache.store.codec import (
    DamagedError,
    Encoded,
    ForeignError,
    Head,
    decode,
    encode,
    entry_name,
    parse_head,
)
from vlcache.store.faults import Faults
from vlcache.store.folder import EntryFile, Folder
from vlcache.store.index import Index, Row
from vlcache.types import Entry, EntryKey, Stored
from vlcache.worth import Worth

__all__ = ["INDEX", "DiskStore"]

INDEX = "index-1.sqlite"
_PROBE_BYTES = 4 << 20
_T = TypeVar("_T")


class DiskStore:
    """A byte-bounded store in a directory.

    Parameters
    ----------
    folder : path
        Made if it is not there. Several processes may use one folder at once.
    capacity_bytes : int
        Bound on the bytes of all entries in the folder, whoever wrote them; a writer may hold one more beside them that
        is not in place yet.
    stored : {"raw", "int8", "fp8"}
        How K and V are kept. Entries kept otherwise are not seen.
    worth : Worth, optional
        Decides whether an entry is worth loading; every one unless given.

    Notes
    -----
    What befalls an entry or the disk is a counted miss or refusal (`StoreStats.faults`) and one warning a kind in the
    log. A damaged entry moves to the folder's quarantine.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int,
        stored: Stored = "raw",
        worth: Worth | None = None,
    ) -> None:
        if capacity_bytes < 0:
            raise ConfigError(f"disk store: capacity {capacity_bytes} bytes is negative; 0 turns it off")
        self._folder = Folder(Path(folder))
        self._capacity = capacity_bytes
        self._stored: Stored = stored
        self._worth = worth or Worth(always=True)
        self._lock = threading.Lock()
        self._pins: Counter[str] = Counter()
        self._count: Counter[str] = Counter()
        self._faults = Faults("disk", f"store in {folder}")
        self._uses: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(2, "vlcache-disk")
        self._closed = False
        self._index: Index | None = None
        try:
            self._folder.make()
            self._folder.discard_leftovers()
            self._index = self._open_index()
            self._reconcile(self._index)
        except (OSError, sqlite3.Error) as error:
            self._fault(error)
        if self._worth.wanted:
            self._threads.submit(self._measure)

    def get_many(self, keys: Sequence[EntryKey]) -> Mapping[EntryKey, Entry]:
        """The entries that are there. Their K/V arrive while they are used, see `Entry.arriving`."""
        arrivals: list[tuple[Arrival, EntryFile]] = []
        for key in dict.fromkeys(keys):
            found = self._arrive(key)
            with self._lock:
                self._count["misses" if found is None else "hits"] += 1
            if found is not None:
                arrivals.append(found)
        if arrivals:
            self._load(arrivals)
        return {arrival.entry.header.key: arrival.entry for arrival, _ in arrivals}

    def put(self, entry: Entry) -> bool:
        return self.put_encoded(encode(entry, self._stored))

    def put_encoded(self, data: Encoded) -> bool:
        """`put` of an entry in the bytes of its file."""
        name = entry_name(data.key, data.stored)
        if self._closed or self._index is None or data.size > self._capacity:
            return self._refuse()
        try:
            known = self._index.get(name)
            if known is not None and known[1] and not data.has_kv:
                return True  # what is there says all that the new one does
            kept = self._place(self._index, name, data)
        except (OSError, sqlite3.Error) as error:
            self._fault(error)
            kept = False
        if not kept:
            return self._refuse()
        with self._lock:
            self._count["puts"] += 1
        return True

    @contextmanager
    def pin(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        """Spares entries from this process's evictions. Another process may evict them, which costs a miss: an entry
        that has been found stays whole."""
        names = [self._name(key) for key in keys]
        with self._lock:
            self._pins.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._pins.subtract(names)
                self._pins = +self._pins

    def stats(self) -> StoreStats:
        entries = held = 0
        if self._index is not None and not self._closed:
            try:
                entries, held = self._index.totals()
            except sqlite3.Error as error:
                self._fault(error)
        with self._lock:
            return StoreStats(
                entries=entries,
                held_bytes=held,
                capacity_bytes=self._capacity,
                hits=self._count["hits"],
                misses=self._count["misses"],
                puts=self._count["puts"],
                evictions=self._count["evictions"],
                refusals=self._count["refusals"],
                faults=self._faults.by_reason(),
            )

    def close(self) -> None:
        """Wait for entries that are being read, and leave the files to the next process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.shutdown(wait=True)
        if self._index is not None:
            try:
                with self._index.transaction():
                    self._flush(self._index)
            except sqlite3.Error as error:
                self._fault(error)
            self._index.close()

    # What is there, for people

    def names(self) -> list[str]:
        """Names of all entries, whoever wrote them, the most recently used first.

        Raises
        ------
        OSError, sqlite3.Error
        """
        if self._index is None:
            return sorted(self._folder.sizes())
        return [row.name for row in self._index.rows()]

    def head(self, name: str) -> Head | None:
        """What an entry says of itself; None where it is gone or cannot be read, which is counted."""
        return self._looking(name, lambda file: file.head())

    def whole(self, name: str) -> tuple[Head, Encoded] | None:
        """An entry, every byte of it checked; None where it is gone or cannot be read, which is counted. A damaged one
        goes to quarantine."""
        return self._looking(name, lambda file: decode(file.whole()))

    def remove(self, name: str) -> None:
        """Remove an entry; what fails is counted."""
        try:
            self._folder.remove(name)
            if self._index is not None:
                with self._index.transaction():
                    self._index.drop([name])
        except (OSError, sqlite3.Error) as error:
            self._fault(error)

    def _looking(self, name: str, look: Callable[[EntryFile], _T]) -> _T | None:
        try:
            file = self._folder.open(name)
            if file is None:
                return None
            try:
                return look(file)
            finally:
                file.close()
        except (OSError, DamagedError, ForeignError) as error:
            self._fault(error, name)
            return None

    # Reading

    def _arrive(self, key: EntryKey) -> tuple[Arrival, EntryFile] | None:
        """Open an entry, check its head and read all but its K/V."""
        if self._closed:
            return None
        name, file = self._name(key), None
        try:
            file = self._folder.open(name)
            if file is None:
                return None
            head = file.head()
            if head.header.key != key or head.stored != self._stored:
                raise ForeignError("key")
            reason = self._worth.against("disk", head)
            if reason is not None:
                self._faults.count(reason)
                file.close()
                return None
            arrival = Arrival(head, file.read)
        except (OSError, DamagedError, ForeignError) as error:
            self._fault(error, name)
            if file is not None:
                file.close()
            return None
        with self._lock:
            self._uses[name] = self._uses.pop(name, 0) + 1
        return arrival, file

    def _measure(self) -> None:
        """What the disk gives per second, from the start of the entry used last."""
        start = time.perf_counter()
        for name in self.names()[:1]:
            size = self._looking(name, lambda file: len(file.start(_PROBE_BYTES)))
            self._worth.loaded("disk", size or 0, time.perf_counter() - start)

    def _load(self, arrivals: Sequence[tuple[Arrival, EntryFile]]) -> None:
        """Read K/V in the background."""

        def work() -> None:
            start = time.perf_counter()
            load_layers([a for a, _ in arrivals], lambda a, e: self._fault(e, self._name(a.entry.header.key)))
            read = sum(a.entry.nbytes for a, _ in arrivals if not a.failed)
            self._worth.loaded("disk", read, time.perf_counter() - start)
            for _, file in arrivals:
                file.close()

        try:
            self._threads.submit(work)
        except RuntimeError:  # closed meanwhile
            work()

    # Writing

    def _place(self, index: Index, name: str, data: Encoded) -> bool:
        """Write an entry and give it its name; False if there is no room. What fails leaves nothing to be read."""
        incoming = self._folder.write(data)
        try:
            with index.transaction():
                if not self._make_room(index, name, data.size):
                    return False
                self._folder.accept(incoming, name)
                index.put(_row(name, parse_head(data.head)))
        except BaseException:
            if incoming.path is None:  # it has its name already
                with suppress(OSError):
                    self._folder.remove(name)
            raise
        finally:
            incoming.discard()
        return True

    def _make_room(self, index: Index, name: str, size: int) -> bool:
        """Evict what is worth least until an entry of `size` bytes fits; False if pins do not let it."""
        self._flush(index)
        _, held = index.totals()
        old = index.get(name)
        with self._lock:
            spared = {name, *self._pins}
        victims = index.victims(held - (old[0] if old else 0) + size - self._capacity, spared)
        if victims is None:
            return False
        index.drop(victims, evicted=True)
        for victim in victims:
            self._folder.remove(victim)
        with self._lock:
            self._count["evictions"] += len(victims)
        return True

    def _flush(self, index: Index) -> None:
        """Tell the index of uses since the last time. Inside a transaction."""
        with self._lock:
            uses, self._uses = self._uses, {}
        index.touch(uses)

    def _refuse(self) -> bool:
        with self._lock:
            self._count["refusals"] += 1
        return False

    # Opening

    def _open_index(self) -> Index:
        path = self._folder.root / INDEX
        try:
            return Index(path)
        except sqlite3.OperationalError:
            raise  # locked, read-only, no space: the file may be sound
        except sqlite3.DatabaseError as error:
            self._fault(error)
            self._folder.quarantine_index(path)
            return Index(path)

    def _reconcile(self, index: Index) -> None:
        """Make the index say what is there: a crash, or a lost index, may have left them apart."""
        with index.transaction():
            sizes, names = self._folder.sizes(), index.names()
            index.drop(names - set(sizes))
            for name in sizes.keys() - names:
                head = self.head(name)
                if head is not None:
                    index.put(_row(name, head))
            _, held = index.totals()
            victims = index.victims(held - self._capacity, ()) or []
            index.drop(victims, evicted=True)
            for name in victims:
                self._folder.remove(name)

    # Faults

    def _fault(self, error: Exception, name: str | None = None) -> str:
        """Count what went wrong, and move a damaged entry aside. Returns the reason."""
        reason = self._faults.meet(error)
        if isinstance(error, DamagedError) and name is not None:
            self._quarantine(name)
        return reason

    def _quarantine(self, name: str) -> None:
        try:
            self._folder.quarantine(name)
            if self._index is not None and not self._closed:
                with self._index.transaction():
                    self._index.drop([name])
        except (OSError, sqlite3.Error) as error:
            self._fault(error)

    def _name(self, key: EntryKey) -> str:
        return entry_name(key, self._stored)


def _row(name: str, head: Head) -> Row:
    header = head.header
    return Row(
        name=name,
        content=header.key.content,
        scope=header.key.scope,
        model=header.model,
        tenant=header.tenant,
        tokens=header.tokens,
        bytes=head.size,
        has_kv=head.has_kv,
        cost_s=head.cost_s,
        created_s=head.created_s,
    )
