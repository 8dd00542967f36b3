"""What went wrong in a tier: counted by reason, and said once a reason."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections import Counter

from vlcache.store.breaker import OpenError

__all__ = ["DamagedError", "Faults", "ForeignError"]

_log = logging.getLogger("vlcache")


class DamagedError(Exception):
    """Bytes that are not what was written; the message is a short reason to count."""


class ForeignError(Exception):
    """A sound entry of another format version or kind; the message is a short reason to count."""


class Faults:
    """Safe to use from several threads.

    Parameters
    ----------
    medium : str
        `disk` or `redis`; reasons begin with it.
    where : str
        For the log.
    """

    def __init__(self, medium: str, where: str) -> None:
        self._medium = medium
        self._where = where
        self._lock = threading.Lock()
        self._times: Counter[str] = Counter()

    def count(self, reason: str) -> bool:
        """Count something; whether it is the first of its kind."""
        with self._lock:
            self._times[reason] += 1
            return self._times[reason] == 1

    def note(self, reason: str) -> None:
        """Count something and, the first time, warn."""
        if self.count(reason):
            _log.warning("vlcache %s: %s; going on without", self._where, reason)

    def meet(self, error: Exception) -> str:
        """`note` an error. Returns the reason. Messages of others are not repeated: they may hold a password or a
        picture's words."""
        reason = self._reason(error)
        self.note(reason)
        return reason

    def by_reason(self) -> dict[str, int]:
        with self._lock:
            return dict(self._times)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, DamagedError):
            return f"damaged: {error}"
        if isinstance(error, ForeignError):
            return f"foreign: {error}"
        if isinstance(error, OpenError):
            return f"{self._medium}: left alone"
        if isinstance(error, sqlite3.Error):
            return f"index: {type(error).__name__}"
        if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
            return f"{self._medium}: {errno.errorcode[error.errno]}"
        return f"{self._medium}: {type(error).__name__}"
