"""The server's store: half-written entries, lost parts, damage, sick servers, several processes, tenants."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from entries import file_size, holds, kept, make_entry, make_key
from hammer import hammer
from servers import Proxy, RedisServer, free_port

from vlcache.errors import ConfigError
from vlcache.store.breaker import Breaker, OpenError
from vlcache.store.codec import encode, parse_head
from vlcache.store.redis import RedisStore
from vlcache.store.remote import PREFIX, head_key, part_keys
from vlcache.types import EntryLostError

SIZE = file_size(make_entry(0))
ROOM = 100 * SIZE

Opened = Callable[..., RedisStore]


@pytest.fixture
def opened(redis_server: RedisServer) -> Iterator[Opened]:
    """Opens the emptied server's store, any number of times."""
    redis_server.client.flushall()
    stores = []

    def open_one(capacity: int = ROOM, **options: Any) -> RedisStore:
        stores.append(RedisStore(options.pop("url", redis_server.url), capacity, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def value_of(store: RedisStore, number: int) -> float | None:
    """What an entry's tensors hold, all of them the same; None if it is not there or does not arrive."""
    entry = store.get_many([make_key(number)]).get(make_key(number))
    if entry is None:
        return None
    value = float(entry.encoder[0, 0])
    try:
        assert holds(entry, value)
    except EntryLostError:
        return None
    return value


def names(server: RedisServer, pattern: str = "*") -> list[str]:
    return sorted(name.decode() for name in server.client.keys(pattern))


def test_keys_name_format_scope_entry_and_part(opened: Opened, redis_server: RedisServer) -> None:
    store = opened()
    store.put(make_entry(1))
    entry = [name for name in names(redis_server) if "{" in name]
    assert all(name.startswith(f"{PREFIX}scope:{{") for name in entry)
    assert sum(name.endswith(":head") for name in entry) == 1
    assert len(entry) == 1 + 3 + 2 * 3
    assert all(redis_server.client.ttl(name) == -1 for name in entry)


def test_nothing_expires_while_it_is_used(opened: Opened, redis_server: RedisServer) -> None:
    store = opened(ttl_s=100)
    store.put(make_entry(1))
    client = redis_server.client
    entry = names(redis_server, f"{PREFIX}*{{*")
    assert all(90 < client.ttl(name) <= 100 for name in entry)
    for name in entry:
        client.expire(name, 50)
    assert value_of(store, 1) == 1
    store.close()
    assert all(90 < client.ttl(name) <= 100 for name in entry)


def test_what_the_server_forgot_is_a_miss_and_no_longer_counted(opened: Opened, redis_server: RedisServer) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    redis_server.client.delete(*names(redis_server, f"{PREFIX}*head")[:1])
    left = kept(store, 1, 2)
    assert len(left) == 1
    assert (store.stats().entries, store.stats().held_bytes) == (1, SIZE)
    assert not store.stats().faults


@pytest.mark.parametrize("part", ["encoder", "positions", "layer.000.key", "layer.002.value"])
@pytest.mark.parametrize("how", ["lost", "flipped", "short"])
def test_a_part_that_is_not_as_written_is_a_counted_miss(
    part: str, how: str, opened: Opened, redis_server: RedisServer
) -> None:
    store, client = opened(), redis_server.client
    assert all(store.put(make_entry(n)) for n in (1, 2))
    (name,) = [n for n in names(redis_server, f"{PREFIX}*{part}") if client.get(n) == _bytes(1, part)]
    data = bytearray(client.get(name))
    if how == "lost":
        client.delete(name)
    else:
        data[7] ^= 16
        client.set(name, bytes(data) if how == "flipped" else bytes(data[:-1]))
    assert value_of(store, 1) is None
    assert [reason.split(":")[0] for reason in store.stats().faults] == ["damaged"]
    assert value_of(store, 1) is None
    assert sum(store.stats().faults.values()) == 1, "it is gone, not met again"
    assert value_of(store, 2) == 2
    assert store.stats().entries == 1
    assert store.put(make_entry(1, fill=5))
    assert value_of(store, 1) == 5


def _bytes(number: int, part: str) -> bytes:
    data = encode(make_entry(number))
    return dict(zip(data.head.parts, map(bytes, data.views), strict=True))[part]


def test_a_damaged_head_is_a_counted_miss(opened: Opened, redis_server: RedisServer) -> None:
    store = opened()
    store.put(make_entry(1))
    (name,) = names(redis_server, f"{PREFIX}*head")
    head = bytearray(redis_server.client.get(name))
    head[100] ^= 1
    redis_server.client.set(name, bytes(head))
    assert value_of(store, 1) is None
    assert store.stats().faults == {"damaged: head": 1}
    assert store.stats().entries == 0
    assert store.put(make_entry(1))
    assert value_of(store, 1) == 1


@pytest.mark.parametrize("head", [b"", b"short", b"x" * 100, b"\x04" + bytes(7) + b"[1] " + bytes(32)])
def test_a_head_that_is_none_harms_nobody_else(head: bytes, opened: Opened, redis_server: RedisServer) -> None:
    store = opened()
    assert all(store.put(make_entry(n)) for n in (1, 2))
    redis_server.client.set(head_key(store._member(make_key(1))), head)
    found = store.get_many([make_key(1), make_key(2)])
    assert found.keys() == {make_key(2)}
    assert store.put(make_entry(1, fill=3))
    assert value_of(store, 1) == 3


def test_an_entry_that_lost_a_tensor_is_written_again(opened: Opened, redis_server: RedisServer) -> None:
    store = opened()
    assert store.put(make_entry(1))
    redis_server.client.delete(*names(redis_server, f"{PREFIX}*layer.001.key"))
    assert store.put(make_entry(1))
    assert value_of(store, 1) == 1


def test_an_entry_put_anew_leaves_nothing_of_the_old_one(opened: Opened, redis_server: RedisServer) -> None:
    store = opened()
    store.put(make_entry(1))
    before = len(names(redis_server))
    for fill in (7, 8, 8):
        assert store.put(make_entry(1, fill=fill))
        assert value_of(store, 1) == fill
        assert len(names(redis_server)) == before


def test_an_entry_put_again_as_it_is_stays_whole_whatever_happens(opened: Opened, redis_server: RedisServer) -> None:
    store, client = opened(), redis_server.client
    assert store.put(make_entry(1))
    client.config_set("maxmemory", 1)
    try:
        store.put(make_entry(1))
    finally:
        client.config_set("maxmemory", 0)
    assert value_of(store, 1) == 1
    assert store.put(make_entry(1))
    assert all(client.ttl(name) == -1 for name in names(redis_server, f"{PREFIX}*"))


def test_an_entry_without_kv_does_not_take_the_place_of_one_with(opened: Opened, redis_server: RedisServer) -> None:
    store = opened()
    bare = replace(make_entry(1, fill=5), keys=None, values=None)
    assert store.put(bare)
    assert store.put(make_entry(1))
    before = names(redis_server)
    assert store.put(bare)
    # Also where it was written meanwhile
    data = encode(bare)
    store._client.mset(
        {key: bytes(view) for key, view in zip(part_keys(data.head, data.head_bytes), data.views, strict=True)}
    )
    member = store._member(make_key(1))
    assert store._place(args=[PREFIX, 0, ROOM, data.head.size, member, data.head_bytes, 0]) == [2, 0]
    assert names(redis_server) == before
    assert value_of(store, 1) == 1


def test_a_server_that_lost_its_lists_goes_on(opened: Opened, redis_server: RedisServer) -> None:
    store, client = opened(int(3.5 * SIZE)), redis_server.client
    for lost in ("used", "held", "sizes"):
        client.flushall()
        assert all(store.put(make_entry(n)) for n in range(3))
        client.delete(PREFIX + lost)
        if lost == "sizes":
            assert all(value_of(store, n) == n for n in range(3)), "looking an entry up lists it again"
            client.set(PREFIX + "held", sum(map(int, client.hvals(PREFIX + "sizes"))))
        assert all(store.put(make_entry(n)) for n in range(3, 6))
        assert store.put(make_entry(6))
        if lost != "held":
            assert store.stats().held_bytes <= 3.5 * SIZE


def test_what_expired_is_no_longer_counted(opened: Opened, redis_server: RedisServer) -> None:
    store = opened(ttl_s=1)
    assert store.put(make_entry(1))
    time.sleep(1.2)
    assert (store.stats().entries, store.stats().held_bytes) == (0, 0)
    assert names(redis_server, f"{PREFIX}*{{*") == []


def test_uses_of_a_faster_tier_reach_the_server(opened: Opened, redis_server: RedisServer) -> None:
    store, client = opened(ttl_s=100), redis_server.client
    store.put(make_entry(1))
    for name in names(redis_server, f"{PREFIX}*{{*"):
        client.expire(name, 50)
    store._touch_at = 0.0
    with store.pin([make_key(1)]):
        pass
    store.close()
    assert all(client.ttl(name) > 90 for name in names(redis_server, f"{PREFIX}*{{*"))


def test_eviction_leaves_nothing_behind(opened: Opened, redis_server: RedisServer) -> None:
    store = opened(int(2.5 * SIZE))
    assert all(store.put(make_entry(n)) for n in range(2))
    before = len(names(redis_server))
    assert all(store.put(make_entry(n)) for n in range(2, 9))
    assert len(names(redis_server)) == before
    with store.pin([make_key(7), make_key(8)]):
        assert not store.put(make_entry(9))
    assert len(names(redis_server)) == before, "what found no room is gone again"


def test_two_stores_share_one_server(opened: Opened) -> None:
    one, two = opened(), opened()
    assert one.put(make_entry(1))
    assert value_of(two, 1) == 1
    assert opened(stored="int8").stats().entries == 1
    assert kept(opened(stored="int8"), 1) == [], "kept otherwise"


# Faults


@pytest.fixture
def proxy(redis_server: RedisServer, tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(redis_server, tmp_path)
    yield proxy
    proxy.close()


def test_a_connection_that_breaks_anywhere_is_a_counted_miss(opened: Opened, proxy: Proxy) -> None:
    """Answers cut after so many bytes: in the reply to the lookup, in a tensor, between layers."""
    opened().put(make_entry(1))
    seen = set()
    for budget in [*range(0, 200, 20), *range(200, SIZE + 6000, 1111)]:
        store = opened(url=proxy.url, timeout_s=1.0)
        proxy.budget = budget
        value = value_of(store, 1)
        put = store.put(make_entry(2, fill=budget)) if budget < 200 else None
        proxy.budget = None
        assert value in (1, None)
        faults = store.stats().faults
        assert faults or value == 1
        assert put is not True or not faults or value == 1
        seen.add(value)
        store.close()
        assert opened().get_many([make_key(1)]), "a broken connection says nothing about the entry"
    assert seen == {1, None}
    whole = value_of(opened(), 2)
    assert whole is None or whole < 200


def test_a_server_that_stalls_costs_the_time_out_and_is_then_left_alone(
    opened: Opened, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    opened().put(make_entry(1))
    store = opened(url=proxy.url, timeout_s=0.05, retry_s=0.3)
    assert value_of(store, 1) == 1
    proxy.stall = True
    with caplog.at_level(logging.WARNING, "vlcache"):
        assert [value_of(store, 1) for _ in range(3)] == [None] * 3
        start = time.monotonic()
        assert [value_of(store, 1) for _ in range(50)] == [None] * 50
        assert time.monotonic() - start < 0.3, "asked all the same"
    assert store.stats().faults["redis: TimeoutError"] == 3
    assert store.stats().faults["redis: left alone"] >= 50
    assert len(caplog.records) == 2
    proxy.stall = False
    time.sleep(0.35)
    assert value_of(store, 1) == 1


def test_a_server_that_is_not_there_is_a_miss_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vlcache"):
        store = RedisStore(f"unix://user:secret@{tmp_path}/nobody.sock", ROOM)
        assert kept(store, 1) == []
        assert not store.put(make_entry(1))
        assert kept(store, 1) == []
        store.close()
    assert "secret" not in caplog.text
    assert caplog.text.count("ConnectionError") == 1


def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    store = RedisStore(server.url, ROOM, timeout_s=0.5, retry_s=0.05)
    assert store.put(make_entry(1))
    server.stop()
    assert value_of(store, 1) is None
    assert not store.put(make_entry(2))
    server.start()
    time.sleep(0.1)
    assert store.put(make_entry(2))
    assert (value_of(store, 1), value_of(store, 2)) == (None, 2)
    store.close()
    server.stop()


def test_a_password_and_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, port = trustme.CA(), free_port()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    tls = ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(tmp_path / "ca.pem")]
    tls += [f for name in ("cert", "key") for f in (f"--tls-{name}-file", str(tmp_path / "server.pem"))]
    server = RedisServer(tmp_path, "--requirepass", "hush", *tls)
    address = f"127.0.0.1:{port}/0?ssl_ca_certs={tmp_path}/ca.pem"
    try:
        with caplog.at_level(logging.WARNING, "vlcache"):
            store = RedisStore(f"rediss://:hush@{address}", ROOM)
            assert store.put(make_entry(1))
            assert value_of(store, 1) == 1
            assert not store.stats().faults
            store.close()
            for url, fault in {
                f"rediss://:wrong@{address}": "redis: AuthenticationError",
                f"rediss://:hush@127.0.0.1:{port}/0": "redis: ConnectionError",  # nobody vouches for the certificate
                f"redis://:hush@127.0.0.1:{port}/0": "redis: ConnectionError",
            }.items():
                store = RedisStore(url, ROOM, timeout_s=1.0)
                assert value_of(store, 1) is None
                assert list(store.stats().faults) == [fault]
                store.close()
        assert "hush" not in caplog.text
    finally:
        server.stop()


def test_a_server_without_memory_refuses(opened: Opened, redis_server: RedisServer) -> None:
    store, client = opened(), redis_server.client
    assert store.put(make_entry(1))
    client.config_set("maxmemory", 1)
    try:
        assert not store.put(make_entry(2))
        assert list(store.stats().faults) == ["redis: OutOfMemoryError"]
        assert value_of(store, 1) == 1, "it can still be read"
    finally:
        client.config_set("maxmemory", 0)
    assert (value_of(store, 1), value_of(store, 2)) == (1, None)
    assert store.put(make_entry(2))


def test_every_command_may_fail(opened: Opened, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put new, put anew, get: with the n-th command failing, by an error and by a time-out, for every n there is."""
    send = redis.connection.AbstractConnection.send_packed_command
    for error in (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
        for at in range(1, 100):
            redis_server.client.flushall()
            store = opened()
            assert store.put(make_entry(1))
            calls = [0]

            def failing(
                self: Any, *args: Any, _at: int = at, _calls: Any = calls, _error: Any = error, **kw: Any
            ) -> Any:
                _calls[0] += 1
                if _calls[0] in (_at, _at + 1):  # the client itself tries once more
                    raise _error("injected")
                return send(self, *args, **kw)

            with monkeypatch.context() as patch:
                patch.setattr(redis.connection.AbstractConnection, "send_packed_command", failing)
                put = store.put(make_entry(2)), store.put(make_entry(1, fill=7))
                got = value_of(store, 1), value_of(store, 2)
                store._threads.shutdown()
            faults = store.stats().faults
            assert got[0] in ({7, None} if put[1] else {1, 7, None})
            assert got[1] in ({2, None} if put[0] else {None})
            if calls[0] >= at:
                assert faults, "not counted"
            else:
                assert (put, got, faults) == ((True, True), (7, 2), {})
            after = opened()
            assert value_of(after, 1) in (1, 7, None)
            assert value_of(after, 2) in (2, None)
            assert after.put(make_entry(3))
            assert value_of(after, 3) == 3
            if calls[0] < at:
                break
        else:
            raise AssertionError("commands without end")


# Several processes


def test_four_processes_on_one_server(opened: Opened, redis_server: RedisServer) -> None:
    opened()
    # A part may go while another process evicts or replaces its entry; wrong bytes may not come
    hammer(lambda: RedisStore(redis_server.url, int(8.5 * SIZE)), value_of, 3, {"damaged: part missing"})
    client = redis_server.client
    sizes = [int(size) for size in client.hvals(f"{PREFIX}sizes")]
    assert sum(sizes) == int(client.get(f"{PREFIX}held")) <= 8.5 * SIZE
    assert len(sizes) == client.zcard(f"{PREFIX}used") == len(names(redis_server, f"{PREFIX}*head"))


def test_a_writer_killed_at_any_moment_leaves_whole_entries(opened: Opened, redis_server: RedisServer) -> None:
    import os
    import signal

    rng = random.Random(0)
    store = opened()
    for seed in range(40):
        child = os.fork()
        if child == 0:
            try:
                mine = RedisStore(redis_server.url, ROOM)
                for turn in range(1, 1_000_000):
                    mine.put(make_entry(turn % 6, fill=seed * 1000 + turn))
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.01, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for number in range(6):
            value_of(store, number)  # holds one value throughout, or is not there
    assert not store.stats().faults
    assert store.stats().entries == 6
    client = redis_server.client
    heads = {name.removesuffix(":head"): client.get(name) for name in names(redis_server, f"{PREFIX}*:head")}
    owned = {key for head in heads.values() for key in part_keys(parse_head(head), head)}
    orphans = {name for name in names(redis_server, f"{PREFIX}*{{*") if not name.endswith(":head")} - owned
    assert all(0 < client.ttl(name) <= 600 for name in orphans), "what killed writers left expires"
    assert all(client.ttl(name) == -1 for name in owned)


def test_a_tenants_entries_are_invisible_to_another(opened: Opened) -> None:
    store = opened()
    entry = make_entry(1)
    assert store.put(entry)
    other = replace(make_key(1), scope="another tenant's scope")
    assert not store.get_many([other])


@pytest.mark.parametrize("url", ["", "localhost", "http://localhost", "redis://h:port"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url: not a Redis URL; give redis://"):
        RedisStore(url, ROOM)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1 bytes is negative"):
        RedisStore("redis://localhost", -1)


def test_the_breaker_lets_one_through_after_a_while() -> None:
    now = [0.0]
    breaker = Breaker(2, 10.0, lambda: now[0])
    breaker.failed()
    breaker.check()
    breaker.failed()
    with pytest.raises(OpenError):
        breaker.check()
    now[0] = 10.5
    breaker.check()
    with pytest.raises(OpenError):
        breaker.check()
    breaker.worked()
    breaker.check()
    breaker.check()
