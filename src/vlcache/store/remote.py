"""A server's keys for an entry (see `redis.py`), and reading its tensors a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlcache.store.codec import VERSION, Head, Part, entry_name, seal
from vlcache.store.faults import DamagedError
from vlcache.types import EntryKey, Stored

__all__ = ["BATCH_BYTES", "PREFIX", "RemoteParts", "head_key", "member_of", "part_keys"]

PREFIX = f"vlcache:{VERSION}:"
BATCH_BYTES = 4 << 20


def member_of(key: EntryKey, stored: Stored) -> str:
    """What stands between prefix and part in an entry's keys."""
    return f"{key.scope}:{{{entry_name(key, stored)}}}"


def head_key(member: str) -> str:
    return f"{PREFIX}{member}:head"


class RemoteParts:
    """A found entry's tensors; those that follow the one asked for come with it, a few megabytes at a time."""

    def __init__(self, ask: Callable[[list[str]], Sequence[bytes | None]], data: bytes, head: Head) -> None:
        self._ask = ask
        self._order = list(head.parts.values())
        self._keys = dict(zip(head.parts, part_keys(head, data), strict=True))
        self._ahead: dict[str, bytes | None] = {}
        self.member = member_of(head.header.key, head.stored)
        self.head_bytes = data

    def read(self, part: Part, out: memoryview) -> None:
        """`vlcache.store.arrival.Read`."""
        if part.name not in self._ahead:
            self.ahead(self._order.index(part))
        data = self._ahead.pop(part.name)
        if data is None:
            raise DamagedError("part missing")
        if len(data) != out.nbytes:
            raise DamagedError("truncated")
        out[:] = data

    def ahead(self, at: int = 0) -> int:
        """Ask for a few megabytes of tensors from number `at` on, in one go; bytes that came."""
        batch: list[Part] = []
        size = 0
        for part in self._order[at:]:
            if batch and size + part.nbytes > BATCH_BYTES:
                break
            batch.append(part)
            size += part.nbytes
        answers = self._ask([self._keys[part.name] for part in batch])
        self._ahead = {part.name: answer for part, answer in zip(batch, answers, strict=True)}
        return sum(len(answer) for answer in answers if answer)


def part_keys(head: Head, data: bytes) -> list[str]:
    """Keys of an entry's tensors, in the order of the file; `data` are its head's bytes."""
    start = f"{PREFIX}{member_of(head.header.key, head.stored)}:{seal(data)}:"
    return [start + name for name in head.parts]
