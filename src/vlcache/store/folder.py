"""A directory of entry files: written whole or not at all, read apart, moved aside when damaged.

    DIR/entries/3f/3fa9...e1.safetensors    an entry each, named by a digest of its key
    DIR/incoming/                           being written; locked while their writer lives
    DIR/quarantine/                         found damaged, the latest few
    DIR/lock                                held while a process opens the directory

A file gets its name after its bytes are on the disk. A reader holds the open file, so an entry that is evicted under it
stays whole for it. Names come from digests, never from outside.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlcache.store.codec import Encoded, Head, Part, head_size, parse_head
from vlcache.store.faults import DamagedError

__all__ = ["EntryFile", "Folder", "Incoming"]

SUFFIX = ".safetensors"
QUARANTINED = 8
"""How many damaged files are kept to look at."""

_NAME = re.compile(r"[0-9a-f]{64}")
_HEAD_GUESS = 1 << 15


class EntryFile:
    """An open entry file. Reads are positioned, so it may be shared between threads.

    Raises
    ------
    OSError
        FileNotFoundError where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def head(self) -> Head:
        """Its head, checked.

        Raises
        ------
        DamagedError, ForeignError, OSError
        """
        data = self._at_most(_HEAD_GUESS, 0)
        size = head_size(data)
        if size > len(data):
            data += self._at_most(size - len(data), len(data))
        head = parse_head(data)
        if os.fstat(self._handle).st_size != head.size:
            raise DamagedError("truncated")
        return head

    def start(self, size: int) -> bytes:
        """The first bytes, up to `size`."""
        return self._at_most(size, 0)

    @property
    def identity(self) -> tuple[int, int]:
        """Tells this file from a later one of the same name."""
        about = os.fstat(self._handle)
        return about.st_dev, about.st_ino

    def whole(self) -> bytes:
        """All bytes."""
        return self._at_most(os.fstat(self._handle).st_size, 0)

    def read(self, part: Part, out: memoryview) -> None:
        """Fill `out` with a part's bytes.

        Raises
        ------
        DamagedError, OSError
        """
        at = 0
        while at < out.nbytes:
            n = os.preadv(self._handle, [out[at:]], part.start + at)
            if n == 0:
                raise DamagedError("truncated")
            at += n

    def close(self) -> None:
        os.close(self._handle)
        self._handle = -1  # its number may be another file's soon

    def _at_most(self, size: int, offset: int) -> bytes:
        data = b""
        while len(data) < size:
            more = os.pread(self._handle, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data


class Incoming:
    """A file being written. Its lock says that its writer lives; `discard` or `Folder.accept` ends it."""

    def __init__(self, folder: Path, data: Encoded) -> None:
        handle, path = _locked_file(folder)
        self.path: Path | None = path
        self._handle = handle
        try:
            for piece in data.pieces():
                view = memoryview(piece)
                while view.nbytes:
                    view = view[os.write(handle, view) :]
            os.fsync(handle)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the file unless it was accepted."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)
            self.done()

    def done(self) -> None:
        self.path = None
        os.close(self._handle)


class Folder:
    """The files under `root`.

    Raises
    ------
    OSError
        From every method.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._entries, self._incoming, self._quarantine = (root / n for n in ("entries", "incoming", "quarantine"))

    def make(self) -> None:
        """Make what is missing, for the owner alone: entries tell what pictures show."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self._entries, self._incoming, self._quarantine):
            path.mkdir(mode=0o700, exist_ok=True)

    def open(self, name: str) -> EntryFile | None:
        try:
            return EntryFile(self._path(name))
        except FileNotFoundError:
            return None

    def write(self, data: Encoded) -> Incoming:
        """Write an entry's bytes beside the others, down to the disk."""
        return Incoming(self._incoming, data)

    def accept(self, incoming: Incoming, name: str) -> None:
        """Give a written file its name, in place of an older one."""
        path = self._path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        assert incoming.path is not None
        os.replace(incoming.path, path)
        incoming.done()
        _sync(path.parent)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def quarantine(self, name: str, identity: tuple[int, int]) -> bool:
        """Move a damaged entry aside, and forget the oldest of those there; False if another file has its name by
        now."""
        path = self._path(name)
        try:
            about = path.stat()
            if (about.st_dev, about.st_ino) != identity:
                return False
            os.replace(path, self._quarantine / (name + SUFFIX))
        except FileNotFoundError:
            return False
        for old in self.quarantined()[QUARANTINED:]:
            old.unlink(missing_ok=True)
        return True

    def quarantine_index(self, path: Path) -> None:
        """Move a broken index aside."""
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", self._quarantine / f"{path.name}{suffix}")

    def sizes(self) -> dict[str, int]:
        """Bytes of every entry file by name."""
        found = {}
        for path in self._entries.glob("??/*" + SUFFIX):
            if _NAME.fullmatch(path.stem) and path.parent.name == path.stem[:2]:
                with suppress(FileNotFoundError):
                    found[path.stem] = path.stat().st_size
        return found

    def discard_leftovers(self) -> None:
        """Remove what writers that are gone left half-written."""
        for path in self._incoming.iterdir():
            _remove_if_unlocked(path)

    @contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """Among all processes that open the directory. BlockingIOError if another one does for so long."""
        handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + timeout_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)

    def clear_quarantine(self) -> None:
        for path in self._quarantine.iterdir():
            path.unlink(missing_ok=True)

    def quarantined(self) -> list[Path]:
        """Latest first."""
        found = []
        for path in self._quarantine.iterdir():
            with suppress(FileNotFoundError):
                found.append((path.stat().st_ctime, path))  # when it was moved there
        return [path for _, path in sorted(found, reverse=True)]

    def _path(self, name: str) -> Path:
        assert _NAME.fullmatch(name), "names are digests"
        return self._entries / name[:2] / (name + SUFFIX)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _locked_file(folder: Path) -> tuple[int, Path]:
    """A new file, locked. Between its making and its locking another process may take it for a leftover."""
    while True:
        handle, name = tempfile.mkstemp(SUFFIX, dir=folder)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle, Path(name)
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _remove_if_unlocked(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        os.close(handle)
