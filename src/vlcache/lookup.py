"""From spans to entries: what the store holds for a prompt, and which of it is used.

Stores promise not to raise. One that breaks its promise costs a counted miss here, not the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from vlcache.store.base import Store
from vlcache.types import Entry, EntryKey, Header, Span

__all__ = ["STORE_FAULT", "Found", "find", "keep", "pinned", "reusable"]

STORE_FAULT = "store fault"
"""The reason under which a raising store is counted."""


@dataclass(frozen=True, slots=True)
class Found:
    """A lookup's result.

    Attributes
    ----------
    entries : mapping of str to Entry
        Usable entries by the picture's digest.
    rejects : tuple of str
        Reasons of those that are there but do not match.
    """

    entries: Mapping[str, Entry]
    rejects: tuple[str, ...] = ()


def find(store: Store, headers: Sequence[Header], without: Collection[EntryKey] = ()) -> Found:
    """Look up what a prompt's spans need; each entry is compared in full with what is expected.

    Parameters
    ----------
    without : collection of EntryKey
        Entries that are not to be used.
    """
    expected = {h.key: h for h in headers if h.key not in without}
    entries, rejects = {}, []
    try:
        held = store.get_many(list(expected))
    except Exception:
        return Found({}, (STORE_FAULT,))
    for key, entry in held.items():
        reason = entry.mismatch(expected[key])
        if reason is None:
            entries[key.content] = entry
        else:
            rejects.append(reason)
    return Found(entries, tuple(rejects))


@contextmanager
def pinned(store: Store, headers: Sequence[Header]) -> Iterator[None]:
    """While the context lasts, the entries of a prompt's spans are not evicted."""
    with ExitStack() as stack:
        with suppress(Exception):
            stack.enter_context(store.pin([h.key for h in headers]))
        yield


def keep(store: Store, entries: Iterable[Entry]) -> tuple[str, ...]:
    """Put entries into the store; the faults that it had."""
    faults = []
    for entry in entries:
        try:
            store.put(entry)
        except Exception:
            faults.append(STORE_FAULT)
    return tuple(faults)


def reusable(spans: Sequence[Span], entries: Mapping[str, Entry], begin: int) -> list[Span]:
    """The spans from token `begin` on whose cached K/V are used.

    A picture that has been seen only behind repaired K/V has an entry without K/V. It has come back, so it is worth
    capturing: everything before it is computed in full this once.
    """
    spans = [s for s in spans if s.start >= begin and s.content in entries]
    after = max((s.stop for s in spans if not entries[s.content].has_kv), default=begin)
    return [s for s in spans if s.start >= after]
