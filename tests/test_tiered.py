"""Tiers as one store: where an entry comes from, where it goes, and what the queue does under pressure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from entries import file_size, holds, kept, make_entry, make_key
from servers import RedisServer

from vlcache.config import Config
from vlcache.store import MemoryStore, Store, StoreStats
from vlcache.store.codec import entry_name
from vlcache.store.disk import DiskStore
from vlcache.store.open import open_store, open_tiers
from vlcache.store.redis import RedisStore
from vlcache.store.tiered import DROPPED, TieredStore
from vlcache.types import Entry, EntryKey
from vlcache.worth import SLOWER, Worth

SIZE = file_size(make_entry(0))
ROOM = 100 * SIZE


@pytest.fixture
def opened() -> Iterator[Callable[..., TieredStore]]:
    stores = []

    def open_one(**tiers: Store) -> TieredStore:
        stores.append(TieredStore(tiers))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


class Slow:
    """A tier that writes when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.inner = MemoryStore(ROOM)

    def get_many(self, keys: Sequence[EntryKey]) -> Mapping[EntryKey, Entry]:
        return self.inner.get_many(keys)

    def put(self, entry: Entry) -> bool:
        assert self.gate.wait(10)
        return self.inner.put(entry)

    def pin(self, keys: Sequence[EntryKey]) -> AbstractContextManager[None]:
        return nullcontext()

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


def test_a_put_reaches_every_tier_and_a_hit_moves_up(
    opened: Callable[..., TieredStore], tmp_path: Path, redis_server: RedisServer
) -> None:
    redis_server.client.flushall()
    memory, disk, server = MemoryStore(ROOM), DiskStore(tmp_path, ROOM), RedisStore(redis_server.url, ROOM)
    store = opened(memory=memory, disk=disk, redis=server)
    assert store.put(make_entry(1))
    assert kept(memory, 1) == [1], "at once"
    assert store.flush(10)
    assert kept(disk, 1) == kept(server, 1) == [1]
    assert server.put(make_entry(2))
    assert holds(store.get_many([make_key(2)])[make_key(2)], 2)
    assert store.flush(10)
    assert kept(memory, 2) == kept(disk, 2) == [2]
    assert store.get_many([make_key(1), make_key(3)]).keys() == {make_key(1)}
    assert (store.stats().hits, store.stats().misses) == (2, 1)


def test_an_entry_that_is_damaged_below_does_not_move_up(opened: Callable[..., TieredStore], tmp_path: Path) -> None:
    memory, disk = MemoryStore(ROOM), DiskStore(tmp_path, ROOM)
    store = opened(memory=memory, disk=disk)
    assert disk.put(make_entry(1))
    name = entry_name(make_key(1), "raw")
    path = tmp_path / "entries" / name[:2] / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert make_key(1) in store.get_many([make_key(1)])
    assert store.flush(10)
    assert kept(memory, 1) == []
    assert store.get_many([make_key(1)]) == {}
    assert store.stats().faults == {"damaged: checksum of layer": 1}


def test_a_slower_tier_with_kv_goes_before_a_faster_one_without(opened: Callable[..., TieredStore]) -> None:
    memory, below = MemoryStore(ROOM), MemoryStore(ROOM)
    store = opened(memory=memory, below=below)
    memory.put(replace(make_entry(1), keys=None, values=None))
    memory.put(replace(make_entry(2), keys=None, values=None))
    below.put(make_entry(1))
    found = store.get_many([make_key(1), make_key(2)])
    assert found[make_key(1)].has_kv
    assert not found[make_key(2)].has_kv
    assert store.flush(10)
    assert memory.get_many([make_key(1)])[make_key(1)].has_kv


def test_the_queue_is_bounded_and_what_it_cannot_take_is_counted() -> None:
    slow, memory = Slow(), MemoryStore(ROOM)
    store = TieredStore({"memory": memory, "slow": slow}, queue_bytes=int(2.5 * make_entry(0).nbytes), patience_s=0.05)
    assert all(store.put(make_entry(n)) for n in range(5)), "memory has them all the same"
    assert store.stats().faults == {DROPPED: 3}
    assert not store.flush(0.05)
    slow.gate.set()
    assert store.flush(10)
    assert kept(slow, *range(5)) == [0, 1]
    assert kept(memory, *range(5)) == [0, 1, 2, 3, 4]
    store.put(make_entry(5))
    store.close()
    assert store.stats().faults == {DROPPED: 3}
    assert not store.put(make_entry(6))
    assert store.get_many([make_key(1)]) == {}


def test_a_put_waits_for_room_before_it_gives_up() -> None:
    slow = Slow()
    store = TieredStore({"memory": MemoryStore(ROOM), "slow": slow}, queue_bytes=make_entry(0).nbytes, patience_s=10)
    store.put(make_entry(0))
    threading.Timer(0.05, slow.gate.set).start()
    assert store.put(make_entry(1))
    assert store.flush(10)
    assert kept(slow, 0, 1) == [0, 1]
    assert not store.stats().faults
    store.close()


def test_what_waits_is_written_before_closing(tmp_path: Path) -> None:
    store = TieredStore({"memory": MemoryStore(ROOM), "disk": DiskStore(tmp_path, ROOM)})
    assert all(store.put(make_entry(n)) for n in range(8))
    store.close()
    disk = DiskStore(tmp_path, ROOM)
    assert kept(disk, *range(8)) == list(range(8))
    disk.close()


def test_a_tier_that_raises_is_counted_and_the_rest_goes_on(opened: Callable[..., TieredStore]) -> None:
    class Broken(Slow):
        def put(self, entry: Entry) -> bool:
            raise RuntimeError("broken")

    store = opened(memory=MemoryStore(ROOM), broken=Broken())
    assert store.put(make_entry(1))
    assert store.put(make_entry(2))
    assert store.flush(10)
    assert store.stats().faults == {"write-behind: RuntimeError": 2}
    assert kept(store, 1, 2) == [1, 2]


def test_a_pin_holds_in_every_tier(opened: Callable[..., TieredStore], tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, int(1.5 * SIZE))
    store = opened(memory=MemoryStore(0), disk=disk)
    store.put(make_entry(1))
    store.flush(10)
    with store.pin([make_key(1)]):
        store.put(make_entry(2))
        store.flush(10)
        assert kept(disk, 1, 2) == [1]
    store.put(make_entry(2))
    store.flush(10)
    assert kept(disk, 1, 2) == [2]


def test_the_configuration_says_which_tiers_there_are(tmp_path: Path, redis_server: RedisServer) -> None:
    def names(**options: object) -> list[str]:
        tiers = open_tiers(Config(**options), Worth())  # type: ignore[arg-type]
        for tier in tiers.values():
            tier.close()
        return list(tiers)

    disk, server = {"disk_path": str(tmp_path / "d")}, {"redis_url": redis_server.url}
    assert names() == ["memory"]
    assert names(**disk) == ["memory", "disk"]
    assert names(**server) == ["memory", "redis"]
    assert names(**disk, **server) == ["memory", "disk", "redis"]
    assert names(**disk, **server, disk_gb=0, redis_gb=0) == ["memory"]
    assert isinstance(open_store(Config(), Worth()), MemoryStore)


def test_worth_weighs_loading_against_computing() -> None:
    from test_codec import GOLDEN

    from vlcache.store.codec import parse_head

    head = parse_head(GOLDEN.read_bytes())  # 4 tokens that took 0.25 s
    worth = Worth()
    assert worth.against("disk", head) is None, "nothing is known"
    worth.loaded("disk", 1000, 1.0)
    assert worth.against("disk", head) == SLOWER
    assert worth.against("redis", head) is None
    assert Worth(always=True).against("disk", head) is None
    worth.computed(4, 400.0)
    assert worth.token_s == 100.0
    assert worth.against("disk", head) is None, "what was measured here goes before what the writer wrote"
    worth.computed(1_000_000, 1.0)
    for _ in range(40):
        worth.computed(1_000_000, 1.0)
    answers = [worth.against("disk", head) for _ in range(64)]
    assert answers.count(SLOWER) == 62, "tried again now and then"
