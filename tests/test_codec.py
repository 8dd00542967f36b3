"""The entry format: its bytes, what they say, and that no change to them goes unseen."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entries import GEOMETRY, make_entry, make_key
from safetensors import safe_open

from vlcache.rope import Rope
from vlcache.store import arrival as arrival_module
from vlcache.store.arrival import Arrival
from vlcache.store.codec import Part, encode, entry_name, parse_head
from vlcache.store.faults import DamagedError, ForeignError
from vlcache.types import Entry, EntryKey, EntryLostError, Stored

GOLDEN = Path(__file__).parent / "data" / "entry-1.safetensors"


def golden_entry() -> Entry:
    """Four tokens, every tensor different everywhere."""
    entry = make_entry(0, tokens=4)

    def count(tensor: torch.Tensor | None, start: float) -> torch.Tensor:
        assert tensor is not None
        return (torch.arange(tensor.numel()) * 0.25 + start).view(tensor.shape).to(tensor.dtype)

    return replace(
        entry,
        encoder=count(entry.encoder, 1),
        positions=count(entry.positions, 7),
        keys=count(entry.keys, -3),
        values=count(entry.values, 100),
        checkpoints={2: count(entry.checkpoints[2], 50)},
        created_s=1_700_000_000.5,
        cost_s=0.25,
    )


def to_bytes(entry: Entry, stored: Stored = "raw") -> bytes:
    return b"".join(bytes(piece) for piece in encode(entry, stored).pieces())


def read_all(data: bytes) -> Entry:
    """An entry from its bytes, every tensor checked.

    Raises
    ------
    DamagedError, ForeignError
    """

    def read(part: Part, out: memoryview) -> None:
        if part.stop > len(data):
            raise DamagedError("truncated")
        out[:] = data[part.start : part.stop]

    head = parse_head(data)
    if head.size != len(data):
        raise DamagedError("truncated")
    arrival = Arrival(head, read, pytest.fail)
    for layer in range(head.header.geometry.layers if head.has_kv else 0):
        arrival.load(layer)
    return arrival.entry


def same(one: Entry, other: Entry) -> bool:
    def tensors(entry: Entry) -> list[torch.Tensor]:
        kv = [t for layer in range(GEOMETRY.layers) for t in entry.kv(layer)] if entry.has_kv else []
        return [entry.encoder, entry.positions, *entry.checkpoints.values(), *kv]

    def said(entry: Entry) -> tuple[Any, ...]:
        return entry.header, entry.capture, entry.created_s, entry.cost_s, sorted(entry.checkpoints), entry.has_kv

    return said(one) == said(other) and all(map(torch.equal, tensors(one), tensors(other)))


def test_the_bytes_are_those_of_the_format() -> None:
    assert to_bytes(golden_entry()) == GOLDEN.read_bytes(), "a change of the format takes a new version"
    assert same(read_all(GOLDEN.read_bytes()), golden_entry())


def test_any_safetensors_reader_reads_an_entry() -> None:
    entry = golden_entry()
    with safe_open(GOLDEN, "pt") as file:
        assert file.metadata()["format"] == "vlcache-entry"
        assert json.loads(file.metadata()["origin"]) == entry.positions[:, 0].tolist()
        assert torch.equal(file.get_tensor("encoder"), entry.encoder)
        for layer in range(GEOMETRY.layers):
            assert torch.equal(file.get_tensor(f"layer.{layer:03d}.key"), entry.kv(layer)[0])
            assert torch.equal(file.get_tensor(f"layer.{layer:03d}.value"), entry.kv(layer)[1])


def test_layers_lie_in_order_and_apart() -> None:
    parts = list(encode(golden_entry()).head.parts.values())
    names = [part.name for part in parts]
    assert names[:3] == ["positions", "encoder", "checkpoint.002"]
    assert names[3:] == [f"layer.{layer:03d}.{kind}" for layer in range(3) for kind in ("key", "value")]
    assert all(one.stop == two.start for one, two in itertools.pairwise(parts))
    assert parts[0].start % 64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", ["raw", "int8", "fp8"])
def test_what_is_written_is_read(dtype: torch.dtype, stored: Stored) -> None:
    random = torch.Generator().manual_seed(0)
    entry = golden_entry()
    kv = [torch.randn((3, 4, 2, 4), generator=random).mul(torch.tensor([[0.01], [30.0]])).to(dtype) for _ in "kv"]
    entry = replace(
        entry,
        header=replace(entry.header, dtype=str(dtype), key=EntryKey("../../x", "скоп")),
        encoder=entry.encoder.to(dtype),
        checkpoints={},
        keys=kv[0],
        values=kv[1],
        capture="neutral",
    )
    back = read_all(to_bytes(entry, stored))
    if stored == "raw":
        assert same(back, entry)
        return
    for mine, its in zip((back.keys, back.values), kv, strict=True):
        assert mine is not None
        assert mine.dtype == dtype
        # Half a step of the head's own scale: the small head is not drowned by the large one
        step = its.float().abs().amax(dim=(1, 3), keepdim=True) / (127 if stored == "int8" else 448)
        bound = step / 2 if stored == "int8" else torch.maximum(its.float().abs() / 16, step / 2)
        rounding = its.float().abs() * (0 if dtype == torch.float32 else 2**-8)
        assert bool(((mine.float() - its.float()).abs() <= bound * 1.001 + rounding).all())
    assert torch.equal(back.encoder, entry.encoder)
    # What was rounded once is not rounded again
    again = read_all(to_bytes(back, stored))
    assert dtype != torch.float32 or torch.allclose(again.keys, back.keys, rtol=1e-6)


def test_an_entry_without_kv_and_one_of_a_1d_model() -> None:
    bare = replace(golden_entry(), keys=None, values=None, checkpoints={})
    assert same(read_all(to_bytes(bare)), bare)
    rope = Rope("1d", (1.0, 0.5), scaling=1.25)
    header = replace(bare.header, geometry=replace(GEOMETRY, rope=rope))
    flat = replace(bare, header=header, positions=torch.arange(4)[None])
    assert same(read_all(to_bytes(flat)), flat)


def test_every_flipped_bit_of_a_sample_is_seen() -> None:
    data = bytearray(to_bytes(make_entry(3)))
    head = len(encode(make_entry(3)).head_bytes)
    rng = np.random.default_rng(0)
    # The head is a small part of an entry, and gets half of the sample
    places = [*rng.integers(0, head * 8, 2500), *rng.integers(head * 8, len(data) * 8, 2500)]
    missed = []
    for place in places:
        data[place // 8] ^= 1 << place % 8
        try:
            read_all(bytes(data))
            missed.append(place)
        except DamagedError:
            pass
        data[place // 8] ^= 1 << place % 8
    assert not missed
    assert same(read_all(bytes(data)), make_entry(3)), "and the sample leaves nothing changed"


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 0.5, 0.99, -1])
def test_a_cut_entry_is_damaged(keep: float) -> None:
    data = GOLDEN.read_bytes()
    with pytest.raises(DamagedError):
        read_all(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(DamagedError, match="truncated"):
        read_all(data + b"\0")


def rewrite(change: dict[str, Any], **table: Any) -> bytes:
    """The golden head with other words in it and a digest that holds: written by someone else, not damaged."""
    data = GOLDEN.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    said = json.loads(data[8 : 8 + n])
    said["__metadata__"] |= change
    said |= table
    text = json.dumps(said).encode()
    head = struct.pack("<Q", len(text)) + text
    return head + hashlib.sha256(head).digest() + data[8 + n + 32 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": "2"}, "format version"),
        ({"format": "another"}, "format version"),
        ({"tokens": "five"}, "format"),
        ({"tokens": "5"}, "format"),
        ({"stored": "int4"}, "format"),
        ({"stored": "int8"}, "format"),
        ({"dtype": "torch.bfloat16"}, "format"),
        ({"dtype": "torch.nothing"}, "format"),
        ({"grid": "[1, 2]"}, "format"),
        ({"rope": "[]"}, "format"),
        ({"layers": "2"}, "format"),
        ({"cost_s": "inf"}, "format"),
        ({"cost_s": "-1.0"}, "format"),
        ({"created_s": "nan"}, "format"),
        ({"content": "\ud800"}, "format"),
        ({"content": ["text"]}, "format"),
        ({"rope": "[" * 100_000}, "format"),
        ({"grid": "[1, 2, Infinity]"}, "format"),
    ],
)
def test_a_head_that_says_something_else_is_foreign(change: dict[str, str], reason: str) -> None:
    assert parse_head(rewrite({})).header == golden_entry().header
    with pytest.raises(ForeignError, match=f"^{reason}$"):
        parse_head(rewrite(change))


def test_tables_that_do_not_fit_are_foreign() -> None:
    row = {"dtype": "F32", "shape": [4, 16], "data_offsets": [0, 256]}
    for table in ({"encoder": row}, {"extra": row}, {"encoder": {}}, {"head_digest": row}, {"encoder": None}):
        with pytest.raises(ForeignError, match=r"^format$"):
            parse_head(rewrite({}, **table))


def test_an_absurd_length_is_not_read() -> None:
    for n in (1 << 20, 1 << 40, (1 << 64) - 1):
        with pytest.raises(DamagedError, match="head"):
            parse_head(struct.pack("<Q", n) + bytes(100))


def test_names_are_digests_of_everything_that_tells_entries_apart() -> None:
    keys = [make_key(1), make_key(2), replace(make_key(1), scope="s"), EntryKey("../../x", "/etc"), EntryKey("", "")]
    names = {entry_name(key, stored) for key in keys for stored in ("raw", "int8", "fp8")}
    assert len(names) == 15
    assert all(len(name) == 64 and set(name) <= set("0123456789abcdef") for name in names)


def test_whoever_waits_for_a_layer_that_does_not_come_is_told() -> None:
    data = bytearray(to_bytes(golden_entry()))
    data[-1] ^= 1  # the last layer's values

    def read(part: Part, out: memoryview) -> None:
        out[:] = data[part.start : part.stop]

    arrival = Arrival(parse_head(bytes(data)), read, pytest.fail)
    arrival.load(0)
    assert arrival.entry.kv(0)[0].shape == (4, 2, 4)
    arrival.load(1)
    with pytest.raises(DamagedError, match="checksum of layer"):
        arrival.load(2)
    arrival.fail("damaged")
    assert torch.equal(arrival.entry.kv(1)[1], golden_entry().kv(1)[1]), "what came is sound"
    with pytest.raises(EntryLostError, match="damaged"):
        arrival.entry.kv(2)


def test_a_layer_that_never_comes_is_waited_for_so_long_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_module, "TIMEOUT_S", 0.05)
    data, late = to_bytes(golden_entry()), []

    def read(part: Part, out: memoryview) -> None:
        out[:] = data[part.start : part.stop]

    arrival = Arrival(parse_head(data), read, late.append)
    arrival.load(0)
    with pytest.raises(EntryLostError, match="no layer for"):
        arrival.entry.kv(1)
    assert len(late) == 1


def test_a_large_entry_arrives_in_memory_of_its_own() -> None:
    entry = make_entry(3, tokens=30_000)  # over 4 MB of K and V
    back = read_all(to_bytes(entry))
    assert torch.equal(back.kv(2)[1], entry.kv(2)[1])
    assert back.keys is not None
    assert back.keys.is_contiguous()
    back.keys[0, 0] = 1.0
