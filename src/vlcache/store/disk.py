"""Entries in a directory, for this process and the others on the machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from vlcache.store.arrival import Arrival, load_layers
from vlcache.store.base import StoreStats, Tally, check_capacity
from vlcache.store.catalog import Catalog
from vlcache.store.codec import Encoded, Head, decode, encode, entry_name
from vlcache.store.faults import DamagedError, Faults
from vlcache.store.folder import EntryFile
from vlcache.store.gate import Gate
from vlcache.types import Entry, EntryKey, Stored
from vlcache.worth import Worth

__all__ = ["DiskStore"]

_PROBE_BYTES = 4 << 20
# One reads from the system's cache while another checks what it has read
_READERS = 2
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
        check_capacity("disk", capacity_bytes)
        self._capacity = capacity_bytes
        self._stored: Stored = stored
        self._worth = worth or Worth(always=True)
        self._lock = threading.Lock()
        self._tally = Tally()
        self._faults = Faults("disk", f"store in {folder}")
        self._threads = ThreadPoolExecutor(2 * _READERS, "vlcache-disk")
        self._closed = False
        self._gate = Gate("disk", stored, self._worth, self._faults)
        self._catalog = Catalog(Path(folder), capacity_bytes, self._faults, self._tally)
        if self._worth.wanted:
            self._threads.submit(self._measure)

    def get_many(self, keys: Sequence[EntryKey]) -> Mapping[EntryKey, Entry]:
        """The entries that are there. Their K/V arrive while they are used, see `Entry.arriving`."""
        arrivals: list[tuple[Arrival, EntryFile]] = []
        for key in dict.fromkeys(keys):
            found = self._arrive(key)
            self._tally.add("misses" if found is None else "hits")
            if found is not None:
                arrivals.append(found)
        if arrivals:
            self._load(arrivals)
        return {arrival.entry.header.key: arrival.entry for arrival, _ in arrivals}

    def put(self, entry: Entry) -> bool:
        if self._gate.spares(entry.header.key):
            return True
        try:
            data = encode(entry, self._stored)
        except Exception as error:  # an entry that is none
            self._faults.meet(error)
            return self._tally.add_put(None)
        return self.put_encoded(data)

    def put_encoded(self, data: Encoded) -> bool:
        """`put` of an entry in the bytes of its file."""
        return self._tally.add_put(self._catalog.place(data))

    @contextmanager
    def pin(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        """Spares entries from this process's evictions, and counts as a use of them. Another process may evict them,
        which costs a miss: an entry that has been found stays whole."""
        names = [self._name(key) for key in keys]
        self._catalog.pin(names)
        self._use(names)
        try:
            yield
        finally:
            self._catalog.unpin(names)

    def stats(self) -> StoreStats:
        entries, held = self._catalog.totals()
        return self._tally.stats(entries, held, self._capacity, self._faults.by_reason())

    def close(self) -> None:
        """Wait for entries that are being read, and leave the files to the next process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.shutdown(wait=True)
        self._catalog.close()

    # What is there, for people

    def names(self) -> list[str]:
        """Names of all entries, whoever wrote them, the most recently used first.

        Raises
        ------
        OSError, sqlite3.Error
        """
        return self._catalog.names()

    def head(self, name: str) -> Head | None:
        """What an entry says of itself; None where it is gone or cannot be read, which is counted."""
        return self._looking(name, EntryFile.head)

    def whole(self, name: str) -> Encoded | None:
        """An entry, every byte of it checked; None where it is gone or cannot be read, which is counted. A damaged one
        goes to quarantine."""
        return self._looking(name, lambda file: decode(file.whole()))

    def remove(self, name: str) -> bool:
        """Remove an entry; False if that failed, which is counted."""
        return self._catalog.remove(name)

    def clear_quarantine(self) -> None:
        """Remove what was found damaged; what fails is counted."""
        try:
            self._catalog.folder.clear_quarantine()
        except OSError as error:
            self._faults.meet(error)

    def _looking(self, name: str, look: Callable[[EntryFile], _T]) -> _T | None:
        file = None
        try:
            file = self._catalog.folder.open(name)
            return None if file is None else look(file)
        except Exception as error:
            self._fault(error, name, file)
            return None
        finally:
            if file is not None:
                file.close()

    # Reading

    def _arrive(self, key: EntryKey) -> tuple[Arrival, EntryFile] | None:
        """Open an entry, check its head and read all but its K/V."""
        if self._closed:
            return None
        name, file = self._name(key), None
        try:
            file = self._catalog.folder.open(name)
            if file is None:
                return None
            head = file.head()
            if not self._gate.admits(key, head):
                file.close()
                return None
            arrival = Arrival(head, file.read, self._faults.note)
        except Exception as error:
            self._fault(error, name, file)
            if file is not None:
                file.close()
            return None
        self._use([name])
        return arrival, file

    def _load(self, arrivals: Sequence[tuple[Arrival, EntryFile]]) -> None:
        """Read K/V in the background."""
        files = dict(arrivals)

        def fault(arrival: Arrival, error: Exception) -> str:
            return self._fault(error, self._name(arrival.head.header.key), files[arrival])

        def done(seconds: float) -> None:
            for file in files.values():
                file.close()
            self._worth.loaded("disk", sum(a.head.kv_bytes for a in files if not a.failed), seconds)

        load_layers(list(files), fault, done, self._threads.submit, _READERS)

    def _measure(self) -> None:
        """What the disk gives per second, from the start of the entry used last."""
        name = self._catalog.latest()
        if name is not None:
            start = time.perf_counter()
            size = self._looking(name, lambda file: len(file.start(_PROBE_BYTES)))
            self._worth.loaded("disk", size or 0, time.perf_counter() - start)

    def _use(self, names: Sequence[str]) -> None:
        if self._catalog.use(names):
            with suppress(RuntimeError):  # closed meanwhile
                self._threads.submit(self._catalog.flush)

    def _fault(self, error: Exception, name: str, file: EntryFile | None) -> str:
        """Count what went wrong, and move a damaged entry aside. Returns the reason."""
        reason = self._faults.meet(error)
        if isinstance(error, DamagedError) and file is not None:
            self._catalog.quarantine(name, file)
        return reason

    def _name(self, key: EntryKey) -> str:
        return entry_name(key, self._stored)
