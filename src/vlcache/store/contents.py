"""What the tiers that outlive a process hold, for people: listing, checking, clearing, carrying elsewhere."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from vlcache.config import Config
from vlcache.errors import ConfigError, InputError
from vlcache.store.base import StoreStats
from vlcache.store.codec import Encoded, Head, decode, entry_name, head_size, parse_head
from vlcache.store.faults import DamagedError, ForeignError
from vlcache.store.open import open_tiers
from vlcache.worth import Worth

__all__ = ["Item", "Tier", "export", "import_", "items", "lasting_tiers", "listed"]

_NO_BOUND_GB = 1e6


class Tier(Protocol):
    """A store whose entries outlive the process; both the disk's and the server's are."""

    def names(self) -> list[str]: ...  # the most recently used first

    def head(self, name: str) -> Head | None: ...

    def whole(self, name: str) -> Encoded | None: ...

    def remove(self, name: str) -> bool: ...

    def clear_quarantine(self) -> None: ...

    def put_encoded(self, data: Encoded) -> bool: ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Item:
    """An entry in a tier, under the tier's own name for it."""

    tier: str
    name: str
    head: Head

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        head, header = self.head, self.head.header
        return {
            "tier": self.tier,
            "name": entry_name(header.key, head.stored),
            "content": header.key.content,
            "tokens": header.tokens,
            "grid": header.grid,
            "bytes": head.size,
            "has_kv": head.has_kv,
            "stored": head.stored,
            "dtype": header.dtype,
            "capture": head.capture,
            "model": header.model,
            "tenant": header.tenant,
            "created_s": head.created_s,
            "cost_s": head.cost_s,
        }


def lasting_tiers(config: Config, bounds: Mapping[str, float] | None = None) -> dict[str, Tier]:
    """The tiers that a configuration names, without memory.

    Parameters
    ----------
    bounds : mapping of str to float, optional
        `disk_gb` and `redis_gb` to keep to; none otherwise, whatever the configuration says: who looks after a tier
        does not know the bounds of those who use it, and must not evict for his own.

    Raises
    ------
    ConfigError
        It names none.
    """
    bounds = {"disk_gb": _NO_BOUND_GB, "redis_gb": _NO_BOUND_GB} | dict(bounds or {})
    config = replace(config, memory_gb=0, disk_gb=bounds["disk_gb"], redis_gb=bounds["redis_gb"])
    tiers: dict[str, Any] = dict(open_tiers(config, Worth(always=True)))
    tiers.pop("memory").close()
    if not tiers:
        raise ConfigError("neither a directory nor a server is configured; give --disk-path or --redis-url")
    return tiers


def listed(label: str, tier: Tier) -> list[str]:
    """A tier's own names for its entries.

    Raises
    ------
    InputError
        It cannot be asked.
    """
    try:
        return tier.names()
    except Exception as error:  # of whatever medium
        raise InputError(f"{label}: cannot be listed ({type(error).__name__}); check that it is there") from None


def items(tiers: Mapping[str, Tier]) -> Iterator[Item]:
    """Every entry that can be read, the most recently used of each tier first."""
    for label, tier in tiers.items():
        for name in listed(label, tier):
            head = tier.head(name)
            if head is not None:
                yield Item(label, name, head)


def export(tiers: Mapping[str, Tier], path: Path) -> Iterator[bool]:
    """Write every sound entry to a tar archive, once; yields for each whether it went in.

    The archive appears under its name when it is whole.

    Raises
    ------
    InputError
        It cannot be written.
    """
    todo = [(tier, name) for label, tier in tiers.items() for name in listed(label, tier)]
    partial, seen = path.with_name(path.name + ".part"), set()
    try:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
            for tier, name in todo:
                found = tier.whole(name)
                title = "" if found is None else entry_name(found.head.header.key, found.head.stored)
                if found is not None and title not in seen:
                    seen.add(title)
                    about = tarfile.TarInfo(title + ".safetensors")
                    about.size, about.mtime, about.mode = found.head.size, found.head.created_s, 0o600
                    archive.addfile(about, io.BytesIO(b"".join(found.pieces())))
                    yield True
                else:
                    yield False
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"archive {path}: {error.strerror}; choose another place") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def import_(tiers: Mapping[str, Tier], path: Path) -> Iterator[tuple[str, str]]:
    """Put an archive's entries into every tier; yields each member's name and what became of it: kept, refused (no
    room), damaged or foreign. Names in the archive are not used for anything.

    Raises
    ------
    InputError
        No archive.
    """
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                yield member.name, _take(tiers, file, member.size)
    except OSError as error:
        raise InputError(f"archive {path}: {error.strerror or 'cannot be read'}; check the name") from None
    except tarfile.TarError:
        raise InputError(f"archive {path}: not a tar archive, or cut short; export it again") from None


def _take(tiers: Mapping[str, Tier], file: IO[bytes] | None, size: int) -> str:
    if file is None:
        return "foreign"
    try:
        data = file.read(8)
        data += file.read(head_size(data) - 8)
        if parse_head(data).size != size:  # before so much is read
            return "damaged"
        encoded = decode(data + file.read())
    except DamagedError:
        return "damaged"
    except ForeignError:
        return "foreign"
    kept = [tier.put_encoded(encoded) for tier in tiers.values()]
    return "kept" if all(kept) else "refused"
