"""What entries cost to keep and to bring back: each tier beside its medium's own rate, and beside computing again.

Ours and the raw medium take turns in one process; medians are compared.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vlcache.bench.machine import describe_run, rounded, seconds_of
from vlcache.bench.ttft import Settings as TtftSettings
from vlcache.bench.ttft import Workbench
from vlcache.config import Config
from vlcache.engines.transformers import VLCache
from vlcache.engines.transformers.support import describe
from vlcache.errors import ConfigError
from vlcache.policies import DEFAULT_POLICY
from vlcache.store import MemoryStore, Store
from vlcache.store.codec import encode, entry_name
from vlcache.store.disk import DiskStore
from vlcache.store.tiered import TieredStore
from vlcache.types import Entry, EntryKey, Header, Stored

__all__ = ["Settings", "run"]

_ROOM = 1 << 40


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes
    ----------
    shape : str
        Key of `vlcache.bench.checkpoints.SHAPES`.
    image_tokens : tuple of int
    runs : int
    ttft_runs : int
        0 leaves the times to first token out.
    policy, dtype : str
    disk_path : str
        Where the disk's tier is made, and removed again; empty: the system's directory for temporary files.
    redis_url : str
        Empty: no server is measured.
    store_dtype : str
    """

    shape: str = "qwen2.5-vl-3b"
    image_tokens: tuple[int, ...] = (256, 1008, 4096)
    runs: int = 7
    ttft_runs: int = 3
    policy: str = DEFAULT_POLICY
    dtype: str = "bfloat16"
    disk_path: str = ""
    redis_url: str = ""
    store_dtype: Stored = "raw"


Arms = dict[str, Callable[[], object]]


def run(settings: Settings, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure, and return what the last line prints."""
    largest = max(settings.image_tokens)
    bench = Workbench(TtftSettings(settings.shape, largest, policy=settings.policy, dtype=settings.dtype))
    result: dict[str, Any] = {**asdict(settings), **describe_run("cpu"), "rates": [], "ttft": []}
    result.pop("redis_url")  # it may hold a password
    with tempfile.TemporaryDirectory(dir=settings.disk_path or None) as folder, ExitStack() as stack:
        stores = _stores(settings, Path(folder))
        tiers = TieredStore(stores)
        stack.callback(tiers.close)
        for tokens in settings.image_tokens:
            entry = _entry(bench, tokens)
            result["rates"].append(_rates(settings, Path(folder), stores, entry, say))
            if settings.ttft_runs:
                result["ttft"].append(_ttft(settings, bench, tiers, tokens, say))
            gc.collect()
    return dict(rounded(result))


def _stores(settings: Settings, folder: Path) -> dict[str, Store]:
    stored = settings.store_dtype
    stores: dict[str, Store] = {"memory": MemoryStore(_ROOM), "disk": DiskStore(folder, _ROOM, stored)}
    if settings.redis_url:
        from vlcache.store.redis import RedisStore

        stores["redis"] = RedisStore(settings.redis_url, _ROOM, ttl_s=3600, stored=stored)
        if stores["redis"].stats().faults:
            raise ConfigError("redis_url: the server does not answer; start it, or leave it out")
    return stores


def _entry(bench: Workbench, tokens: int) -> Entry:
    """Random values in the model's shape: what is in an entry does not matter to the time that it takes."""
    geometry, dtype = describe(bench.model), bench.model.dtype
    random = torch.Generator().manual_seed(tokens)
    shape = (geometry.layers, tokens, geometry.kv_heads, geometry.head_dim)
    keys, values = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    header = Header(
        EntryKey(f"{tokens} tokens", "bench"), (1, 2, 2 * tokens), tokens, str(dtype), geometry, "bench", "bench", ""
    )
    encoder = torch.randn((tokens, geometry.encoder_width), generator=random).to(dtype)
    return Entry(header, encoder, torch.arange(tokens).repeat(geometry.rope.axes, 1), keys, values)


def _put(store: Store, entry: Entry) -> None:
    """As a new entry: the same one again may cost nothing."""
    assert store.put(replace(entry, created_s=time.time()))


def _get(store: Store, key: EntryKey) -> Entry:
    """An entry, all of it."""
    entry = store.get_many([key])[key]
    entry.kv(entry.header.geometry.layers - 1)
    return entry


def _rates(
    settings: Settings, folder: Path, stores: dict[str, Store], entry: Entry, say: Callable[[str], None]
) -> dict[str, Any]:
    """Bytes per second of each tier and of its medium."""
    key, stored = entry.header.key, settings.store_dtype
    data = b"".join(encode(entry, stored).pieces())
    for name, store in stores.items():
        if not store.put(entry):
            raise ConfigError(f"{name}: no room for an entry of {len(data) / 1e6:.0f} MB")
    name = entry_name(key, stored)
    path = folder / "entries" / name[:2] / f"{name}.safetensors"
    touched = bytearray(len(data))
    arms: Arms = {
        "memcpy": partial(_copy, touched, data),
        "memory put": lambda: stores["memory"].put(entry),
        "memory get": lambda: _get(stores["memory"], key),
        "disk raw write": partial(_write_raw, folder / "raw", data),
        "disk put": lambda: _put(stores["disk"], entry),
        "disk raw read": path.read_bytes,  # into new memory, as whoever keeps what he reads has to
        "disk raw read, memory touched": partial(_read_raw, path, touched),
        "disk get": lambda: _get(stores["disk"], key),
        "disk raw read, cache dropped": path.read_bytes,
        "disk get, cache dropped": lambda: _get(stores["disk"], key),
    }
    if "redis" in stores:
        import redis

        client = redis.Redis.from_url(settings.redis_url)
        arms |= {
            "redis raw SET": lambda: client.set("vlcache-bench", data, ex=600),
            "redis put": lambda: _put(stores["redis"], entry),
            "redis raw GET": lambda: client.get("vlcache-bench"),
            "redis get": lambda: _get(stores["redis"], key),
        }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(settings.runs + 1):
        for arm, work in arms.items():
            if arm.endswith("dropped"):
                _drop_cache(path)
            seconds = seconds_of(work)
            if turn:
                times[arm].append(seconds)
    rates = {arm: len(data) / statistics.median(values) for arm, values in times.items()}
    out: dict[str, Any] = {
        "image_tokens": entry.header.tokens,
        "entry_bytes": len(data),
        "bytes_per_s": rates,
        "disk_share_of_raw": rates["disk get"] / rates["disk raw read"],
        "disk_share_of_raw_touched": rates["disk get"] / rates["disk raw read, memory touched"],
        "disk_share_of_raw_dropped": rates["disk get, cache dropped"] / rates["disk raw read, cache dropped"],
    }
    if "redis" in stores:
        out["redis_share_of_raw"] = rates["redis get"] / rates["redis raw GET"]
        client.delete("vlcache-bench")
    say(f"{entry.header.tokens} tokens, {len(data) / 1e6:.1f} MB")
    for arm, rate in rates.items():
        say(f"  {arm:<31} {rate / 1e9:8.2f} GB/s   {len(data) / rate * 1e3:8.1f} ms")
    return out


def _copy(into: bytearray, data: bytes) -> None:
    memoryview(into)[:] = data


def _write_raw(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_raw(path: Path, into: bytearray) -> None:
    """Into memory that is there already, which is the least that reading can cost."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.preadv(handle, [into], 0)
    finally:
        os.close(handle)


def _drop_cache(path: Path) -> None:
    """Ask the system to forget a file's pages; it may not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _ttft(
    settings: Settings, bench: Workbench, tiers: TieredStore, tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds from JPEG bytes to the first token: computed again, and as a hit from each tier."""
    known = bench.picture(0, tokens)
    times: dict[str, list[float]] = {name: [] for name in ("recompute", *tiers.tiers)}
    number = tokens

    def first_token(cache: VLCache, picture: bytes, hits: int) -> None:
        bench.first_token(cache.prefill(bench.chat(picture, number % 10_000)))
        assert cache.last is not None
        assert cache.last.hits == hits

    with ExitStack() as stack:
        caches = {}
        for name, store in {"all": tiers, **tiers.tiers}.items():
            cache = VLCache(bench.model, bench.processor, settings.policy, store=store, prefix_cache=False)
            caches[name] = stack.enter_context(cache)
        caches.pop("all").prefill(bench.chat(known, 0, longer=13))
        tiers.flush()
        fresh = stack.enter_context(
            VLCache(bench.model, bench.processor, config=Config(settings.policy, memory_gb=0, prefix_cache=False))
        )
        for turn in range(settings.ttft_runs + 1):
            number += 1
            if turn:  # the first round warms up; computing again is not worth warming twice
                times["recompute"].append(seconds_of(partial(first_token, fresh, bench.picture(number, tokens), 0)))
            for _ in range(3):
                for name, cache in caches.items():
                    number += 1
                    seconds = seconds_of(partial(first_token, cache, known, 1))
                    if turn:
                        times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    say(f"  time to first token, {tokens} tokens: " + ", ".join(f"{n} {s:.3f} s" for n, s in medians.items()))
    return {
        "image_tokens": tokens,
        "seconds": medians,
        "of_memory": {n: s / medians["memory"] for n, s in medians.items() if n != "recompute"},
        "speedup": {n: medians["recompute"] / s for n, s in medians.items() if n != "recompute"},
    }
