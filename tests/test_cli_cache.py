"""`vlcache cache`, and answers that outlive the process that computed them."""

from __future__ import annotations

import io
import json
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import make_picture
from entries import file_size, holds, make_entry, make_key
from servers import RedisServer

from vlcache.bench.checkpoints import TINY, save_checkpoint
from vlcache.cli import cli, main
from vlcache.store.codec import encode, entry_name
from vlcache.store.disk import DiskStore
from vlcache.store.redis import RedisStore

ROOM = 10**9

Vlcache = Callable[..., tuple[int, Any]]


@pytest.fixture(params=["disk", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> list[str]:
    """Flags that name a tier with entries 1, 2 and 3 in it."""
    redis_server.client.flushall()
    folder = tmp_path / "store"
    store = DiskStore(folder, ROOM) if request.param == "disk" else RedisStore(redis_server.url, ROOM)
    assert all(store.put(make_entry(n)) for n in (1, 2, 3))
    store.close()
    return ["--disk-path", str(folder)] if request.param == "disk" else ["--redis-url", redis_server.url]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["cache", *arguments], catch_exceptions=True)
    return result.exit_code, result.stdout


def run_json(*arguments: str) -> tuple[int, Any]:
    status, out = run(*arguments, "--json")
    return status, json.loads(out)


def damage(where: list[str], number: int, server: RedisServer) -> None:
    name = entry_name(make_key(number), "raw")
    if where[0] == "--disk-path":
        path = Path(where[1], "entries", name[:2], f"{name}.safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        (key,) = [k for k in server.client.keys("*layer.002.value") if name.encode() in k]
        server.client.set(key, b"damaged")


def test_ls_and_stats(where: list[str]) -> None:
    status, found = run_json("ls", *where)
    assert status == 0
    assert {item["content"] for item in found} == {"picture 1", "picture 2", "picture 3"}
    assert all(item["bytes"] == file_size(make_entry(1)) and item["has_kv"] for item in found)
    status, text = run("ls", *where)
    assert status == 0
    assert text.count("picture") == 1 + 3
    tier = "disk" if where[0] == "--disk-path" else "redis"
    status, found = run_json("stats", *where)
    assert found[tier]["entries"] == 3
    assert found[tier]["held_bytes"] == 3 * file_size(make_entry(1))
    assert f"{tier}: 3 entries" in run("stats", *where)[1]


def test_verify_finds_damage_and_takes_it_away(where: list[str], redis_server: RedisServer) -> None:
    tier = "disk" if where[0] == "--disk-path" else "redis"
    assert run_json("verify", *where) == (0, {tier: {"sound": 3, "faults": {}}})
    damage(where, 2, redis_server)
    status, found = run_json("verify", *where)
    assert status == 1
    assert found[tier]["sound"] == 2
    assert [reason.split(":")[0] for reason in found[tier]["faults"]] == ["damaged"]
    assert run_json("verify", *where)[0] == 0
    assert {item["content"] for item in run_json("ls", *where)[1]} == {"picture 1", "picture 3"}


def test_looking_does_not_evict(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers that use a tier have bounds of their own."""
    monkeypatch.setenv("VLCACHE_DISK_GB", "1e-05")
    monkeypatch.setenv("VLCACHE_REDIS_GB", "1e-05")
    for command in (["ls"], ["stats"], ["verify"]):
        assert run(*command, *where)[0] == 0
    assert len(run_json("ls", *where)[1]) == 3


def test_only_the_tier_that_is_named_is_cleared(
    where: list[str], tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = str(tmp_path / "other")
    store = DiskStore(other, ROOM)
    store.put(make_entry(5))
    store.close()
    monkeypatch.setenv("VLCACHE_DISK_PATH", where[1] if where[0] == "--disk-path" else str(tmp_path / "none"))
    monkeypatch.setenv("VLCACHE_REDIS_URL", redis_server.url)
    assert run_json("clear", "--disk-path", other, "--yes") == (0, {"removed": 1})
    assert len(run_json("ls", *where)[1]) == 3


def test_clear_takes_the_quarantine_too(tmp_path: Path, redis_server: RedisServer) -> None:
    folder = tmp_path / "store"
    store = DiskStore(folder, ROOM)
    store.put(make_entry(1))
    store.close()
    where = ["--disk-path", str(folder)]
    damage(where, 1, redis_server)
    assert run("verify", *where)[0] == 1
    assert list((folder / "quarantine").iterdir())
    assert run("clear", *where, "--yes")[0] == 0
    assert not list((folder / "quarantine").iterdir())


def test_clear_asks_and_can_choose(where: list[str]) -> None:
    status, _ = run("clear", *where)
    assert status == 1, "nobody to ask"
    assert run_json("clear", *where, "--yes", "--model", "another") == (0, {"removed": 0})
    assert run_json("clear", *where, "--yes", "--tenant", "ten") == (0, {"removed": 3})
    assert run_json("ls", *where) == (0, [])
    assert run("clear", *where) == (0, "0 entries removed\n")


def test_what_was_exported_can_be_imported(where: list[str], tmp_path: Path, redis_server: RedisServer) -> None:
    archive = tmp_path / "entries.tar"
    damage(where, 2, redis_server)
    status, done = run_json("export", str(archive), *where)
    assert (status, done["entries"]) == (1, 2), "one was damaged"
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.glob("*.part")] == []
    there = ["--disk-path", str(tmp_path / "other")]
    assert run_json("import", str(archive), *there) == (0, {"kept": 2})
    store = DiskStore(tmp_path / "other", ROOM)
    for number in (1, 3):
        assert holds(store.get_many([make_key(number)])[make_key(number)], number)
    store.close()


def test_an_archive_is_not_trusted(where: list[str], tmp_path: Path) -> None:
    archive = tmp_path / "bad.tar"
    good = b"".join(bytes(p) for p in encode(make_entry(7)).pieces())
    with tarfile.open(archive, "w") as tar:
        for name, data in {
            str(tmp_path / "escape.safetensors"): good,
            "../escape.safetensors": good,
            "flipped": good[:-1] + bytes([good[-1] ^ 1]),
            "text": b"no entry",
        }.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert run_json("import", str(archive), *where) == (1, {"kept": 2, "damaged": 2, "foreign": 1})
    assert {item["content"] for item in run_json("ls", *where)[1]} == {f"picture {n}" for n in (1, 2, 3, 7)}
    assert not list(tmp_path.rglob("escape*"))


@pytest.mark.parametrize("content", [b"", b"not an archive at all" * 100])
def test_no_archive_is_a_clear_error(
    content: bytes, where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(SystemExit) as status:
        main(["cache", "import", str(tmp_path / "x.tar"), *where])
    assert status.value.code == 1
    assert "not a tar archive" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "verify", "clear"):
        with pytest.raises(SystemExit) as status:
            main(["cache", command, "--redis-url", f"unix://{tmp_path}/nobody.sock"])
        assert status.value.code == 1
        assert "redis: cannot be listed (ConnectionError)" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ls"], ["clear", "--yes"], ["export", str(tmp_path / "x.tar")]):
        with pytest.raises(SystemExit) as status:
            main(["cache", *command, "--disk-path", str(tmp_path / "typo")])
        assert status.value.code == 1
        assert "there is no directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_archive_that_cannot_be_written_is_a_clear_error(
    where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as status:
        main(["cache", "export", str(tmp_path / "file" / "x.tar"), *where])
    assert status.value.code == 1
    assert "choose another place" in capsys.readouterr().err


def test_import_keeps_to_a_bound_only_if_told(where: list[str], tmp_path: Path, redis_server: RedisServer) -> None:
    archive = tmp_path / "x.tar"
    assert run("export", str(archive), *where)[0] == 0
    assert run_json("import", str(archive), *where) == (0, {"kept": 3})
    assert len(run_json("ls", *where)[1]) == 3
    bound = str(2.5 * file_size(make_entry(1)) / 1e9)
    flag = "--disk-gb" if where[0] == "--disk-path" else "--redis-gb"
    run("import", str(archive), *where, flag, bound)
    assert run_json("stats", *where)[1].popitem()[1]["held_bytes"] <= 3 * file_size(make_entry(1))


def test_without_a_tier_there_is_nothing_to_look_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLCACHE_DISK_PATH", raising=False)
    with pytest.raises(SystemExit) as status:
        main(["cache", "ls"])
    assert status.value.code == 2
    assert "give --disk-path or --redis-url" in capsys.readouterr().err


def test_a_second_ask_hits_what_the_first_one_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_checkpoint(tmp_path / "model", TINY["qwen2_5_vl"])
    make_picture(1).save(tmp_path / "page.png")
    flags = ["--disk-path", str(tmp_path / "store"), "--always-reuse", "--max-new-tokens", "2", "--json"]
    outcomes = []
    for _ in range(2):
        with pytest.raises(SystemExit) as status:
            main(["ask", str(tmp_path / "page.png"), "-q", "what?", "--model", str(checkpoint), *flags])
        assert status.value.code == 0
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        outcomes.append(line["report"]["spans"][0]["outcome"] if "report" in line else line)
    assert outcomes == ["new", "reused"]
