"""Digests: equal for equal things, and for nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vlcache.keys import digest, fingerprint_settings, fingerprint_weights, scope, tensor_bytes
from vlcache.rope import Rope
from vlcache.store import MemoryStore
from vlcache.types import Entry, EntryKey, Geometry, Header

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

Weights = list[tuple[str, Tensor]]

fields = st.lists(st.binary(max_size=12), max_size=4)


def make_weights() -> Weights:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"layers.{layer}.{part}", torch.randn(shape, generator=generator))
        for layer in range(4)
        for part, shape in (("q_proj.weight", (40, 24)), ("norm.weight", (24,)), ("scale", ()))
    ]


def test_a_digest_is_a_full_sha256() -> None:
    value = digest("a", b"b")
    assert len(value) == 64
    assert int(value, 16) >= 0
    assert value == hashlib.sha256((1).to_bytes(8, "big") + b"a" + (1).to_bytes(8, "big") + b"b").hexdigest()


@given(fields, fields)
def test_digests_are_equal_only_for_equal_lists_of_fields(a: list[bytes], b: list[bytes]) -> None:
    assert (digest(*a) == digest(*b)) == (a == b)


@given(st.binary(min_size=1, max_size=30), st.data())
def test_bytes_shifted_between_fields_change_the_digest(data: bytes, draw: st.DataObject) -> None:
    """Picture X+suffix without a setting, and picture X with the setting `suffix`, are two things."""
    cut, other = draw.draw(st.lists(st.integers(0, len(data)), min_size=2, max_size=2, unique=True))
    assert digest(data[:cut], data[cut:]) != digest(data[:other], data[other:])
    assert digest(data[:cut], data[cut:]) != digest(data)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("ab", "c"), ("a", "bc")),
        (("ab",), ("ab", "")),
        (("", "ab"), ("ab", "")),
        (("a", "b"), ("b", "a")),
        ((), ("",)),
    ],
)
def test_lists_of_fields_by_hand(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    assert digest(*a) != digest(*b)


def test_a_field_may_look_like_a_length() -> None:
    assert digest((1).to_bytes(8, "big") + b"a") != digest("a")
    assert digest(b"a" + (1).to_bytes(8, "big") + b"b") != digest("a", "b")


def test_text_bytes_and_views_of_the_same_bytes_are_one() -> None:
    data = "Bild ä".encode()
    assert digest("Bild ä") == digest(data) == digest(memoryview(data))
    wide = memoryview(bytes(range(16))).cast("I")
    assert digest(wide, "x") == digest(bytes(range(16)), "x"), "the length is in bytes, not in items"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]
)
def test_tensor_bytes_are_the_values_row_by_row(dtype: torch.dtype) -> None:
    values = torch.arange(12).to(dtype)
    table = values.reshape(3, 4)
    expected = bytes(values.view(torch.uint8).tolist())
    assert bytes(tensor_bytes(table)) == expected
    assert bytes(tensor_bytes(table.T.contiguous().T)) == expected, "memory order leaked into the bytes"
    assert bytes(tensor_bytes(table[1:])) == expected[len(expected) // 3 :]


def test_tensor_bytes_of_a_parameter_and_of_a_scalar() -> None:
    assert bytes(tensor_bytes(torch.nn.Parameter(torch.zeros(2)))) == bytes(8)
    assert bytes(tensor_bytes(torch.tensor(258, dtype=torch.int16))) == (258).to_bytes(2, "little")


def test_the_order_of_settings_does_not_matter() -> None:
    a = {"size": {"height": 2, "width": 3}, "mean": [0.5, 0.5], "resize": True}
    b = {"resize": True, "mean": [0.5, 0.5], "size": {"width": 3, "height": 2}}
    assert fingerprint_settings("Processor", a) == fingerprint_settings("Processor", b)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Other", {"size": 28, "mean": [0.5]}),
        ("Processor", {"size": 29, "mean": [0.5]}),
        ("Processor", {"size": "28", "mean": [0.5]}),
        ("Processor", {"size": 28, "mean": [0.25]}),
        ("Processor", {"size": 28}),
        ("Processor", {"size": 28, "mean": [0.5], "more": None}),
    ],
)
def test_a_component_with_other_settings_is_another_one(name: str, settings: dict[str, object]) -> None:
    assert fingerprint_settings(name, settings) != fingerprint_settings("Processor", {"size": 28, "mean": [0.5]})


def edited(name: str, change: Callable[[Tensor], Tensor]) -> Weights:
    return [(n, change(w) if n == name else w) for n, w in make_weights()]


def test_the_same_weights_have_the_same_fingerprint() -> None:
    assert fingerprint_weights("config", make_weights()) == fingerprint_weights("config", iter(make_weights()))


@pytest.mark.parametrize(
    "weights",
    [
        edited("layers.2.q_proj.weight", lambda w: w + 0.01),
        edited("layers.3.norm.weight", lambda w: w * 1.001),
        edited("layers.0.scale", lambda w: w + 1),
        edited("layers.1.q_proj.weight", lambda w: w.to(torch.bfloat16)),
        edited("layers.1.q_proj.weight", lambda w: w.reshape(24, 40)),
        edited("layers.1.norm.weight", lambda w: w.view(torch.int32)),
        [(name.replace("layers.1", "layers.9"), w) for name, w in make_weights()],
        make_weights()[:-1],
        [*make_weights()[3:], *make_weights()[:3]],
    ],
    ids=["one layer", "one norm", "one scalar", "dtype", "shape", "same bytes, other dtype", "name", "fewer", "order"],
)
def test_another_model_has_another_fingerprint(weights: Weights) -> None:
    assert fingerprint_weights("config", weights) != fingerprint_weights("config", make_weights())


def test_another_configuration_is_another_model() -> None:
    assert fingerprint_weights("theta 1e6", make_weights()) != fingerprint_weights("theta 5e6", make_weights())


@pytest.mark.parametrize("size", [2, 64, 65, 96, 127, 128, 191, 1000, 4097])
@pytest.mark.parametrize("part", ["first quarter", "last quarter"])
def test_samples_are_spread_over_the_whole_of_a_weight(size: int, part: str) -> None:
    """A change of a quarter of a weight's values is seen wherever it is."""
    changed = torch.zeros(size)
    quarter = max(1, size // 4)
    changed[slice(quarter) if part == "first quarter" else slice(-quarter, None)] = 1.0
    assert fingerprint_weights("", [("w", changed)]) != fingerprint_weights("", [("w", torch.zeros(size))])


@pytest.mark.parametrize(
    "other",
    [("model", "torch.bfloat16", "tenant"), ("other", "torch.float32", "tenant"), ("model", "torch.float32", "")],
)
def test_model_dtype_and_tenant_each_make_a_scope(other: tuple[str, str, str]) -> None:
    assert scope(*other) != scope("model", "torch.float32", "tenant")
    assert scope("model", "torch.float32", "tenant") == scope("model", "torch.float32", "tenant")


def test_a_tenant_cannot_imitate_a_dtype() -> None:
    assert scope("model", "float32", "b") != scope("model", "float3", "2b")


def same_last_16_bits() -> tuple[str, str]:
    seen: dict[str, str] = {}
    for number in range(1 << 17):
        value = digest("picture", str(number))
        if value[-4:] in seen:
            return seen[value[-4:]], value
        seen[value[-4:]] = value
    raise AssertionError("no two digests share 16 bits")


def test_digests_that_share_their_last_16_bits_are_two_keys() -> None:
    a, b = same_last_16_bits()
    assert a[-4:] == b[-4:]
    for first, second in ((EntryKey(a, "s"), EntryKey(b, "s")), (EntryKey("c", a), EntryKey("c", b))):
        assert first != second
        assert {first: "a", second: "b"} == {second: "b", first: "a"}
        assert {first: "a"}.get(second) is None


def test_entries_whose_digests_share_their_last_16_bits_are_kept_apart() -> None:
    a, b = (EntryKey(content, "s") for content in same_last_16_bits())
    geometry = Geometry(1, 1, 2, 2, 0, Rope("1d", (1.0,)))
    entry = Entry(
        Header(a, (1, 2, 2), 1, "torch.float32", geometry, "m", "p", ""), torch.zeros(1, 2), torch.zeros(1, 1).long()
    )
    store = MemoryStore(1000)
    assert store.put(entry)
    assert list(store.get_many([b, a])) == [a]


def test_keys_that_hash_alike_are_compared_in_full() -> None:
    """A dict that finds two keys in one slot decides by their digests, not by their hash."""

    class OneSlot(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 1

    a, b = EntryKey(OneSlot(digest("a")), OneSlot("s")), EntryKey(OneSlot(digest("b")), OneSlot("s"))
    assert hash(a) == hash(b)
    assert {a: "a"}.get(b) is None
