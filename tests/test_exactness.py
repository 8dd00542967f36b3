"""Selective prefill against a full forward and against a brute-force reference, fp32, every family."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import Lab, make_picture
from reference import Reused, picture_runs, record, replay
from torch import Tensor

from vlcache.policies import Evidence, Layered, Rule
from vlcache.ranges import Ranges
from vlcache.types import Span

SYSTEMS = [
    "Short.",
    "Another system prompt, of another length.",
    "x" * 60,
    "You are a careful reader. " * 12,
    "Numbers: " + " ".join(map(str, range(150))),
]


@dataclass(frozen=True)
class Rows(Rule):
    """A policy that computes what the test says: per layer a share of the front, or a list of tokens."""

    per_layer: tuple[Ranges, ...]
    name: str = "rows"

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return tuple((a, min(b, span.length)) for a, b in self.per_layer[layer] if a < span.length)


def filled(out: dict[str, Any]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits of the last row and the K and V of all tokens that a prefill handed over."""
    cache = out.get("cache", out.get("past_key_values"))
    logits = cache.first_logits(1)
    return logits[0, -1], [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]


def computed(report: Any, policy: Any, length: int) -> list[set[int]]:
    """Rows that a nested policy computes, as sets, without the package's plan."""
    layers = len(report.rows)
    span, evidence = Span("", 0, length, (1, 1, 1)), Evidence(layers)
    return [{i for a, b in policy.rows(span, layer, evidence) for i in range(a, b)} for layer in range(layers)]


def check_equal(close: Any, ours: Any, reference: Any, bound: float = 1e-4) -> None:
    close(ours[0], reference[0], bound)
    for kind in (1, 2):
        for mine, theirs in zip(ours[kind], reference[kind], strict=True):
            close(mine, theirs, bound)


def test_a_new_picture_gives_what_the_model_alone_gives(lab: Lab, close: Any) -> None:
    chat = lab.chat(make_picture(1), "What is shown?")
    inputs = lab.inputs(chat)
    plain = lab.model.generate(**inputs, max_new_tokens=32, min_new_tokens=32)
    with lab.cache() as cache:
        out = cache.prefill(chat)
        assert torch.equal(out["input_ids"], inputs["input_ids"])
        assert torch.equal(lab.model.generate(**out, max_new_tokens=32, min_new_tokens=32), plain)
        check_equal(close, filled(cache.prefill(lab.inputs(chat))), replay(lab.model, inputs, []))


@pytest.mark.parametrize("system", SYSTEMS[:2])
def test_ratio_one_equals_the_full_forward(lab: Lab, close: Any, system: str) -> None:
    picture = make_picture(1)
    chat = lab.chat(picture, "What is shown?", system=system)
    inputs = lab.inputs(chat)
    plain = lab.model.generate(**inputs, max_new_tokens=32, min_new_tokens=32)
    with lab.cache("prefix:1.0") as cache:
        cache.prefill(lab.chat(picture, "first seen here"))
        check_equal(close, filled(cache.prefill(chat)), replay(lab.model, inputs, []))
        assert [s.outcome for s in cache.last.spans] == ["reused"]
        tokens = lab.model.generate(**cache.prefill(chat), max_new_tokens=32, min_new_tokens=32)
        assert torch.equal(tokens, plain)


@pytest.mark.parametrize("system", SYSTEMS)
def test_layer_0_of_a_moved_entry_equals_a_fresh_prefill(lab: Lab, close: Any, system: str) -> None:
    """K/V of layer 0 depend on the token's embedding and position alone: an oracle at any offset."""
    picture = make_picture(2)
    chat = lab.chat(picture, "What is shown?", system=system)
    with lab.cache("none") as cache:
        cache.prefill(lab.chat(picture, "q", system="Where the picture was first seen."))
        _, keys, values = filled(cache.prefill(chat))
        assert cache.last.spans[0].rows == 0
        _, fresh_keys, fresh_values = replay(lab.model, lab.inputs(chat), [])
        close(keys[0], fresh_keys[0], 1e-5)
        close(values[0], fresh_values[0], 1e-5)


BUDGETS = [(1.0, 0.5, 0.25, 0.1), (0.3, 0.3, 0.0, 0.0), (0.6, 0.1, 0.1, 0.1), (0.0, 0.0, 0.0, 0.0)]


@pytest.mark.parametrize("ratios", BUDGETS)
def test_budgets_per_layer_equal_the_reference(lab: Lab, close: Any, ratios: tuple[float, ...]) -> None:
    picture = make_picture(3)
    first, second = lab.chat(picture, "q"), lab.chat(picture, "What is shown?", system=SYSTEMS[1])
    policy = Layered(ratios)
    with lab.cache(policy) as cache:
        cache.prefill(first)
        ours = filled(cache.prefill(second))
        source, there = lab.inputs(first), lab.inputs(second)
        ((at, n),), ((start, _),) = picture_runs(lab.model, source), picture_runs(lab.model, there)
        reused = Reused(start, n, record(lab.model, source), at, computed(cache.last, policy, n))
        check_equal(close, ours, replay(lab.model, there, [reused]))
        assert cache.last.rows == tuple(
            there["input_ids"].shape[1] - n + len(rows) for rows in computed(cache.last, policy, n)
        )


def test_a_budget_that_grows_is_widened(one_lab: Lab, close: Any) -> None:
    picture = make_picture(3)
    first, second = one_lab.chat(picture, "q"), one_lab.chat(picture, "What is shown?", system=SYSTEMS[1])
    with one_lab.cache(Layered((0.1, 0.5, 0.2, 0.2))) as cache:
        cache.prefill(first)
        ours = filled(cache.prefill(second))
    with one_lab.cache(Layered((0.5, 0.5, 0.2, 0.2))) as cache:
        cache.prefill(first)
        check_equal(close, ours, filled(cache.prefill(second)), 0.0)


SCATTERED = (((0, 3), (7, 9), (11, 12)), ((0, 2), (7, 9)), ((1, 2), (8, 9)), ((8, 9),))
ENTERING = (
    (((0, 2),), ((0, 2),), ((0, 6), (9, 12)), ((0, 1), (5, 6))),  # some come along, others enter at layer 2
    ((), (), ((0, 24),), ((0, 24),)),  # the whole picture enters at layer 2
    ((), (), ((3, 5),), ()),  # entering for its K/V alone
)


@pytest.mark.parametrize("rows", [SCATTERED, *ENTERING])
def test_any_rows_equal_the_reference_also_from_a_checkpoint(lab: Lab, close: Any, rows: tuple[Ranges, ...]) -> None:
    picture = make_picture(4)
    first, second = lab.chat(picture, "q"), lab.chat(picture, "What is shown?", system=SYSTEMS[2])
    policy = Rows(rows)
    with lab.cache(policy, checkpoint_layers=(2,)) as cache:
        cache.prefill(first)
        ours = filled(cache.prefill(second))
        source, there = lab.inputs(first), lab.inputs(second)
        ((at, n),), ((start, _),) = picture_runs(lab.model, source), picture_runs(lab.model, there)
        reused = Reused(start, n, record(lab.model, source), at, computed(cache.last, policy, n))
        check_equal(close, ours, replay(lab.model, there, [reused]))


def test_entries_keep_exact_checkpoints(lab: Lab, close: Any) -> None:
    chat = lab.chat(make_picture(4), "q")
    with lab.cache(checkpoint_layers=(1, 3)) as cache:
        cache.prefill(chat)
        ((start, n),) = picture_runs(lab.model, lab.inputs(chat))
        (entry,) = cache.store._entries.values()
        hidden = record(lab.model, lab.inputs(chat)).hidden
        assert sorted(entry.checkpoints) == [1, 3]
        for layer in (1, 3):
            close(entry.checkpoints[layer], hidden[layer][start : start + n], 1e-5)


def several(lab: Lab, close: Any, first: Any, second: Any, known: list[int | None], outcomes: list[str]) -> None:
    """Fill with `first`, ask `second`; `known[i]` is the place in `first` of the i-th picture of `second`."""
    policy = Layered((0.5, 0.3, 0.2, 0.1))
    with lab.cache(policy) as cache:
        cache.prefill(first)
        ours = filled(cache.prefill(second))
        assert [s.outcome for s in cache.last.spans] == outcomes
        source, there = lab.inputs(first), lab.inputs(second)
        recording, origins = record(lab.model, source), picture_runs(lab.model, source)
        reused = [
            Reused(start, n, recording, origins[place][0], computed(cache.last, policy, n))
            for (start, n), place in zip(picture_runs(lab.model, there), known, strict=True)
            if place is not None
        ]
        check_equal(close, ours, replay(lab.model, there, reused))


A, B = make_picture(10), make_picture(11, 112, 196)


def test_one_picture_known_and_one_new(lab: Lab, close: Any) -> None:
    several(lab, close, lab.chat(A, "q"), lab.chat(A, "and", B, "?", system="S"), [0, None], ["reused", "new"])
    several(lab, close, lab.chat(A, "q"), lab.chat(B, "and", A, "?", system="S"), [None, 0], ["new", "reused"])


def test_a_new_picture_between_known_ones(lab: Lab, close: Any) -> None:
    second = lab.chat(B, "and", make_picture(12), "and", A, "?", system="S")
    several(lab, close, lab.chat(A, B, "q"), second, [1, None, 0], ["reused", "new", "reused"])


def test_swapped_order(lab: Lab, close: Any) -> None:
    several(lab, close, lab.chat(A, B, "q"), lab.chat(B, A, "q", system="S"), [1, 0], ["reused", "reused"])


def test_the_same_picture_twice_in_one_prompt(lab: Lab, close: Any) -> None:
    several(lab, close, lab.chat(A, "q"), lab.chat(A, "same as", A, "?", system="S"), [0, 0], ["reused", "reused"])
    chat = lab.chat(A, "same as", A, "?")
    with lab.cache() as cache:
        check_equal(close, filled(cache.prefill(chat)), replay(lab.model, lab.inputs(chat), []))
        assert cache.counters.encoded == 1
        assert cache.store.stats().entries == 1


def bare(lab: Lab, before: str, picture: Any, after: str) -> dict[str, Any]:
    """A prompt of nothing but the picture's tokens and text around them."""
    out = lab.processor(text=[lab.processor.image_token], images=[picture], return_tensors="pt")
    text = [lab.processor.tokenizer(t, return_tensors="pt")["input_ids"].long() for t in (before, after)]
    ids = torch.cat((text[0], out["input_ids"], text[1]), dim=1)
    types = (ids == lab.model.config.image_token_id).int()
    grid = {"pixel_values": out["pixel_values"], "image_grid_thw": out["image_grid_thw"]}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types, **grid}


@pytest.mark.parametrize(("before", "after"), [("", "what is it"), ("look at this", "")], ids=["first", "last"])
def test_a_picture_first_and_last_in_the_prompt(lab: Lab, close: Any, before: str, after: str) -> None:
    policy = Layered((1.0, 0.5, 0.25, 0.25))
    first, second = bare(lab, "an earlier prompt", A, "q"), bare(lab, before, A, after)
    plain = lab.model.generate(**second, max_new_tokens=16, min_new_tokens=16)
    with lab.cache(policy) as cache:
        cache.prefill(first)
        ours = filled(cache.prefill(second))
        ((at, n),), ((start, _),) = picture_runs(lab.model, first), picture_runs(lab.model, second)
        rows = computed(cache.last, policy, n)
        if not after:  # the last row's logits are wanted, whatever the policy leaves out
            rows = [layer | {n - 1} for layer in rows]
        reused = Reused(start, n, record(lab.model, first), at, rows)
        check_equal(close, ours, replay(lab.model, second, [reused]))
        out = cache.prefill(second, policy="full")
        assert torch.equal(lab.model.generate(**out, max_new_tokens=16, min_new_tokens=16), plain)


def test_a_picture_last_always_computes_the_last_row(one_lab: Lab) -> None:
    """Its logits are wanted, whatever the policy leaves out."""
    with one_lab.cache("none") as cache:
        cache.prefill(bare(one_lab, "an earlier prompt", A, "q"))
        out = cache.prefill(bare(one_lab, "look at this", A, ""))
        logits, _, _ = filled(copy.deepcopy(out))
        assert logits.shape == (one_lab.model.config.text_config.vocab_size,)
        tokens = one_lab.model.generate(**out, max_new_tokens=2, min_new_tokens=2)
        assert tokens.shape[1] == out["input_ids"].shape[1] + 2


def test_reuse_that_computes_nothing_is_not_the_full_forward(lab: Lab) -> None:
    """The bounds above mean something: what they would have to miss is thousands of times larger."""
    picture = make_picture(1)
    chat = lab.chat(picture, "What is shown?", system=SYSTEMS[1])
    with lab.cache("none") as cache:
        cache.prefill(lab.chat(picture, "first seen here"))
        logits, keys, _ = filled(cache.prefill(chat))
    full, full_keys, _ = replay(lab.model, lab.inputs(chat), [])
    assert (logits - full).abs().max() > 1e-2
    assert (keys[-1] - full_keys[-1]).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_by_its_rounding_only(lab: Lab, close: Any, dtype: torch.dtype) -> None:
    half = Lab(lab.family, copy.deepcopy(lab.model).to(dtype), lab.processor)
    picture, step = make_picture(1), float(torch.finfo(dtype).eps)
    chat = half.chat(picture, "What is shown?", system=SYSTEMS[3])
    with half.cache("full") as cache:
        cache.prefill(half.chat(picture, "q"))
        logits, _, _ = filled(cache.prefill(chat))
        assert cache.last.hits == 1
        full, fresh_keys, fresh_values = replay(half.model, half.inputs(chat), [])
        close(logits, full, 16 * step * float(full.abs().max()))
    with half.cache("none") as cache:
        cache.prefill(half.chat(picture, "q"))
        _, keys, values = filled(cache.prefill(chat))
        # captured rounded, moved, rounded again; the model rounds cosines too
        close(keys[0], fresh_keys[0], 4 * step * float(fresh_keys[0].abs().max()))
        close(values[0], fresh_values[0], step * float(fresh_values[0].abs().max()))
