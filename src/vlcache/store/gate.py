"""Which of the entries that a tier finds it gives."""

from __future__ import annotations

from vlcache.store.codec import Head
from vlcache.store.faults import Faults, ForeignError
from vlcache.types import EntryKey, Stored
from vlcache.worth import Worth

__all__ = ["Gate"]


class Gate:
    """A tier's judgement of what it finds.

    Parameters
    ----------
    medium : str
        `disk` or `redis`, as `worth` knows it.
    stored : {"raw", "int8", "fp8"}
        How its entries are kept.
    worth : Worth
    faults : Faults
        Where entries that are not worth loading are counted.
    """

    def __init__(self, medium: str, stored: Stored, worth: Worth, faults: Faults) -> None:
        self._medium = medium
        self._stored = stored
        self._worth = worth
        self._faults = faults
        self._declined: dict[EntryKey, bool] = {}

    def admits(self, key: EntryKey, head: Head) -> bool:
        """Whether an entry that was found under `key` is worth loading.

        Raises
        ------
        ForeignError
            It is another one.
        """
        if head.header.key != key or head.stored != self._stored:
            raise ForeignError("key")
        reason = self._worth.against(self._medium, head)
        if reason is None:
            return True
        self._faults.count(reason)
        self._declined[key] = head.has_kv
        return False

    def spares(self, key: EntryKey) -> bool:
        """Whether an entry that is put was computed only because the one that is there is slow to load: no reason to
        write it again. Once for each time that it was declined."""
        return bool(self._declined.pop(key, None))
