"""Entries as bytes: a safetensors file per entry, written down in docs/entry-format.md.

    offset 0      8 bytes    length n of the JSON, little-endian
    8             n bytes    JSON: `__metadata__` (header, a checksum per tensor) and a table of tensors
    8 + n         32 bytes   the tensor `head_digest`: SHA-256 of all bytes before it
    8 + n + 32               positions, encoder, checkpoints, then K and V of layer 0, of layer 1, ...

Everything up to the end of the digest is the *head*. It is checked before it is parsed; each tensor is checked when it
is read, so layers can be read apart and in order. Nothing here touches a disk or a network.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

import torch
import xxhash
from torch import Tensor

from vlcache.keys import digest, tensor_bytes
from vlcache.rope import Rope
from vlcache.store.eightbit import EIGHT_BIT, shrink
from vlcache.store.faults import DamagedError, ForeignError
from vlcache.types import LAYOUT, Context, Entry, EntryKey, Geometry, Header, Stored

__all__ = [
    "FORMAT",
    "HEAD_LIMIT",
    "VERSION",
    "Encoded",
    "Head",
    "Part",
    "check",
    "decode",
    "encode",
    "entry_name",
    "head_size",
    "layer_parts",
    "parse_head",
    "seal",
]

FORMAT = "vlcache-entry"
VERSION = 1
HEAD_LIMIT = 1 << 20
"""Longest head that is read, bytes."""

_DIGEST = 32
_ALIGN = 64
_DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an entry.

    Attributes
    ----------
    start, stop : int
        Its bytes, counted from the start of the file.
    checksum : str
        XXH3-128 of them, 32 hex digits.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    checksum: str

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Head:
    """What an entry's head says.

    Attributes
    ----------
    header : Header
    stored : {"raw", "int8", "fp8"}
    capture, created_s, cost_s, context
        As in `Entry`.
    parts : mapping of str to Part
    size : int
        Bytes of the whole entry.
    """

    header: Header
    stored: Stored
    capture: str
    created_s: float
    cost_s: float
    context: Context | None
    parts: Mapping[str, Part]
    size: int

    @property
    def has_kv(self) -> bool:
        return layer_parts(0)[0] in self.parts

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V as they are stored."""
        return sum(part.nbytes for name, part in self.parts.items() if name.startswith("layer."))

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(int(name.split(".")[1]) for name in self.parts if name.startswith("checkpoint."))


@dataclass(frozen=True, slots=True)
class Encoded:
    """An entry ready to be written.

    Attributes
    ----------
    head : Head
    head_bytes : bytes
    views : tuple of memoryview
        Bytes of `head.parts`, in order. They hold on to the entry's tensors.
    """

    head: Head
    head_bytes: bytes
    views: tuple[memoryview, ...]

    def pieces(self) -> Iterator[bytes | memoryview]:
        """All bytes, in order."""
        yield self.head_bytes
        yield from self.views


def checksum(data: bytes | memoryview) -> str:
    """XXH3-128: against damage, not against forgery."""
    return xxhash.xxh3_128_hexdigest(data)


def entry_name(key: EntryKey, stored: Stored) -> str:
    """The name under which a tier keeps an entry: 64 hex digits, whatever the key says."""
    return digest("entry", FORMAT, str(VERSION), key.content, key.scope, stored)


def layer_parts(layer: int) -> tuple[str, str]:
    """Names of a layer's K and V."""
    return f"layer.{layer:03d}.key", f"layer.{layer:03d}.value"


def encode(entry: Entry, stored: Stored = "raw") -> Encoded:
    """An entry's bytes; its tensors are not copied, but for 8-bit storage."""
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(entry, stored)}
    views = {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
    sums = {name: checksum(view) for name, view in views.items()}
    table: dict[str, Any] = {"__metadata__": _metadata(entry, stored, sums)}
    table["head_digest"] = {"dtype": "U8", "shape": [_DIGEST], "data_offsets": [0, _DIGEST]}
    at = _DIGEST
    for name, tensor in tensors.items():
        stop = at + views[name].nbytes
        table[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text) + _DIGEST) % _ALIGN)
    head = struct.pack("<Q", len(text)) + text
    head += hashlib.sha256(head).digest()
    return Encoded(parse_head(head), head, tuple(views.values()))


def decode(data: bytes | memoryview) -> Encoded:
    """A whole entry's bytes, every one checked, ready to be written again.

    Raises
    ------
    DamagedError, ForeignError
    """
    head = parse_head(data)
    view = memoryview(data)
    if head.size != len(view):
        raise DamagedError("truncated")
    views = tuple(view[part.start : part.stop] for part in head.parts.values())
    for part, piece in zip(head.parts.values(), views, strict=True):
        check(part, piece)
    return Encoded(head, bytes(view[: head_size(view)]), views)


def check(part: Part, data: bytes | memoryview) -> None:
    """DamagedError unless these are the part's bytes."""
    if checksum(data) != part.checksum:
        raise DamagedError(f"checksum of {part.name.split('.')[0]}")


def head_size(start: bytes | memoryview) -> int:
    """Bytes of the head, from its first 8.

    Raises
    ------
    DamagedError
    """
    if len(start) < 8:
        raise DamagedError("truncated")
    size = 8 + int(struct.unpack("<Q", start[:8])[0]) + _DIGEST
    if size > HEAD_LIMIT:
        raise DamagedError("head")
    return size


def seal(head: bytes) -> str:
    """A short name for exactly these bytes of an entry: the first 16 hex digits of its head's digest."""
    return head[-_DIGEST:].hex()[:16]


def parse_head(data: bytes | memoryview) -> Head:
    """Check and read an entry's head.

    Raises
    ------
    DamagedError
        Bytes that were not written so.
    ForeignError
        Another format version, or no entry at all.
    """
    size = head_size(data)
    if len(data) < size:
        raise DamagedError("truncated")
    body = bytes(data[: size - _DIGEST])
    if hashlib.sha256(body).digest() != data[size - _DIGEST : size]:
        raise DamagedError("head")
    try:
        table = json.loads(body[8:])
        metadata = table.pop("__metadata__")
        for value in metadata.values():
            value.encode()  # text, and such as can be written again
        if metadata["format"] != FORMAT or metadata["format_version"] != str(VERSION):
            raise ForeignError("format version")
        return _read(table, metadata, size - _DIGEST)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise ForeignError("format") from None  # its digest holds, so whoever wrote it meant something else


def _read(table: dict[str, Any], metadata: dict[str, str], base: int) -> Head:
    parts, at = {}, base + _DIGEST
    if table.pop("head_digest")["data_offsets"] != [0, _DIGEST]:
        raise ValueError("the digest is not first")
    for name, row in table.items():
        start, stop = (base + offset for offset in row["data_offsets"])
        dtype, shape = _DTYPES[row["dtype"]], tuple(map(int, row["shape"]))
        if start != at or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is not where it belongs")
        parts[name] = Part(name, dtype, shape, start, stop, metadata[f"checksum.{name}"])
        at = stop
    rope = json.loads(metadata["rope"])
    header = Header(
        key=EntryKey(metadata["content"], metadata["scope"]),
        grid=_three(json.loads(metadata["grid"])),
        tokens=int(metadata["tokens"]),
        dtype=metadata["dtype"],
        geometry=Geometry(
            layers=int(metadata["layers"]),
            kv_heads=int(metadata["kv_heads"]),
            head_dim=int(metadata["head_dim"]),
            hidden=int(metadata["hidden"]),
            deepstack=int(metadata["deepstack"]),
            rope=Rope(rope["kind"], tuple(rope["frequencies"]), tuple(rope["sections"]), rope["scaling"]),
        ),
        model=metadata["model"],
        processor=metadata["processor"],
        tenant=metadata["tenant"],
        layout=int(metadata["layout"]),
    )
    stored = metadata["stored"]
    if stored not in get_args(Stored):
        raise ValueError("unknown storage")
    head = Head(
        header=header,
        stored=stored,  # type: ignore[arg-type]
        capture=metadata["capture"],
        created_s=float(metadata["created_s"]),
        cost_s=float(metadata["cost_s"]),
        context=_context(metadata),
        parts=parts,
        size=at,
    )
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (head.created_s, head.cost_s)):
        raise ValueError("no time")
    _check_parts(head)
    return head


def _check_parts(head: Head) -> None:
    """Every part has the dtype and shape that the header implies, and none is missing; ValueError otherwise."""
    header, parts = head.header, dict(head.parts)
    g, n = header.geometry, header.tokens
    plain = getattr(torch, header.dtype.removeprefix("torch."))
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "positions": (torch.int64, (g.rope.axes, n)),
        "encoder": (plain, (n, g.encoder_width)),
    }
    expected |= {f"checkpoint.{layer:03d}": (plain, (n, g.hidden)) for layer in head.checkpoints}
    for name in (name for layer in range(g.layers) for name in layer_parts(layer)) if head.has_kv else ():
        if head.stored == "raw":
            expected[name] = (plain, (n, g.kv_heads, g.head_dim))
        else:
            expected[name] = (EIGHT_BIT[head.stored][0], (n, g.kv_heads, g.head_dim))
            expected[f"{name}_scale"] = (torch.float32, (g.kv_heads,))
    if {name: (part.dtype, part.shape) for name, part in parts.items()} != expected:
        raise ValueError("the tensors are not those that the header implies")


def _context(metadata: dict[str, str]) -> Context | None:
    """Of an entry that says where it was captured; older ones do not."""
    found = [metadata.get(f"context_{field.name}") for field in fields(Context)]
    return None if None in found else Context(*(value for value in found if value is not None))


def _three(values: list[int]) -> tuple[int, int, int]:
    t, h, w = map(int, values)
    return t, h, w


def _metadata(entry: Entry, stored: Stored, sums: Mapping[str, str]) -> dict[str, str]:
    """The header as safetensors wants it, text to text."""
    header, g = entry.header, entry.header.geometry
    assert header.layout == LAYOUT
    rope = {
        "kind": g.rope.kind,
        "frequencies": g.rope.frequencies,
        "sections": g.rope.sections,
        "scaling": g.rope.scaling,
    }
    context = {} if entry.context is None else asdict(entry.context)
    return {
        "format": FORMAT,
        "format_version": str(VERSION),
        "layout": str(header.layout),
        "content": header.key.content,
        "scope": header.key.scope,
        "grid": json.dumps(header.grid),
        "tokens": str(header.tokens),
        "dtype": header.dtype,
        "stored": stored,
        "layers": str(g.layers),
        "kv_heads": str(g.kv_heads),
        "head_dim": str(g.head_dim),
        "hidden": str(g.hidden),
        "deepstack": str(g.deepstack),
        "rope": json.dumps(rope),
        "origin": json.dumps(entry.positions[:, 0].tolist()),
        "capture": entry.capture,
        "model": header.model,
        "processor": header.processor,
        "tenant": header.tenant,
        "created_s": repr(entry.created_s),
        "cost_s": repr(entry.cost_s),
        **{f"context_{name}": value for name, value in context.items()},
    } | {f"checksum.{name}": value for name, value in sums.items()}


def _tensors(entry: Entry, stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """An entry's tensors in the order of the file."""
    yield "positions", entry.positions
    yield "encoder", entry.encoder
    for layer, hidden in sorted(entry.checkpoints.items()):
        yield f"checkpoint.{layer:03d}", hidden
    for layer in range(entry.header.geometry.layers) if entry.has_kv else ():
        for name, tensor in zip(layer_parts(layer), entry.kv(layer), strict=True):
            if stored == "raw":
                yield name, tensor
            else:
                scale, small = shrink(tensor, stored)
                yield f"{name}_scale", scale
                yield name, small
