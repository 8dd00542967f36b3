"""A directory's files and its index, kept in agreement.

The files are the truth. Whatever changes them is done inside a transaction of the index, so that of several processes
one does it at a time; what a crash leaves apart is brought together when the directory is opened.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from vlcache.store.base import Tally
from vlcache.store.codec import Encoded, Head, entry_name
from vlcache.store.faults import DamagedError, Faults, ForeignError
from vlcache.store.folder import EntryFile, Folder
from vlcache.store.index import BUSY_S, Index, Row

__all__ = ["INDEX", "Catalog"]

INDEX = "index-1.sqlite"
_RETRY_S = 5.0


class Catalog:
    """What is in a directory, bounded in bytes.

    Parameters
    ----------
    root : path
    capacity_bytes : int
        0: nothing is kept, and what is there stays.
    faults : Faults
        Where it counts what goes wrong; no method raises for the disk or the index unless it says so.
    tally : Tally
        Where it counts evictions.
    """

    def __init__(self, root: Path, capacity_bytes: int, faults: Faults, tally: Tally) -> None:
        self.folder = Folder(root)
        self._tally = tally
        self._capacity = capacity_bytes
        self._faults = faults
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._pins: Counter[str] = Counter()
        self._uses: dict[str, None] = {}
        self._flushing = False
        self._index: Index | None = None
        self._open_at = 0.0
        self._closed = False
        self._ready()

    def place(self, data: Encoded) -> bool | None:
        """Write an entry and give it its name. None if it was not kept, False if what is there says more.

        What fails leaves nothing to be read.
        """
        index = self._ready()
        if index is None or data.head.size > self._capacity:
            return None
        try:
            return self._place(index, data)
        except Exception as error:
            self._meet(error)
            return None

    def use(self, names: Sequence[str]) -> bool:
        """Note uses; whether it is time to `flush` them to the index."""
        with self._lock:
            for name in names:
                self._uses.pop(name, None)
                self._uses[name] = None
            due = len(self._uses) >= 64 and not self._flushing
            self._flushing |= due
            return due

    def pin(self, names: Iterable[str]) -> None:
        """Spare entries from eviction by this process until `unpin`."""
        with self._lock:
            self._pins.update(names)

    def unpin(self, names: Iterable[str]) -> None:
        with self._lock:
            self._pins.subtract(names)
            self._pins = +self._pins

    def totals(self) -> tuple[int, int]:
        """Entries and their bytes; 0 while the index cannot be read."""
        index = self._ready()
        try:
            return (0, 0) if index is None else index.totals()
        except sqlite3.Error as error:
            self._meet(error)
            return 0, 0

    def names(self) -> list[str]:
        """The most recently used first, then those that the index does not know.

        Raises
        ------
        OSError, sqlite3.Error
        """
        index = self._ready()
        known = [] if index is None else index.names()
        return known + sorted(self.folder.sizes().keys() - set(known))

    def latest(self) -> str | None:
        """The entry used last, if that is known."""
        index = self._ready()
        try:
            return None if index is None else index.latest()
        except sqlite3.Error as error:
            self._meet(error)
            return None

    def remove(self, name: str) -> bool:
        """Whether it is gone."""
        index = self._ready()
        try:
            if index is None:
                self.folder.remove(name)
            else:
                with index.transaction():
                    self.folder.remove(name)
                    index.drop([name])
        except (OSError, sqlite3.Error) as error:
            self._meet(error)
            return False
        return True

    def quarantine(self, name: str, file: EntryFile) -> None:
        """Move a damaged entry aside, unless its name is another file's by now."""
        index = self._ready()
        try:
            if index is None:
                self.folder.quarantine(name, file.identity)
            else:
                with index.transaction():
                    if self.folder.quarantine(name, file.identity):
                        index.drop([name])
        except (OSError, sqlite3.Error) as error:
            self._meet(error)

    def flush(self) -> None:
        """Tell the index of uses since the last time."""
        index = self._index
        try:
            if index is None:
                with self._lock:
                    self._uses.clear()
            else:
                with index.transaction():
                    self._tell(index)
        except sqlite3.Error as error:
            self._meet(error)
        finally:
            self._flushing = False

    def close(self) -> None:
        self.flush()
        with self._opening:
            self._closed = True
            if self._index is not None:
                self._index.close()
                self._index = None

    def _place(self, index: Index, data: Encoded) -> bool | None:
        name = entry_name(data.head.header.key, data.head.stored)
        row = _row(name, data.head)
        incoming = self.folder.write(data)
        try:
            with index.transaction():
                known = index.get(name)
                if known is not None and known[1] and not data.head.has_kv:
                    return False
                if not self._make_room(index, name, row.bytes):
                    return None
                self.folder.accept(incoming, name)
                index.put(row)
        except BaseException:
            if incoming.path is None:  # it has its name, and the index may not say so
                self.remove(name)
            raise
        finally:
            incoming.discard()
        return True

    def _make_room(self, index: Index, name: str, size: int) -> bool:
        """Evict what is worth least until an entry of `size` bytes fits; False if pins do not let it."""
        self._tell(index)
        _, held = index.totals()
        old = index.get(name)
        with self._lock:
            spared = {name, *self._pins}
        victims = index.victims(held - (old[0] if old else 0) + size - self._capacity, spared)
        if victims is None:
            return False
        self._evict(index, victims)
        return True

    def _evict(self, index: Index, victims: Sequence[str]) -> None:
        index.drop(victims, evicted=True)
        for victim in victims:
            self.folder.remove(victim)
        self._tally.add("evictions", len(victims))

    def _tell(self, index: Index) -> None:
        """`flush`, inside a transaction."""
        with self._lock:
            uses, self._uses = self._uses, {}
        index.touch(uses)

    # Opening

    def _ready(self) -> Index | None:
        """The index, opened again now and then where it could not be; None while it cannot."""
        with self._opening:
            if self._index is None and self._capacity and not self._closed and time.monotonic() >= self._open_at:
                self._open_at = time.monotonic() + _RETRY_S
                try:
                    self.folder.make()
                    with self.folder.alone(BUSY_S):
                        self._index = self._open_index()
                    self.folder.discard_leftovers()
                except Exception as error:
                    self._faults.meet(error)
            return None if self._closed else self._index

    def _open_index(self) -> Index:
        """Open the index and have it say what is there; a broken one is built anew."""
        path = self.folder.root / INDEX
        for last in (False, True):
            index = None
            try:
                index = Index(path)
                index.check()
                self._reconcile(index)
                return index
            except Exception as error:
                if index is not None:
                    index.close()
                if last or not _is_broken(error):
                    raise
                self._faults.meet(error)
                self.folder.quarantine_index(path)
        raise AssertionError

    def _reconcile(self, index: Index) -> None:
        """Make the index say what is there: a crash, or a lost index, may have left them apart."""
        rows = index.sizes()
        changed = {name: size for name, size in self.folder.sizes().items() if rows.get(name) != size}
        heads = {name: self._head_or_none(name) for name in changed}
        with index.transaction():
            sizes = self.folder.sizes()
            index.drop(index.sizes().keys() - sizes.keys())
            for name, head in heads.items():
                if head is not None and sizes.get(name) == head.size:
                    index.put(_row(name, head))
            _, held = index.totals()
            self._evict(index, index.victims(held - self._capacity, ()) or [])

    def _head_or_none(self, name: str) -> Head | None:
        """A file's head; None of one that is damaged, which its first reader will find, or of another version's."""
        file = None
        try:
            file = self.folder.open(name)
            return None if file is None else file.head()
        except (DamagedError, ForeignError, OSError):
            return None
        finally:
            if file is not None:
                file.close()

    def _meet(self, error: Exception) -> None:
        """Count what went wrong; a broken index is opened anew at the next occasion."""
        self._faults.meet(error)
        if _is_broken(error):
            with self._opening:
                if self._index is not None:
                    self._index.close()
                    self._index, self._open_at = None, 0.0


def _is_broken(error: Exception) -> bool:
    """Whether an index's file is at fault, and not its being locked, read-only or on a full disk."""
    return type(error) is sqlite3.DatabaseError


def _row(name: str, head: Head) -> Row:
    return Row(name, head.size, head.has_kv, head.cost_s)
