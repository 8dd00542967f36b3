"""Whether loading an entry is quicker than computing it again.

    load       bytes of the entry / bytes per second that the tier has shown
    compute    tokens of the picture * seconds per token that this model has shown here

Both are measured as work goes along, the tier's rate once at its start as well. What is not known yet speaks for reuse.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlcache.store.codec import Head

__all__ = ["SLOWER", "Worth"]

SLOWER = "slower than computing"
"""The reason under which an entry that is not worth loading is counted."""

_WEIGHT = 0.3
_RETRY = 32


class Worth:
    """Rates, as moving averages. Safe to use from several threads.

    Parameters
    ----------
    always : bool
        Reuse whatever is there.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}
        self._token_s = 0.0
        self._declined: dict[str, int] = {}

    @property
    def wanted(self) -> bool:
        """Whether rates matter at all."""
        return not self._always

    @property
    def token_s(self) -> float:
        """Seconds that a picture's token costs to encode and prefill; 0 while none has been."""
        return self._token_s

    def rate(self, tier: str) -> float:
        """Bytes per second of a tier; 0 while unknown."""
        with self._lock:
            return self._rates.get(tier, 0.0)

    def computed(self, tokens: int, seconds: float) -> None:
        """Pictures of so many tokens were encoded and prefilled."""
        if tokens > 0 and seconds > 0:
            with self._lock:
                self._token_s = _average(self._token_s, seconds / tokens)

    def loaded(self, tier: str, size: int, seconds: float) -> None:
        """A tier has read `size` bytes."""
        if size > 0 and seconds > 0:
            with self._lock:
                self._rates[tier] = _average(self._rates.get(tier, 0.0), size / seconds)

    def against(self, tier: str, head: Head) -> str | None:
        """The reason not to load an entry, or None. A tier that was declined is tried again now and then."""
        with self._lock:
            rate = self._rates.get(tier, 0.0)
            compute_s = head.header.tokens * self._token_s or head.cost_s
            if self._always or not rate or not compute_s or head.size / rate <= compute_s:
                return None
            self._declined[tier] = self._declined.get(tier, 0) + 1
            return None if self._declined[tier] % _RETRY == 0 else SLOWER


def _average(old: float, new: float) -> float:
    return new if not old else (1 - _WEIGHT) * old + _WEIGHT * new
