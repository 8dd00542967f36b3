"""Pictures that another cache has seen: answers are those of full recompute, whatever befalls the tiers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from conftest import Lab, make_picture
from servers import Proxy, RedisServer

from vlcache import VLCache
from vlcache.bench.checkpoints import TINY, save_checkpoint
from vlcache.errors import ConfigError
from vlcache.store.remote import PREFIX

Close = Callable[[torch.Tensor, torch.Tensor, float], None]


@pytest.fixture(params=["disk", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> dict[str, Any]:
    """Options of a cache whose memory is off and whose entries therefore live in one other tier."""
    redis_server.client.flushall()
    where = {"disk_path": str(tmp_path / "store")} if request.param == "disk" else {"redis_url": redis_server.url}
    return {"memory_gb": 0, "always_reuse": True, **where}


def plain(lab: Lab, chat: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = lab.model(**lab.inputs(chat)).logits[0, -1]
    return logits


def ask(cache: VLCache, chat: Any) -> torch.Tensor:
    """Logits of the first answer token."""
    return cache.score(chat, [1])[0]


def test_a_second_cache_hits_what_the_first_one_saw(lab: Lab, tier: dict[str, Any], close: Close) -> None:
    chat = lab.chat(make_picture(1), make_picture(2), "what is it?")
    with lab.cache("none", **tier) as first:
        close(ask(first, chat), plain(lab, chat), 1e-4)
        assert first.last is not None
        assert first.last.hits == 0
    with lab.cache("none", **tier) as second:
        close(ask(second, chat), plain(lab, chat), 1e-4)
        assert second.last is not None
        assert [span.outcome for span in second.last.spans] == ["reused", "reused"]
        assert (second.counters.encoded, second.last.computed_share) == (0, 0.0)
        # And elsewhere, where the keys have to move
        moved = lab.chat(make_picture(2), "and this?", system="Another system prompt, which is longer.")
        reference = lab.cache("none")
        ask(reference, chat)
        close(ask(second, moved), ask(reference, moved), 1e-5)


def test_eight_bits_cost_little_on_noise(one_lab: Lab, tmp_path: Path) -> None:
    """What they cost in answers is for the accuracy benchmark to say."""
    chat, results = one_lab.chat(make_picture(1), "what?"), {}
    for stored in ("raw", "int8", "fp8"):
        options = {"memory_gb": 0, "disk_path": str(tmp_path), "always_reuse": True, "store_dtype": stored}
        for _ in range(2):
            with one_lab.cache("none", **options) as cache:
                results[stored] = ask(cache, chat)
        assert cache.last is not None
        assert cache.last.hits == 1
    for stored, most in (("int8", 0.02), ("fp8", 0.08)):
        error = float((results[stored] - results["raw"]).norm() / results["raw"].norm())
        assert 0 < error < most, (stored, error)


def test_a_tenant_does_not_see_anothers(
    one_lab: Lab, tier: dict[str, Any], tmp_path: Path, redis_server: RedisServer
) -> None:
    chat = one_lab.chat(make_picture(1), "what?")
    for salt in ("pepper one", "pepper two", "pepper one"):
        with one_lab.cache("none", cache_salt=salt, **tier) as cache:
            ask(cache, chat)
            assert cache.last is not None
            hits = cache.last.hits
    assert hits == 1
    with one_lab.cache("none", cache_salt="three", **tier) as cache:
        ask(cache, chat)
        assert cache.last is not None
        assert cache.last.hits == 0
        assert cache.store.stats().misses == 1
    written = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    names = redis_server.client.keys("*")
    written += [
        *names,
        *(redis_server.client.get(name) for name in names if redis_server.client.type(name) == b"string"),
    ]
    assert any(b"vlcache-entry" in data for data in written)
    assert not any(b"pepper" in data for data in written), "a salt is written down"


def _last_layer(tier: dict[str, Any], server: RedisServer, change: Callable[[bytearray], Any]) -> None:
    """Change the last tensor of the only entry."""
    if "disk_path" in tier:
        (path,) = Path(tier["disk_path"]).rglob("entries/*/*.safetensors")
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
    else:
        name = max(n for n in server.client.keys(f"{PREFIX}*") if b"value" in n)
        data = bytearray(server.client.get(name))
        change(data)
        server.client.set(name, bytes(data))


def test_damage_that_shows_in_the_last_layer_costs_a_miss_not_the_answer(
    one_lab: Lab, tier: dict[str, Any], redis_server: RedisServer, close: Close
) -> None:
    chat = one_lab.chat(make_picture(1), "what is it?")
    with one_lab.cache("none", **tier) as cache:
        ask(cache, chat)

    def flip(data: bytearray) -> None:
        data[-5] ^= 64

    _last_layer(tier, redis_server, flip)
    with one_lab.cache("none", **tier) as cache:
        close(ask(cache, chat), plain(one_lab, chat), 1e-4)
        assert cache.last is not None
        assert (cache.last.hits, cache.counters.encoded) == (0, 1)
        assert cache.counters.rejects == {"damaged: checksum of layer": 1}
        assert cache.last.seconds["lost"] > 0
        assert cache.store.stats().faults == {"damaged: checksum of layer": 1}
    with one_lab.cache("none", **tier) as cache:
        close(ask(cache, chat), plain(one_lab, chat), 1e-4)
        assert cache.last is not None
        assert cache.last.hits == 1, "it was captured again"
        out = one_lab.model.generate(**cache.prefill(chat), max_new_tokens=3)
        expected = one_lab.model.generate(**one_lab.inputs(chat), max_new_tokens=3)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["open", "write", "fsync", "replace", "preadv", "pread"])
def test_whatever_call_fails_the_answer_is_that_of_full_recompute(
    name: str, one_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close: Close
) -> None:
    chat, real = one_lab.chat(make_picture(1), make_picture(2), "what is it?"), getattr(os, name)
    expected = plain(one_lab, chat)
    for every in (1, 2, 3, 5):
        calls, failed = [0], [0]

        def call(*args: Any, _every: int = every, _calls: Any = calls, _failed: Any = failed, **options: Any) -> Any:
            if str(tmp_path) not in str(args[0]) and not isinstance(args[0], int):
                return real(*args, **options)
            _calls[0] += 1
            if _calls[0] % _every == 0:
                _failed[0] += 1
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **options)

        options = {"memory_gb": 0, "disk_path": str(tmp_path / f"{every}"), "always_reuse": True}
        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            for _ in range(3):
                with one_lab.cache("none", **options) as cache:
                    close(ask(cache, chat), expected, 1e-4)
                    store = cache.store
                if failed[0]:
                    assert sum(store.stats().faults.values()) >= 1
                calls[0] = failed[0] = 0


class Commands:
    """Lets every n-th command to the server fail."""

    def __init__(self, patch: pytest.MonkeyPatch, every: int, error: type[Exception]) -> None:
        self.failed = self.sent = 0
        send = redis.connection.AbstractConnection.send_packed_command

        def failing(connection: Any, *args: Any, **options: Any) -> Any:
            self.sent += 1
            if self.sent % every == 0:
                self.failed += 1
                raise error("injected")
            return send(connection, *args, **options)

        patch.setattr(redis.connection.AbstractConnection, "send_packed_command", failing)


@pytest.mark.parametrize("error", [redis.ConnectionError, redis.TimeoutError, redis.ResponseError])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 8])
def test_whatever_command_fails_the_answer_is_that_of_full_recompute(
    every: int, error: type[Exception], one_lab: Lab, redis_server: RedisServer, close: Close
) -> None:
    redis_server.client.flushall()
    chat = one_lab.chat(make_picture(1), make_picture(2), "what is it?")
    expected = plain(one_lab, chat)
    options = {"memory_gb": 0, "redis_url": redis_server.url, "always_reuse": True}
    with pytest.MonkeyPatch.context() as patch:
        commands = Commands(patch, every, error)
        for _ in range(4):
            commands.failed = 0
            with one_lab.cache("none", **options) as cache:
                close(ask(cache, chat), expected, 1e-4)
                store = cache.store
            # The client itself tries a lost connection once more, and may well succeed
            if commands.failed and (every == 1 or error is redis.ResponseError):
                assert sum(store.stats().faults.values()) >= 1


def test_answers_that_are_cut_short_anywhere_cost_a_miss_not_the_answer(
    one_lab: Lab, redis_server: RedisServer, tmp_path: Path, close: Close
) -> None:
    redis_server.client.flushall()
    chat, proxy = one_lab.chat(make_picture(1), "what is it?"), Proxy(redis_server, tmp_path)
    expected = plain(one_lab, chat)
    with one_lab.cache("none", memory_gb=0, redis_url=redis_server.url) as cache:
        ask(cache, chat)
        assert cache.store.flush(10)
        size = cache.store.stats().held_bytes
    hits = []
    for budget in range(40, size + 6000, size // 12):
        with one_lab.cache("none", memory_gb=0, redis_url=proxy.url, always_reuse=True) as cache:
            proxy.budget = budget
            close(ask(cache, chat), expected, 1e-4)
            assert cache.last is not None
            hits.append(cache.last.hits)
            proxy.budget = None
        assert hits[-1] or cache.store.stats().faults
    proxy.close()
    assert set(hits) == {0, 1}


def test_a_miss_does_the_same_work_whether_another_tenant_has_the_picture_or_not(
    one_lab: Lab, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Nothing for a clock to see: the same calls and commands, as many bytes read."""
    redis_server.client.flushall()
    where = {"disk_path": str(tmp_path / "store"), "redis_url": redis_server.url}
    options = {"memory_gb": 0, "always_reuse": True, **where}
    with one_lab.cache("none", cache_salt="owner", **options) as cache:
        ask(cache, one_lab.chat(make_picture(1), "what?"))
    seen = []
    for seed in (1, 2):  # which the owner has, and has not
        work: list[str] = []
        with one_lab.cache("none", cache_salt="other", **options) as cache, pytest.MonkeyPatch.context() as patch:
            cache.prefill(one_lab.chat(make_picture(10 + seed), "what?"))  # connects
            assert cache.store.flush(10)
            for name in ("open", "pread", "preadv"):
                patch.setattr(os, name, _noting(work, name, getattr(os, name)))
            read = redis.connection.AbstractConnection.read_response
            patch.setattr(redis.connection.AbstractConnection, "read_response", _noting_size(work, read))
            cache.prefill(one_lab.chat(make_picture(seed), "what?"))
            found = list(work)
            assert cache.last is not None
            assert cache.last.hits == 0
        seen.append(found)
    assert seen[0] == seen[1]
    assert seen[0]


def _noting(work: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        mine, outcome = threading.current_thread() is threading.main_thread(), "raised"
        try:
            answer = real(*args, **options)
            outcome = str(answer if name == "preadv" else len(answer) if name == "pread" else "opened")
            return answer
        finally:
            if mine:
                work.append(f"{name} {outcome}")

    return call


def _noting_size(work: list[str], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(connection: Any, *args: Any, **options: Any) -> Any:
        answer = real(connection, *args, **options)
        if threading.current_thread() is threading.main_thread():
            work.append(f"answer {answer!r:.40}")
        return answer

    return call


def test_ten_at_once_compute_a_picture_once(one_lab: Lab, tier: dict[str, Any], close: Close) -> None:
    chat = one_lab.chat(make_picture(1), "what is it?")
    with one_lab.cache("none", **(tier | {"memory_gb": 1.0})) as cache, ThreadPoolExecutor(10) as pool:
        for logits in pool.map(lambda _: ask(cache, chat), range(10)):
            close(logits, plain(one_lab, chat), 1e-4)
        assert (cache.counters.encoded, cache.counters.reused) == (1, 9)


def test_a_bound_below_one_entry_is_refused_with_the_least_that_works(one_lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk_gb: 1e-06 GB is less than one entry .* give at least ([\d.e-]+)") as e:
        one_lab.cache("none", disk_path=str(tmp_path), disk_gb=1e-6)
    least = float(str(e.value).split("at least ")[1].split(",")[0])
    one_lab.cache("none", disk_path=str(tmp_path), disk_gb=least).close()
    with pytest.raises(ConfigError, match="redis_gb"):
        one_lab.cache("none", redis_url="redis://localhost", redis_gb=1e-6)
    one_lab.cache("none", disk_gb=1e-6).close()


def test_another_process_hits_with_its_first_request(tier: dict[str, Any], tmp_path: Path) -> None:
    """Entries are found again only if model, processor and picture have the same digests everywhere: here a copy of the
    model in another directory."""
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[2]);"
        "from conftest import make_picture; from vlcache import VLCache;"
        "from vlcache.engines.transformers import load_checkpoint;"
        "model, processor = load_checkpoint(sys.argv[1]);"
        "cache = VLCache(model, processor, 'none', prefix_cache=False, **json.loads(sys.argv[3]));"
        "chat = [{'role': 'user', 'content': [{'type': 'image', 'image': make_picture(1)}]}];"
        "cache.score(chat, [1]); print(cache.last.hits); cache.close()"
    )
    hits = []
    for place in ("here", "there"):
        folder = save_checkpoint(tmp_path / place, TINY["qwen2_5_vl"])
        arguments = [sys.executable, "-c", program, str(folder), str(Path(__file__).parent), json.dumps(tier)]
        hits.append(int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout))
    assert hits == [0, 1]
