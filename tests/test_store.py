"""One contract suite over every store, and what makes an entry unusable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from entries import GEOMETRY, TOKENS, file_size, holds, kept, make_entry, make_key
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import RedisServer

from vlcache.errors import ConfigError
from vlcache.store import MemoryStore, Store
from vlcache.store.disk import DiskStore
from vlcache.store.redis import RedisStore
from vlcache.store.tiered import TieredStore
from vlcache.types import Entry

Open = Callable[[float], Store]


@dataclass(frozen=True)
class Backend:
    """How the suite opens a store of a kind, empty and bounded in bytes, and what an entry counts there."""

    open: Callable[[pytest.TempPathFactory, RedisServer, int], Store]
    size: Callable[[Entry], int]


class Settled(TieredStore):
    """Two tiers of which the slower one has written what it was given when a put returns."""

    def put(self, entry: Entry) -> bool:
        kept = super().put(entry)
        assert self.flush(10)
        return kept


def _open_redis(server: RedisServer, bound: int) -> Store:
    server.client.flushall()
    return RedisStore(server.url, bound)


# Those with one bound
TIERS = {
    "memory": Backend(lambda paths, server, bound: MemoryStore(bound), lambda entry: entry.nbytes),
    "disk": Backend(lambda paths, server, bound: DiskStore(paths.mktemp("disk"), bound), file_size),
    "redis": Backend(lambda paths, server, bound: _open_redis(server, bound), file_size),
}
BACKENDS = TIERS | {
    "tiered": Backend(
        lambda paths, server, bound: Settled(
            {"memory": MemoryStore(bound), "disk": DiskStore(paths.mktemp("disk"), bound)}
        ),
        file_size,
    )
}


def _opens(backend: Backend, paths: pytest.TempPathFactory, server: RedisServer) -> Iterator[Open]:
    opened: list[Store] = []

    def open_one(entries: float) -> Store:
        opened.append(backend.open(paths, server, int(entries * backend.size(make_entry(0)))))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def open_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[Open]:
    """Opens an empty store whose bound, or each of whose tiers', is so many entries of `make_entry`."""
    yield from _opens(BACKENDS[request.param], tmp_path_factory, redis_server)


@pytest.fixture(scope="module", params=sorted(TIERS))
def open_tier(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> Iterator[Open]:
    """The same for stores with one bound."""
    yield from _opens(TIERS[request.param], tmp_path_factory, redis_server)


def test_get_after_put_gives_the_entry_back(open_store: Open) -> None:
    store = open_store(4)
    entry = replace(make_entry(5), capture="neutral", created_s=12.5)
    assert store.put(entry)
    assert store.put(replace(make_entry(6), keys=None, values=None, checkpoints={}))
    found = store.get_many([make_key(5), make_key(6)])
    assert set(found) == {make_key(5), make_key(6)}
    back = found[make_key(5)]
    assert (back.header, back.capture, back.created_s) == (entry.header, "neutral", 12.5)
    assert holds(back, 5)
    assert back.mismatch(entry.header) is None
    assert not found[make_key(6)].has_kv, "an entry without keys and values stays without"


def test_an_absent_key_is_absent_from_the_answer(open_store: Open) -> None:
    store = open_store(4)
    assert store.get_many([]) == {}
    assert store.get_many([make_key(1)]) == {}
    store.put(make_entry(1))
    assert set(store.get_many([make_key(n) for n in (0, 1, 2)])) == {make_key(1)}
    assert store.get_many([replace(make_key(1), scope="another scope")]) == {}


def test_a_second_put_takes_the_place_of_the_first(open_tier: Open) -> None:
    store = open_tier(1.5)
    assert store.put(make_entry(1))
    assert store.put(make_entry(1, fill=7))
    assert holds(store.get_many([make_key(1)])[make_key(1)], 7)
    assert store.stats().entries == 1
    before = store.stats().held_bytes
    assert store.put(make_entry(1, tokens=TOKENS // 2))
    assert store.stats().held_bytes < before


def test_the_least_recently_used_goes_first(open_tier: Open) -> None:
    store = open_tier(3.5)
    assert all(store.put(make_entry(number)) for number in (1, 2, 3))
    store.get_many([make_key(1)])
    assert store.put(make_entry(4))
    assert kept(store, 1, 2, 3, 4) == [1, 3, 4]
    assert store.put(make_entry(3, fill=9))
    assert store.put(make_entry(5))
    assert kept(store, 1, 3, 4, 5) == [3, 4, 5]


def test_one_large_entry_pushes_out_as_many_as_it_needs(open_tier: Open) -> None:
    store = open_tier(4.5)
    assert all(store.put(make_entry(number)) for number in range(4))
    assert store.put(make_entry(9, tokens=2 * TOKENS))
    assert kept(store, 0, 1, 2, 3, 9) == [2, 3, 9]
    assert store.stats().evictions == 2


def test_an_evicted_entry_stays_valid_for_whom_holds_it(open_store: Open) -> None:
    store = open_store(1.5)
    store.put(make_entry(1))
    held = store.get_many([make_key(1)])[make_key(1)]
    store.put(make_entry(2))
    store.close()
    assert holds(held, 1)


steps = st.lists(st.tuples(st.sampled_from(["put", "get", "pin"]), st.integers(0, 5), st.integers(1, 3)), max_size=30)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_the_bound_is_never_exceeded(open_tier: Open, steps: list[tuple[str, int, int]]) -> None:
    store = open_tier(4.2)
    pins = []
    for action, number, size in steps:
        if action == "put":
            stored = store.put(make_entry(number, tokens=size * TOKENS))
            assert not stored or kept(store, number) == [number]
        elif action == "get":
            store.get_many([make_key(number)])
        else:
            pins.append(store.pin([make_key(number)]))
            pins[-1].__enter__()
        stats = store.stats()
        assert stats.held_bytes <= stats.capacity_bytes
        assert stats.held_bytes >= sum(e.nbytes for e in store.get_many([make_key(n) for n in range(6)]).values())
    for pin in pins:
        pin.__exit__(None, None, None)
    assert all(store.put(make_entry(n)) for n in range(10, 16)), "after the pins there is room again"


def test_pinned_entries_survive_pressure_and_go_afterwards(open_tier: Open) -> None:
    store = open_tier(2.5)
    assert all(store.put(make_entry(number)) for number in (1, 2))
    with store.pin([make_key(1), make_key(99)]):
        assert all(store.put(make_entry(number)) for number in (3, 4, 5))
        assert kept(store, 1, 2, 3, 4, 5) == [1, 5]
        assert store.put(make_entry(1, fill=8)), "a pinned entry can be put anew, and stays pinned"
        assert all(store.put(make_entry(number)) for number in (6, 7))
        assert holds(store.get_many([make_key(1)])[make_key(1)], 8)
    assert all(store.put(make_entry(number)) for number in (8, 9))
    assert kept(store, 1, 8, 9) == [8, 9]


def test_a_pin_counts_and_ends_with_an_exception_too(open_tier: Open) -> None:
    store = open_tier(1.5)
    store.put(make_entry(1))
    with store.pin([make_key(1)]):
        with pytest.raises(KeyError), store.pin([make_key(1), make_key(1)]):
            raise KeyError
        assert not store.put(make_entry(2)), "the outer pin still holds"
    assert store.put(make_entry(2))


def test_entries_are_refused_where_all_else_is_pinned(open_tier: Open) -> None:
    store = open_tier(2.5)
    assert all(store.put(make_entry(number)) for number in (1, 2))
    with store.pin([make_key(1), make_key(2)]):
        assert not store.put(make_entry(3))
    assert kept(store, 1, 2, 3) == [1, 2]
    assert (store.stats().refusals, store.stats().evictions) == (1, 0)


@pytest.mark.parametrize("entries", [0, 0.5, 2.5])
def test_an_entry_larger_than_the_store_is_refused_and_evicts_nothing(open_tier: Open, entries: float) -> None:
    store = open_tier(entries)
    before = [number for number in (1, 2) if store.put(make_entry(number))]
    assert len(before) == int(entries)
    assert not store.put(make_entry(3, tokens=3 * TOKENS))
    assert kept(store, 1, 2, 3) == before
    assert store.stats().evictions == 0


def test_stats_count_what_happened(open_tier: Open) -> None:
    store = open_tier(2.5)
    size = make_entry(0).nbytes
    assert store.stats().capacity_bytes >= int(2.5 * size)
    assert all(store.put(make_entry(number)) for number in (1, 2, 3))
    store.put(make_entry(4, tokens=9 * TOKENS))
    store.get_many([make_key(1), make_key(2), make_key(3), make_key(4)])
    stats = store.stats()
    assert (stats.entries, stats.puts, stats.evictions, stats.refusals) == (2, 3, 1, 1)
    assert (stats.hits, stats.misses) == (2, 2)
    assert 2 * size <= stats.held_bytes <= stats.capacity_bytes


def test_a_closed_store_misses_and_keeps_nothing(open_store: Open) -> None:
    store = open_store(4)
    store.put(make_entry(1))
    with store.pin([make_key(1)]):
        store.close()
    store.close()
    assert not store.put(make_entry(2))
    assert kept(store, 1, 2) == []
    assert (store.stats().entries, store.stats().held_bytes) == (0, 0)


def test_readers_and_writers_at_once_see_whole_entries(open_store: Open) -> None:
    store, rounds, numbers = open_store(3.5), 60, 6
    tiers = len(getattr(store, "tiers", ["one"]))
    start = threading.Barrier(6)

    def write(seed: int) -> None:
        start.wait()
        for i in range(rounds):
            store.put(make_entry((seed + i) % numbers))

    def read(seed: int) -> int:
        start.wait()
        for i in range(rounds):
            number = (seed + i) % numbers
            with store.pin([make_key(number)]):
                found = store.get_many([make_key(number)])
                for key, entry in found.items():
                    assert key == entry.header.key == make_key(number)
                    assert holds(entry, number)
                # One that waits to be written may still find no room in the tier that it waits for
                assert not found or tiers > 1 or kept(store, number) == [number], "a pinned entry went away"
                assert store.stats().held_bytes <= store.stats().capacity_bytes
        return rounds

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(write, seed) for seed in (0, 2, 4)] + [pool.submit(read, seed) for seed in (1, 3, 5)]
        for job in jobs:
            job.result()
    stats = store.stats()
    assert stats.puts + stats.refusals == 3 * rounds
    there = kept(store, *range(numbers))
    assert len(there) <= stats.entries <= 3 * tiers
    assert tiers > 1 or stats.entries == len(there)
    assert all(store.put(make_entry(n)) for n in (7, 8, 9)), "no pin is left over"


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1 bytes is negative"):
        MemoryStore(-1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", 99),
        ("key", make_key(2)),
        ("tenant", "another"),
        ("model", "another"),
        ("processor", "another"),
        ("dtype", "torch.bfloat16"),
        ("geometry", replace(GEOMETRY, layers=4)),
        ("geometry", replace(GEOMETRY, rope=replace(GEOMETRY.rope, frequencies=(1.0, 0.2)))),
        ("grid", (1, 2 * TOKENS, 2)),
        ("tokens", TOKENS + 1),
    ],
)
def test_a_header_that_differs_in_one_field_names_it(field: str, value: object) -> None:
    entry = make_entry(1)
    assert entry.mismatch(entry.header) is None
    assert entry.mismatch(replace(entry.header, **{field: value})) == field
    assert make_entry(1, keys=None, values=None).mismatch(replace(entry.header, **{field: value})) == field


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"encoder": torch.zeros(TOKENS, 8)}, "shape"),
        ({"encoder": torch.zeros(TOKENS - 1, 16)}, "shape"),
        ({"positions": torch.zeros(1, TOKENS).long()}, "shape"),
        ({"positions": torch.zeros(3, TOKENS + 1).long()}, "shape"),
        ({"keys": torch.zeros(2, TOKENS, 2, 4)}, "shape"),
        ({"keys": torch.zeros(3, TOKENS, 4, 2)}, "shape"),
        ({"values": torch.zeros(3, 2, TOKENS, 4)}, "shape"),
        ({"checkpoints": {2: torch.zeros(TOKENS, 9)}}, "shape"),
        ({"checkpoints": {0: torch.zeros(TOKENS, 8)}}, "shape"),
        ({"checkpoints": {3: torch.zeros(TOKENS, 8)}}, "shape"),
        ({"keys": torch.zeros(3, TOKENS, 2, 4, dtype=torch.bfloat16)}, "dtype"),
        ({"values": torch.zeros(3, TOKENS, 2, 4, dtype=torch.float8_e4m3fn)}, "dtype"),
        ({"encoder": torch.zeros(TOKENS, 16, dtype=torch.bfloat16)}, "dtype"),
        ({"checkpoints": {2: torch.zeros(TOKENS, 8, dtype=torch.bfloat16)}}, "dtype"),
        ({"positions": torch.zeros(3, TOKENS)}, "dtype"),
    ],
)
def test_tensors_that_do_not_fit_the_header_are_found(changes: dict[str, Any], reason: str) -> None:
    assert make_entry(1, **changes).mismatch(make_entry(1).header) == reason
