"""The disk's store: crashes, faults, damage, several processes, quota."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import signal
import sqlite3
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from entries import TOKENS, file_size, holds, kept, make_entry, make_key
from hammer import hammer

from vlcache.errors import ConfigError
from vlcache.store import catalog as catalog_module
from vlcache.store import index as index_module
from vlcache.store.catalog import INDEX
from vlcache.store.codec import entry_name
from vlcache.store.disk import DiskStore
from vlcache.store.folder import QUARANTINED
from vlcache.store.index import Row
from vlcache.types import EntryLostError
from vlcache.worth import SLOWER, Worth

SIZE = file_size(make_entry(0))
ROOM = 100 * SIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., DiskStore]]:
    """Opens the folder's store, any number of times."""
    stores = []

    def open_one(capacity: int = ROOM, **options: Any) -> DiskStore:
        stores.append(DiskStore(folder, capacity, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def path_of(folder: Path, number: int) -> Path:
    name = entry_name(make_key(number), "raw")
    return folder / "entries" / name[:2] / f"{name}.safetensors"


def files(folder: Path, part: str) -> list[Path]:
    return [path for path in (folder / part).rglob("*") if path.is_file()]


def value_of(store: DiskStore, number: int) -> float | None:
    """What an entry's tensors hold, all of them the same; None if it is not there."""
    entry = store.get_many([make_key(number)]).get(make_key(number))
    if entry is None:
        return None
    value = float(entry.encoder[0, 0])
    assert holds(entry, value) if entry.has_kv else bool((entry.encoder == value).all())
    return value


def test_entries_outlive_the_process_that_wrote_them(opened: Callable[..., DiskStore]) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    store.close()
    again = opened()
    assert (value_of(again, 1), value_of(again, 2), value_of(again, 3)) == (1, 2, None)
    assert again.stats().entries == 2


def test_only_the_owner_may_read(opened: Callable[..., DiskStore], folder: Path) -> None:
    opened().put(make_entry(1))
    found = [folder, *folder.rglob("*")]
    assert any(path.name == INDEX for path in found)
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


# Crashes


def write_until_killed(folder: Path, capacity: int, seed: int, report: int) -> None:
    store = DiskStore(folder, capacity)
    rng = random.Random(seed)
    for turn in range(1, 1_000_000):
        number = rng.randrange(12)
        value = seed * 1000 + turn
        entry = make_entry(number, fill=value)
        # Of two sizes, so that a file and what the index says of it can differ
        if store.put(entry if turn % 3 else replace(entry, keys=None, values=None)) and turn % 3:
            os.write(report, f"{number} {value}\n".encode())


@pytest.mark.parametrize("room", [100, 6], ids=["roomy", "evicting"])
def test_a_writer_killed_at_any_moment_leaves_whole_entries(folder: Path, room: int) -> None:
    rng = random.Random(room)
    acknowledged: dict[int, float] = {}
    for seed in range(100):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                write_until_killed(folder, room * SIZE, seed, write)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as reports:
            acknowledged_now = [reports.readline()]  # it is at work
            time.sleep(rng.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            acknowledged_now += reports.readlines()
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        for line in acknowledged_now:
            number, value = line.split()
            acknowledged[int(number)] = float(value)
        store = DiskStore(folder, room * SIZE)
        assert not files(folder, "incoming")
        assert not files(folder, "quarantine")
        assert store.stats().held_bytes == sum(p.stat().st_size for p in files(folder, "entries")) <= room * SIZE
        for number in range(12):
            value = value_of(store, number)
            if room == 100 and number in acknowledged:
                assert value is not None, "an acknowledged entry is lost"
                assert value >= acknowledged[number], "an older entry took a newer one's place"
        assert not store.stats().faults
        store.close()
    assert len(acknowledged) == 12


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(opened: Callable[..., DiskStore], folder: Path) -> None:
    opened().close()
    (folder / "incoming" / "half.safetensors").write_bytes(b"half")
    store = opened()
    assert not files(folder, "incoming")
    writing = store._catalog.folder.write(_encoded(1))
    opened()
    assert files(folder, "incoming") == [writing.path]
    writing.discard()
    assert not files(folder, "incoming")


def _encoded(number: int) -> Any:
    from vlcache.store.codec import encode

    return encode(make_entry(number))


def test_an_index_that_is_gone_or_broken_is_rebuilt(
    opened: Callable[..., DiskStore], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2, 3))
    store.close()
    (folder / INDEX).unlink()
    path_of(folder, 2).unlink()
    store = opened()
    assert store.stats().entries == 2
    assert (value_of(store, 1), value_of(store, 3)) == (1, 3)
    store.close()
    (folder / INDEX).write_bytes(b"no database at all, but long enough to be looked at as one" * 100)
    with caplog.at_level(logging.WARNING, "vlcache"):
        store = opened()
    assert len(caplog.records) == 1
    assert store.stats().entries == 2
    assert store.put(make_entry(4))
    assert value_of(store, 4) == 4


def test_an_index_with_a_broken_page_is_rebuilt_in_use_and_at_the_start(
    opened: Callable[..., DiskStore], folder: Path
) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in range(60))
    store.close()
    index = folder / INDEX
    sound, data = index.read_bytes(), bytearray(index.read_bytes())
    assert len(data) >= 3 * 4096
    data[4096:] = os.urandom(len(data) - 4096)  # the first page, with the schema, is as it was
    index.write_bytes(data)
    store = opened()
    assert store.stats().entries == 60
    assert list(store.stats().faults) == ["index: DatabaseError"]
    assert store.put(make_entry(60))
    store.close()
    # And under a store that is open
    store = opened()
    store._catalog._index._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(index.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    with open(index, "r+b") as file:
        file.write(data)
    other = opened()
    assert other.stats().entries == 61
    puts = [store.put(make_entry(100 + n)) for n in range(4)]
    assert puts[-1]
    assert value_of(store, 103) == 103
    assert sound


def test_an_index_that_could_not_be_opened_is_tried_again(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "_RETRY_S", 0.0)
    connect = sqlite3.connect

    def locked(*args: Any, **options: Any) -> Any:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(index_module.sqlite3, "connect", locked)
    store = opened()
    assert not store.put(make_entry(1))
    monkeypatch.setattr(index_module.sqlite3, "connect", connect)
    assert store.put(make_entry(1))
    assert value_of(store, 1) == 1


def test_a_lost_index_beside_damaged_and_foreign_files(opened: Callable[..., DiskStore], folder: Path) -> None:
    from test_codec import rewrite

    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2, 3))
    store.close()
    (folder / INDEX).unlink()
    path_of(folder, 1).write_bytes(b"damaged")
    path_of(folder, 2).write_bytes(rewrite({"format_version": "2"}))
    store = opened()
    assert store.stats().entries == 1
    assert not store.stats().faults, "nobody has asked for them yet"
    assert (value_of(store, 1), value_of(store, 2), value_of(store, 3)) == (None, None, 3)
    assert store.stats().faults == {"damaged: truncated": 1, "foreign: format version": 1}


def test_an_entry_that_is_none_is_a_counted_refusal(opened: Callable[..., DiskStore]) -> None:
    store = opened()
    assert not store.put(replace(make_entry(1), encoder=torch.zeros(3, 3)))
    assert (store.stats().refusals, store.stats().faults) == (1, {"foreign: format": 1})


def test_an_entry_that_nobody_holds_is_gone_at_once(opened: Callable[..., DiskStore]) -> None:
    """Its memory is large, and the collector of cycles counts objects, not bytes."""
    store = opened()
    store.put(make_entry(1))
    gc.collect()
    gc.disable()
    try:
        entry = store.get_many([make_key(1)])[make_key(1)]
        assert holds(entry, 1)
        held = weakref.ref(entry.keys)
        store._threads.shutdown(wait=True)
        assert held() is not None
        del entry
        assert held() is None
    finally:
        gc.enable()


def test_a_file_that_cannot_be_read_does_not_disable_the_tier(
    opened: Callable[..., DiskStore], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    store.close()
    (folder / INDEX).unlink()
    path_of(folder, 1).unlink()
    path_of(folder, 1).mkdir()
    store = opened()
    assert store.put(make_entry(3))
    assert (value_of(store, 1), value_of(store, 2), value_of(store, 3)) == (None, 2, 3)
    assert list(store.stats().faults) == ["disk: EISDIR"]


def test_an_absurd_cost_does_not_disable_the_tier(opened: Callable[..., DiskStore], folder: Path) -> None:
    store = opened()
    assert store.put(replace(make_entry(1), cost_s=1e308))
    store.close()
    (folder / INDEX).unlink()
    store = opened()
    assert value_of(store, 1) == 1
    assert store.put(make_entry(2))
    assert not store.stats().faults


def test_an_index_that_was_replaced_under_a_store_is_opened_again(
    opened: Callable[..., DiskStore], folder: Path
) -> None:
    store = opened()
    assert store.put(make_entry(1))
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{INDEX}{suffix}").unlink()
    other = opened()
    assert other.stats().entries == 1
    store.put(make_entry(2))
    assert store.put(make_entry(3))
    assert store.stats().entries == other.stats().entries >= 2
    assert list(store.stats().faults) == ["index: DatabaseError"]


def test_a_store_without_room_leaves_what_is_there(opened: Callable[..., DiskStore], folder: Path) -> None:
    store = opened()
    assert store.put(make_entry(1))
    store.close()
    off = opened(0)
    assert not off.put(make_entry(2))
    assert len(files(folder, "entries")) == 1


def test_what_is_slow_to_load_is_not_written_again(opened: Callable[..., DiskStore], folder: Path) -> None:
    worth = Worth()
    store = opened(worth=worth)
    assert store.put(replace(make_entry(1), cost_s=0.001))
    worth.loaded("disk", 1, 1000.0)
    assert value_of(store, 1) is None
    before = path_of(folder, 1).stat().st_ino
    assert store.put(make_entry(1))
    assert path_of(folder, 1).stat().st_ino == before
    assert store.put(make_entry(1)), "once it was declined, once it is spared"
    assert path_of(folder, 1).stat().st_ino != before


def test_two_processes_that_open_at_once_wait_for_each_other(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "BUSY_S", 0.05)
    store = opened()
    with store._catalog.folder.alone(1):
        other = opened()
        assert not other.put(make_entry(1))
    assert list(other.stats().faults) == ["disk: EAGAIN"]
    assert store.put(make_entry(1))


def test_a_newer_file_is_not_quarantined_for_an_older_one(opened: Callable[..., DiskStore], folder: Path) -> None:
    store = opened()
    store.put(make_entry(1))
    data = bytearray(path_of(folder, 1).read_bytes())
    data[-1] ^= 1
    path_of(folder, 1).write_bytes(data)
    file = store._catalog.folder.open(path_of(folder, 1).stem)
    assert store.put(make_entry(1, fill=9))
    store._catalog.quarantine(path_of(folder, 1).stem, file)
    file.close()
    assert value_of(store, 1) == 9
    assert not files(folder, "quarantine")


def test_a_lookup_that_runs_out_of_memory_is_a_counted_miss(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:

        def full(*args: Any, **options: Any) -> Any:
            raise RuntimeError("not enough memory")

        patch.setattr(torch, "empty", full)
        assert store.get_many([make_key(1), make_key(2)]) == {}
    assert store.stats().faults == {"disk: RuntimeError": 2}
    assert len(os.listdir("/proc/self/fd")) == before
    assert value_of(store, 1) == 1


def test_the_index_follows_what_happened_to_the_files(opened: Callable[..., DiskStore], folder: Path) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    store.close()
    path_of(folder, 1).unlink()
    (folder / "entries" / "README").write_text("not an entry")
    (folder / "entries" / "ab").mkdir(exist_ok=True)
    (folder / "entries" / "ab" / "..safetensors").write_text("not an entry either")
    store = opened()
    assert store.stats().entries == 1
    assert store.stats().held_bytes == SIZE
    assert (folder / "entries" / "README").exists()


def test_a_smaller_bound_is_kept_from_the_start(opened: Callable[..., DiskStore]) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in range(6))
    store.close()
    store = opened(int(2.5 * SIZE))
    assert store.stats().entries == 2
    assert kept(store, *range(6)) == [4, 5]


# Faults

CALLS = ["open", "write", "fsync", "replace", "preadv", "pread", "fstat", "mkdir"]


class Failing:
    """Lets an `os` function fail at its n-th call from now on that touches the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int, error: int) -> None:
        self.calls = 0
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise OSError(error, os.strerror(error))
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    def hit(self, at: int) -> bool:
        return self.calls >= at


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_may_fail(name: str, error: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Open, put a new entry, put an old one anew, get: with the n-th call failing, for every n there is."""
    for at in range(1, 100):
        folder = tmp_path / f"{at}"
        if name != "mkdir":  # which only matters where nothing is yet
            store = DiskStore(folder, ROOM)
            assert store.put(make_entry(1))
            store.close()
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "vlcache"):
            failing = Failing(patch, name, at, error)
            store = DiskStore(folder, ROOM)
            put = store.put(make_entry(2)), store.put(make_entry(1, fill=7))
            got = []
            for number in (1, 2):
                try:
                    got.append(value_of(store, number))
                except EntryLostError:
                    got.append(None)
            stats = store.stats()
            store.close()
        assert got[0] in ({7.0, None} if put[1] else {1.0, 7.0, None})
        assert got[1] in ({2.0, None} if put[0] else {None})
        if failing.hit(at):
            assert sum(stats.faults.values()) >= 1, "not counted"
            assert len(caplog.records) == len(stats.faults) >= 1, "one warning a kind"
        else:
            assert put == (True, True)
            assert got == [7.0, 2.0]
            assert not stats.faults
        # Afterwards all is well, and what had been acknowledged and not failed is there
        store = DiskStore(folder, ROOM)
        assert not files(folder, "incoming")
        after = value_of(store, 1), value_of(store, 2)
        assert after[0] in {1.0, 7.0, None}
        assert after[1] in {2.0, None}
        assert store.put(make_entry(3))
        assert value_of(store, 3) == 3
        store.close()
        if not failing.hit(at):
            return
    raise AssertionError("calls without end")


def test_a_full_disk_refuses_and_keeps_what_is_there(
    opened: Callable[..., DiskStore], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, write = opened(), os.write
    assert store.put(make_entry(1))

    def half(handle: int, data: Any) -> int:
        if len(data) > 4096:
            return write(handle, data[:4096])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with caplog.at_level(logging.WARNING, "vlcache"):
        assert not any(store.put(make_entry(n)) for n in (2, 3, 4))
    assert len(caplog.records) == 1
    assert store.stats().faults == {"disk: ENOSPC": 3}
    assert store.stats().refusals == 3
    assert not files(folder, "incoming")
    monkeypatch.undo()
    assert kept(store, 1, 2, 3, 4) == [1]
    assert store.put(make_entry(2))


def test_a_folder_that_cannot_be_is_a_miss_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "vlcache"):
        store = DiskStore(tmp_path / "file" / "store", ROOM)
        assert not store.put(make_entry(1))
        assert kept(store, 1) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert store.stats().faults["disk: ENOTDIR"] >= 1
    store.close()


def test_a_read_only_folder_still_gives_what_it_has(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    store.put(make_entry(1))
    store.close()

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    def locked(*args: Any, **options: Any) -> Any:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    for name in ("mkdir", "write", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(index_module.sqlite3, "connect", locked)
    with caplog.at_level(logging.WARNING, "vlcache"):
        store = opened()
        assert value_of(store, 1) == 1
        assert not store.put(make_entry(2))
    assert len(caplog.records) == len(store.stats().faults) == 1


def test_an_index_that_another_process_holds_is_a_counted_refusal(
    opened: Callable[..., DiskStore], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "BUSY_S", 0.05)
    store = opened()
    assert store.put(make_entry(1))
    other = sqlite3.connect(folder / INDEX, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not store.put(make_entry(2))
    assert value_of(store, 1) == 1, "a lookup does not ask the index"
    assert store.stats().faults == {"index: OperationalError": 1}
    other.execute("ROLLBACK")
    assert store.put(make_entry(2))
    other.close()


# Damage


@pytest.mark.parametrize("where", ["head", "encoder", "layers", "cut", "longer", "empty"])
def test_a_damaged_entry_is_a_counted_miss_and_goes_to_quarantine(
    where: str, opened: Callable[..., DiskStore], folder: Path
) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    path = path_of(folder, 1)
    data = bytearray(path.read_bytes())
    at = {"head": 300, "encoder": len(data) // 4, "layers": len(data) - 10}.get(where)
    if at is not None:
        data[at] ^= 4
    data = {"cut": data[:-1], "longer": data + b"x", "empty": bytearray()}.get(where, data)
    path.write_bytes(data)
    if where == "layers":
        with pytest.raises(EntryLostError):
            value_of(store, 1)
    else:
        assert value_of(store, 1) is None
    assert [reason.split(":")[0] for reason in store.stats().faults] == ["damaged"]
    assert not path.exists()
    assert [p.name for p in files(folder, "quarantine")] == [path.name]
    assert value_of(store, 1) is None
    assert sum(store.stats().faults.values()) == 1
    assert value_of(store, 2) == 2
    assert store.stats().entries == 1
    assert store.put(make_entry(1, fill=5))
    assert value_of(store, 1) == 5


def test_the_quarantine_does_not_grow_without_bound(opened: Callable[..., DiskStore], folder: Path) -> None:
    store = opened()
    for number in range(QUARANTINED + 4):
        store.put(make_entry(number))
        path_of(folder, number).write_bytes(b"damaged")
        assert value_of(store, number) is None
    assert len(files(folder, "quarantine")) == QUARANTINED


def test_an_entry_of_another_version_is_left_alone(opened: Callable[..., DiskStore], folder: Path) -> None:
    from test_codec import rewrite

    store = opened()
    store.put(make_entry(1))
    data = rewrite({"format_version": "2"})
    path_of(folder, 1).write_bytes(data)
    assert value_of(store, 1) is None
    assert store.stats().faults == {"foreign: format version": 1}
    assert path_of(folder, 1).read_bytes() == data


def test_another_entry_under_the_name_is_not_taken_for_it(opened: Callable[..., DiskStore], folder: Path) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    path_of(folder, 1).write_bytes(path_of(folder, 2).read_bytes())
    assert value_of(store, 1) is None
    assert store.stats().faults == {"foreign: key": 1}


def test_writers_of_other_dtypes_do_not_meet(opened: Callable[..., DiskStore]) -> None:
    raw, small = opened(), opened(stored="int8")
    assert raw.put(make_entry(1))
    assert kept(small, 1) == []
    assert small.put(make_entry(1, fill=3))
    assert (value_of(raw, 1), value_of(small, 1)) == (1, 3)


def test_names_from_outside_are_not_paths(opened: Callable[..., DiskStore], folder: Path) -> None:
    store = opened()
    key = replace(make_key(1), content="../../../../tmp/x", scope="/etc/passwd")
    entry = make_entry(1)
    assert store.put(replace(entry, header=replace(entry.header, key=key)))
    assert key in store.get_many([key])
    (found,) = files(folder, "entries")
    assert len(found.stem) == 64


# What goes first


def test_what_costs_more_to_compute_stays_longer(opened: Callable[..., DiskStore]) -> None:
    store = opened(int(3.5 * SIZE))
    costly = replace(make_entry(1), cost_s=50.0)
    assert store.put(costly)
    assert all(store.put(replace(make_entry(n), cost_s=1.0)) for n in range(2, 8))
    assert kept(store, *range(1, 8)) == [1, 6, 7]


def test_what_costs_more_goes_too_when_it_is_not_used(opened: Callable[..., DiskStore]) -> None:
    store = opened(int(3.5 * SIZE))
    assert store.put(replace(make_entry(1), cost_s=4.0))
    assert all(store.put(replace(make_entry(n), cost_s=1.0)) for n in range(2, 30))
    assert kept(store, 1, 28, 29) == [28, 29]


def test_noise_in_the_cost_does_not_outrank_use(opened: Callable[..., DiskStore]) -> None:
    rows = [Row("n", 10**6, True, cost_s) for cost_s in (0.9, 1.0, 1.2)]
    assert len({row.worth for row in rows}) == 1
    assert replace(rows[0], cost_s=10.0).worth == 8 * rows[0].worth


def test_an_entry_that_is_slower_to_load_than_to_compute_is_not_loaded(opened: Callable[..., DiskStore]) -> None:
    worth = Worth()
    store = opened(worth=worth)
    assert store.put(replace(make_entry(1), cost_s=0.001))
    assert value_of(store, 1) == 1, "nothing is known of the disk yet"
    worth.loaded("disk", SIZE, 1000.0)
    while worth.rate("disk") > SIZE / 10:
        worth.loaded("disk", SIZE, 1000.0)
    assert value_of(store, 1) is None
    assert store.stats().faults == {SLOWER: 1}
    worth.computed(TOKENS, 100.0)
    assert value_of(store, 1) == 1, "computing is slower still"


# Several processes


def test_four_processes_on_one_folder(folder: Path) -> None:
    hammer(lambda: DiskStore(folder, int(8.5 * SIZE)), value_of, float(os.environ.get("HAMMER_S", "5")))
    store = DiskStore(folder, int(8.5 * SIZE))
    assert store.stats().held_bytes == sum(p.stat().st_size for p in files(folder, "entries")) <= 8.5 * SIZE
    store.close()


def test_a_negative_bound_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="-1 bytes is negative"):
        DiskStore(folder, -1)
