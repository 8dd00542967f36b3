"""A server's keys for an entry, and reading its tensors a few megabytes at a time.

vlcache:1:<scope>:{<name>}:head                 the head of the entry's file
vlcache:1:<scope>:{<name>}:<seal>:<tensor>      a tensor's bytes; the seal is the head's own digest
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlcache.store.codec import VERSION, DamagedError, ForeignError, Head, Part, entry_name, parse_head, seal
from vlcache.types import EntryKey, Stored

__all__ = ["BATCH_BYTES", "PREFIX", "RemoteParts", "head_key", "member_of", "part_key", "part_keys"]

PREFIX = f"vlcache:{VERSION}:"
BATCH_BYTES = 4 << 20


def member_of(key: EntryKey, stored: Stored) -> str:
    """What stands between prefix and part in an entry's keys."""
    return f"{key.scope}:{{{entry_name(key, stored)}}}"


def head_key(member: str) -> str:
    return f"{PREFIX}{member}:head"


class RemoteParts:
    """A found entry's tensors; those that follow the one asked for come with it, a few megabytes at a time."""

    def __init__(
        self, ask: Callable[[list[str]], Sequence[bytes | None]], member: str, data: bytes, head: Head
    ) -> None:
        self._ask = ask
        self._mark = seal(data)
        self._order = list(head.parts.values())
        self._ahead: dict[str, bytes | None] = {}
        self.member = member
        self.head_bytes = data
        self.size = head.size

    def names(self) -> list[str]:
        """Keys of all tensors."""
        return [part_key(self.member, self._mark, part.name) for part in self._order]

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
        answers = self._ask([part_key(self.member, self._mark, part.name) for part in batch])
        self._ahead = {part.name: answer for part, answer in zip(batch, answers, strict=True)}
        return sum(len(answer) for answer in answers if answer)


def part_key(member: str, mark: str, part: str) -> str:
    return f"{PREFIX}{member}:{mark}:{part}"


def part_keys(data: bytes) -> list[str]:
    """Keys of the tensors that a head names; none if it is not sound."""
    try:
        head = parse_head(data)
    except (DamagedError, ForeignError):
        return []
    member = f"{head.header.key.scope}:{{{entry_name(head.header.key, head.stored)}}}"
    return [part_key(member, seal(data), name) for name in head.parts]
