"""What a directory of entries holds, in SQLite: sizes, uses, and which entry is worth least.

The files are the truth: a lookup never asks the index, and an index that is missing or broken is rebuilt from them. It
is there to bound the directory's size and to list it.

What goes first (GreedyDual-Size, Cao and Irani 1997): an entry's priority is the clock plus its seconds to recompute
per byte, set anew at each use; the lowest goes and the clock advances to it, so entries age unless they are used. Of
equal ones the least recently used goes.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Index", "Row"]

BUSY_S = 10.0
"""How long a transaction waits for another process's."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, has_kv INTEGER NOT NULL, worth REAL NOT NULL,
    priority REAL NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_worth ON entries (priority, used);
CREATE TABLE IF NOT EXISTS state (one INTEGER PRIMARY KEY CHECK (one = 1), clock REAL NOT NULL, ticks INTEGER NOT NULL);
INSERT OR IGNORE INTO state VALUES (1, 0, 0);
"""


@dataclass(frozen=True, slots=True)
class Row:
    """An entry in the index; `bytes` are its file's, `cost_s` 0 where it is unknown."""

    name: str
    bytes: int
    has_kv: bool
    cost_s: float

    @property
    def worth(self) -> float:
        """Seconds to recompute per megabyte, to the nearest power of two: clocks are noisy, and noise should not
        outrank use. 1 where the cost is unknown."""
        per_megabyte = self.cost_s * 1e6 / max(1, self.bytes)
        return float(2.0 ** round(math.log2(min(per_megabyte, 2.0**40)))) if per_megabyte > 0 else 1.0


class Index:
    """One connection to `path`. Safe to call from several threads; several processes may have one each.

    Raises
    ------
    sqlite3.Error, OSError
        From every method: the caller decides what a broken or busy index means.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        with suppress(FileExistsError):  # made here for its mode, which the files beside it take over
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._path, self._identity = path, _identity(path)
            with self.transaction():
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
        except BaseException:
            self._db.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside happens or nothing; no other process writes meanwhile.

        DatabaseError if the file is no longer the one that `path` names: another process has put a new one there.
        """
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if _identity(self._path) != self._identity:
                    raise sqlite3.DatabaseError("replaced")
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def check(self) -> None:
        """DatabaseError if the file is broken anywhere."""
        found = self._select("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise sqlite3.DatabaseError("quick_check")

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return dict(self._select("SELECT name, bytes FROM entries"))

    def names(self) -> list[str]:
        """The most recently used first."""
        return [name for (name,) in self._select("SELECT name FROM entries ORDER BY used DESC")]

    def latest(self) -> str | None:
        """The entry used last."""
        found = self._select("SELECT name FROM entries ORDER BY used DESC LIMIT 1")
        return str(found[0][0]) if found else None

    def get(self, name: str) -> tuple[int, bool] | None:
        """An entry's bytes and whether it has K/V."""
        found = self._select("SELECT bytes, has_kv FROM entries WHERE name = ?", name)
        return (found[0][0], bool(found[0][1])) if found else None

    def totals(self) -> tuple[int, int]:
        """Entries and their bytes."""
        count, held = self._select("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM entries")[0]
        return int(count), int(held)

    def put(self, row: Row) -> None:
        """Add an entry, or put it in an older one's place. Inside a transaction."""
        clock, tick = self._tick()
        self._db.execute(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)",
            (row.name, row.bytes, row.has_kv, row.worth, clock + row.worth, tick),
        )

    def touch(self, names: Iterable[str]) -> None:
        """Note uses, the latest last. Inside a transaction."""
        for name in names:
            clock, tick = self._tick()
            self._db.execute("UPDATE entries SET priority = ? + worth, used = ? WHERE name = ?", (clock, tick, name))

    def victims(self, need: int, spared: Collection[str]) -> list[str] | None:
        """Names of the entries worth least that free `need` bytes together; None if there are not enough."""
        chosen = []
        with closing(self._db.execute("SELECT name, bytes FROM entries ORDER BY priority, used")) as found:
            while need > 0:
                row = found.fetchone()
                if row is None:
                    return None
                if row[0] not in spared:
                    chosen.append(row[0])
                    need -= row[1]
        return chosen

    def drop(self, names: Collection[str], evicted: bool = False) -> None:
        """Forget entries; where they were `evicted` the clock advances. Inside a transaction."""
        for name in names:
            if evicted:
                self._db.execute(
                    "UPDATE state SET clock = MAX(clock, (SELECT priority FROM entries WHERE name = ?))", (name,)
                )
            self._db.execute("DELETE FROM entries WHERE name = ?", (name,))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _tick(self) -> tuple[float, int]:
        self._db.execute("UPDATE state SET ticks = ticks + 1")
        clock, ticks = self._select("SELECT clock, ticks FROM state")[0]
        return clock, ticks

    def _select(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, closing(self._db.execute(query, values)) as cursor:
            return cursor.fetchall()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino
