"""Leaving a sick server alone.

pybreaker holds its lock while the guarded call runs, so one slow answer would hold up every other request; hence these
few lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Breaker", "OpenError"]


class OpenError(Exception):
    """The server is being left alone."""


class Breaker:
    """Opens after `limit` faults in a row; after `retry_s` one call is let through to see.

    Parameters
    ----------
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, limit: int, retry_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._try_at = 0.0

    def check(self) -> None:
        """Before a call.

        Raises
        ------
        OpenError
        """
        with self._lock:
            if self._faults >= self._limit:
                if self._clock() < self._try_at:
                    raise OpenError
                self._try_at = self._clock() + self._retry_s  # the others wait for what this one finds

    def failed(self) -> None:
        with self._lock:
            self._faults += 1
            self._try_at = self._clock() + self._retry_s

    def worked(self) -> None:
        with self._lock:
            self._faults = 0
