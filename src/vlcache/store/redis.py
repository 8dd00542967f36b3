"""Entries on a Redis or Valkey server, for a fleet of machines.

    vlcache:1:<scope>:{<name>}:head                 the head of the entry's file, written last
    vlcache:1:<scope>:{<name>}:<seal>:<tensor>      a tensor's bytes; the seal is the head's own digest
    vlcache:1:used, :sizes, :held                   last use and bytes of every entry, and their sum

`scope` is a digest of model, dtype, layout and tenant. The head appears when all tensors are there, and names them by
its seal, so nothing half-written is ever seen and two writers do not mix. What the server evicts or loses is a miss.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from vlcache.errors import ConfigError
from vlcache.store.arrival import Arrival, load_layers
from vlcache.store.base import StoreStats, Tally, check_capacity
from vlcache.store.breaker import Breaker
from vlcache.store.codec import Encoded, Head, decode, encode, parse_head
from vlcache.store.faults import DamagedError, Faults
from vlcache.store.gate import Gate
from vlcache.store.remote import BATCH_BYTES, PREFIX, RemoteParts, head_key, member_of, part_keys
from vlcache.store.scripts import FIND, FORGET, PLACE
from vlcache.types import Entry, EntryKey, Stored
from vlcache.worth import Worth

__all__ = ["RedisStore"]

_T = TypeVar("_T")
_WRITING_S = 600
_TOUCH_S = 60.0


class RedisStore:
    """A byte-bounded store on a server.

    Parameters
    ----------
    url : str
        `redis://`, `rediss://` (TLS) or `unix://`, with user and password where the server wants them.
    capacity_bytes : int
        Bound on the bytes of all entries on the server, whoever wrote them; the least recently used goes first. What
        the server evicts by itself is a miss.
    ttl_s : int
        An entry that is not used for so long expires; 0: never.
    stored : {"raw", "int8", "fp8"}
        How K and V are kept. Entries kept otherwise are not seen.
    worth : Worth, optional
    timeout_s : float
        For connecting, and for each read of an answer.
    retry_s : float
        After three faults in a row the server is left alone for so long: its lookups are misses.

    Raises
    ------
    ConfigError
        A URL that is none. A server that does not answer is a counted miss, and one warning in the log.
    """

    def __init__(
        self,
        url: str,
        capacity_bytes: int,
        ttl_s: int = 0,
        stored: Stored = "raw",
        worth: Worth | None = None,
        timeout_s: float = 2.0,
        retry_s: float = 30.0,
    ) -> None:
        check_capacity("redis", capacity_bytes)
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 1),
                health_check_interval=30,
            )
        except (ValueError, TypeError, redis.RedisError):
            raise ConfigError(
                "redis_url: not a Redis URL; give redis://[user:password@]host[:port][/database]"
            ) from None
        self._capacity = capacity_bytes
        self._ttl_s = ttl_s
        self._stored: Stored = stored
        self._worth = worth or Worth(always=True)
        self._breaker = Breaker(3, retry_s)
        self._lock = threading.Lock()
        self._pins: Counter[str] = Counter()
        self._untold: set[str] = set()
        self._touch_at = time.monotonic() + _TOUCH_S
        self._tally = Tally()
        self._faults = Faults("redis", "store on the server")
        self._threads = ThreadPoolExecutor(2, "vlcache-redis")
        self._closed = False
        self._gate = Gate("redis", stored, self._worth, self._faults)
        self._find, self._place, self._forget = (self._client.register_script(s) for s in (FIND, PLACE, FORGET))
        if self._worth.wanted:
            self._threads.submit(self._measure)

    def get_many(self, keys: Sequence[EntryKey]) -> Mapping[EntryKey, Entry]:
        """The entries that are there. Their K/V arrive while they are used, see `Entry.arriving`."""
        keys = list(dict.fromkeys(keys))
        heads: Sequence[bytes] = [b""] * len(keys)
        if keys and not self._closed:
            members = [self._member(key) for key in keys]
            try:
                heads = self._call(lambda: self._find(args=[PREFIX, self._ttl_s, *members]))
            except Exception as error:
                self._fault(error)
        found = [self._arrive(key, head) for key, head in zip(keys, heads, strict=True) if head]
        arrivals = [pair for pair in found if pair is not None]
        self._tally.add("hits", len(arrivals))
        self._tally.add("misses", len(keys) - len(arrivals))
        if arrivals:
            self._load(arrivals)
        return {arrival.entry.header.key: arrival.entry for arrival, _ in arrivals}

    def put(self, entry: Entry) -> bool:
        if self._gate.spares(entry.header.key):
            return True
        try:
            data = encode(entry, self._stored)
        except Exception as error:  # an entry that is none
            self._faults.meet(error)
            return self._tally.add_put(None)
        return self.put_encoded(data)

    def put_encoded(self, data: Encoded) -> bool:
        """`put` of an entry in the bytes of its file."""
        kept = None
        if not self._closed and data.head.size <= self._capacity:
            try:
                kept = self._write(data)
            except Exception as error:
                self._fault(error)
        return self._tally.add_put(kept)

    @contextmanager
    def pin(self, keys: Sequence[EntryKey]) -> Iterator[None]:
        """Spares entries from this process's evictions, and counts as a use of them, of which the server learns within
        a minute or so. Others may evict them, which costs a miss."""
        members = [self._member(key) for key in keys]
        with self._lock:
            self._pins.update(members)
            self._untold.update(members)
            tell = time.monotonic() >= self._touch_at
        if tell:
            with suppress(RuntimeError):  # closed meanwhile
                self._threads.submit(self._touch)
        try:
            yield
        finally:
            with self._lock:
                self._pins.subtract(members)
                self._pins = +self._pins

    def stats(self) -> StoreStats:
        entries = held = 0
        if not self._closed:
            try:
                self._call(lambda: self._find(args=[PREFIX, self._ttl_s]))  # forgets what has expired
                entries, held = self._call(lambda: (self._client.zcard(PREFIX + "used"), self._held()))
            except Exception as error:
                self._fault(error)
        return self._tally.stats(entries, held, self._capacity, self._faults.by_reason())

    def close(self) -> None:
        """Wait for entries that are being read, and leave the server's entries to others."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.shutdown(wait=True)
        self._client.close()

    # What is there, for people

    def names(self) -> list[str]:
        """Members of all entries, whoever wrote them, the most recently used first.

        Raises
        ------
        redis.RedisError
        """
        members: list[bytes] = self._call(lambda: self._client.zrevrange(PREFIX + "used", 0, -1))
        return [member.decode() for member in members]

    def head(self, member: str) -> Head | None:
        """What an entry says of itself; None where it is gone or cannot be read, which is counted."""
        return self._looking(member, parse_head)

    def whole(self, member: str) -> Encoded | None:
        """An entry, every byte of it checked; None where it is gone or cannot be read. A damaged one is removed."""

        def read(data: bytes) -> Encoded:
            pieces = self._ask(part_keys(parse_head(data), data))
            if None in pieces:
                raise DamagedError("part missing")
            return decode(data + b"".join(piece for piece in pieces if piece))

        return self._looking(member, read)

    def remove(self, member: str) -> bool:
        """Remove an entry; False if that failed, which is counted."""
        return self._looking(member, lambda data: self._drop(member, data)) is not None

    def clear_quarantine(self) -> None:
        """There is none: what is damaged is removed."""

    def _looking(self, member: str, look: Callable[[bytes], _T]) -> _T | None:
        data = None
        try:
            (data,) = self._ask([head_key(member)])
            return look(data) if data else None
        except Exception as error:
            self._fault(error, member, data or b"")
            return None

    def _drop(self, member: str, head: bytes) -> bool:
        """Forget an entry if its head is still this one."""
        return bool(self._call(lambda: self._forget(args=[PREFIX, self._ttl_s, member, head])))

    # Reading

    def _arrive(self, key: EntryKey, data: bytes) -> tuple[Arrival, RemoteParts] | None:
        """Check a head and read all but the K/V."""
        try:
            head = parse_head(data)
            if not self._gate.admits(key, head):
                return None
            parts = RemoteParts(self._ask, data, head)
            return Arrival(head, parts.read, self._faults.note), parts
        except Exception as error:
            self._fault(error, self._member(key), data)
            return None

    def _measure(self) -> None:
        """What the server gives per second, from the first tensors of the entry used last."""
        try:
            for member in self._call(lambda: self._client.zrevrange(PREFIX + "used", 0, 0)):
                (data,) = self._ask([head_key(member.decode())])
                if data:
                    parts, start = RemoteParts(self._ask, data, parse_head(data)), time.perf_counter()
                    self._worth.loaded("redis", parts.ahead(), time.perf_counter() - start)
        except Exception as error:
            self._fault(error)

    def _touch(self) -> None:
        """Tell the server of entries that were used from a faster tier."""
        with self._lock:
            members, self._untold = list(self._untold), set()
            self._touch_at = time.monotonic() + _TOUCH_S
        try:
            self._call(lambda: self._find(args=[PREFIX, self._ttl_s, *members]))
        except Exception as error:
            self._fault(error)

    def _ask(self, names: list[str]) -> Sequence[bytes | None]:
        found: Sequence[bytes | None] = self._call(lambda: self._client.mget(names))
        return found

    def _load(self, arrivals: Sequence[tuple[Arrival, RemoteParts]]) -> None:
        """Read K/V in the background."""
        parts = dict(arrivals)

        def fault(arrival: Arrival, error: Exception) -> str:
            return self._fault(error, parts[arrival].member, parts[arrival].head_bytes)

        def done(seconds: float) -> None:
            self._worth.loaded("redis", sum(a.head.kv_bytes for a in parts if not a.failed), seconds)

        load_layers(list(parts), fault, done, self._threads.submit)

    # Writing

    def _write(self, data: Encoded) -> bool | None:
        """Tensors first, in batches, then the head. None if there is no room, False if what is there says more.

        Until they have their head tensors expire within minutes: whatever ends a writer leaves nothing behind.
        """
        head, member = data.head, member_of(data.head.header.key, data.head.stored)
        (old,) = self._ask([head_key(member)])
        names = part_keys(head, data.head_bytes)
        again = old == data.head_bytes and self._call(lambda: self._client.exists(*names)) == len(names)
        if again or (old and not head.has_kv and self._has_kv(member, old)):
            self._call(lambda: self._find(args=[PREFIX, self._ttl_s, member]))
            return again
        pipeline, waiting = self._client.pipeline(transaction=False), 0
        for view, name in zip(data.views, names, strict=True):
            pipeline.set(name, view, ex=_WRITING_S)
            waiting += view.nbytes
            if waiting >= BATCH_BYTES:
                self._call(pipeline.execute)
                pipeline, waiting = self._client.pipeline(transaction=False), 0
        self._call(pipeline.execute)
        with self._lock:
            spared = list(self._pins)
        about: list[Any] = [self._capacity, head.size, member, data.head_bytes, int(head.has_kv)]
        outcome, evicted = self._call(lambda: self._place(args=[PREFIX, self._ttl_s, *about, *spared]))
        self._tally.add("evictions", evicted)
        if outcome < 0:
            self._faults.note("redis: lost while being written")
        return {1: True, 2: False}.get(outcome)

    def _has_kv(self, member: str, head: bytes) -> bool:
        """Whether an entry that is there has K/V; a damaged one goes."""
        try:
            return parse_head(head).has_kv
        except DamagedError as error:
            self._fault(error, member, head)
            return False

    def _held(self) -> int:
        return int(self._client.get(PREFIX + "held") or 0)

    # Faults

    def _call(self, work: Callable[[], _T]) -> _T:
        """Ask the server, unless it has been failing."""
        self._breaker.check()
        try:
            result = work()
        except redis.ResponseError:
            self._breaker.worked()  # an answer
            raise
        except redis.RedisError:
            self._breaker.failed()
            raise
        self._breaker.worked()
        return result

    def _fault(self, error: Exception, member: str = "", head: bytes = b"") -> str:
        """Count what went wrong, and remove a damaged entry. Returns the reason."""
        reason = self._faults.meet(error)
        if isinstance(error, DamagedError) and member:
            try:
                self._drop(member, head)
            except Exception as second:
                self._faults.meet(second)
        return reason

    def _member(self, key: EntryKey) -> str:
        return member_of(key, self._stored)
