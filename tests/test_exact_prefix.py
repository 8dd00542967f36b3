"""Exact prefixes: what is taken from an earlier prompt is what a full prefill would give, bit by bit of meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Lab, make_picture
from reference import Reused, picture_runs, record, replay
from test_exactness import check_equal, computed, filled

from vlcache.exact import ExactPrefix, ExactPrefixes, cut
from vlcache.policies import Layered
from vlcache.types import Span

TURNS = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "and then?"}]


def test_a_longer_chat_computes_only_what_is_new(lab: Lab, close: Any) -> None:
    chat = lab.chat(make_picture(1), "q")
    with lab.cache("none", prefix_cache=True) as cache:
        first = cache.prefill(chat)["input_ids"].shape[1]
        out = cache.prefill(chat + TURNS)
        total = out["input_ids"].shape[1]
        assert cache.last.exact_prefix_tokens >= first - len("assistant\n") - 1
        assert cache.last.rows == (total - cache.last.exact_prefix_tokens,) * 4
        assert [s.outcome for s in cache.last.spans] == ["prefix"]
        check_equal(close, filled(out), replay(lab.model, lab.inputs(chat + TURNS), []))


def test_the_same_prompt_again_computes_one_row(one_lab: Lab, close: Any) -> None:
    chat = one_lab.chat(make_picture(1), "q")
    with one_lab.cache("none", prefix_cache=True) as cache:
        cache.prefill(chat)
        out = cache.prefill(chat)
        assert cache.last.rows == (1,) * 4
        check_equal(close, filled(out), replay(one_lab.model, one_lab.inputs(chat), []))


def test_decoding_does_not_change_what_is_kept(one_lab: Lab, close: Any) -> None:
    """The tensors are shared between the handed-over cache and the prefix."""
    chat = one_lab.chat(make_picture(1), "q")
    with one_lab.cache("none", prefix_cache=True) as cache:
        out = cache.prefill(chat)
        one_lab.model.generate(**out, max_new_tokens=8, num_beams=2)
        next(v for k, v in out.items() if k in ("cache", "past_key_values")).reset()
        again = filled(cache.prefill(chat + TURNS))
        check_equal(close, again, replay(one_lab.model, one_lab.inputs(chat + TURNS), []))


def test_another_picture_ends_the_prefix_at_its_edge(lab: Lab, close: Any) -> None:
    """Both prompts have the same tokens; only the picture differs."""
    red, blue = (lab.chat(make_picture(seed), "Which colour?") for seed in (1, 2))
    with lab.cache("none", prefix_cache=True) as cache:
        cache.prefill(red)
        out = cache.prefill(blue)
        assert cache.last.exact_prefix_tokens == cache.last.spans[0].start
        assert [s.outcome for s in cache.last.spans] == ["new"]
        check_equal(close, filled(out), replay(lab.model, lab.inputs(blue), []))


def test_repaired_values_are_never_offered_as_exact(lab: Lab, close: Any) -> None:
    picture = make_picture(1)
    asked = lab.chat(picture, "q", system="other")
    with lab.cache("none", prefix_cache=True) as cache:
        cache.prefill(lab.chat(picture, "q"))
        cache.prefill(asked)
        assert cache.last.hits == 1
        out = cache.prefill(asked + TURNS, policy="full")
        assert cache.last.exact_prefix_tokens == cache.last.spans[0].start
        check_equal(close, filled(out), replay(lab.model, lab.inputs(asked + TURNS), []))


def test_growing_series_of_pictures(lab: Lab, close: Any) -> None:
    """Each prompt adds a picture: those before are exact, the new one is captured."""
    pictures = [make_picture(seed) for seed in (1, 2, 3)]
    with lab.cache("none", prefix_cache=True) as cache:
        for n in (1, 2, 3):
            chat = lab.chat(*pictures[:n], "what changed?")
            out = cache.prefill(chat)
            assert [s.outcome for s in cache.last.spans] == ["prefix"] * (n - 1) + ["new"]
            check_equal(close, filled(out), replay(lab.model, lab.inputs(chat), []))
        assert cache.counters.encoded == 3
        assert all(entry.has_kv for entry in cache.store._entries.values())


def test_a_repaired_picture_behind_an_exact_prefix(lab: Lab, close: Any) -> None:
    """The text before is taken exactly, the picture is moved and repaired, the question is computed."""
    known, system = make_picture(1), "A system prompt that both share. " * 3
    policy = Layered((0.5, 0.3, 0.2, 0.1))
    first, second = lab.chat(known, "q"), lab.chat(known, "What is shown?", system=system)
    with lab.cache(policy, prefix_cache=True) as cache:
        cache.prefill(first)
        cache.prefill(lab.chat(make_picture(2), "q", system=system))
        ours = filled(cache.prefill(second))
        assert [s.outcome for s in cache.last.spans] == ["reused"]
        assert cache.last.exact_prefix_tokens == cache.last.spans[0].start
        source, there = lab.inputs(first), lab.inputs(second)
        ((at, n),), ((start, _),) = picture_runs(lab.model, source), picture_runs(lab.model, there)
        reused = Reused(start, n, record(lab.model, source), at, computed(cache.last, policy, n))
        check_equal(close, ours, replay(lab.model, there, [reused]))


def test_turned_off(one_lab: Lab) -> None:
    chat = one_lab.chat(make_picture(1), "q")
    for options in ({"prefix_cache": False}, {"prefix_gb": 0, "prefix_cache": True}):
        with one_lab.cache("none", **options) as cache:
            cache.prefill(chat)
            cache.prefill(chat)
            assert cache.last.exact_prefix_tokens == 0


def prefix(ids: list[int], spans: tuple[Span, ...] = ()) -> ExactPrefix:
    kv = [torch.zeros(1, 1, len(ids), 4)]
    return ExactPrefix(torch.tensor(ids), spans, kv, kv)


A, B = Span("a", 2, 3, (1, 2, 6)), Span("b", 2, 3, (1, 2, 6))


@pytest.mark.parametrize(
    ("spans", "ids", "common"),
    [
        ((A,), [1, 2, 9, 9, 9, 5, 6], 7),
        ((A,), [1, 2, 9, 9, 9, 5, 7], 6),
        ((B,), [1, 2, 9, 9, 9, 5, 6], 2),
        ((A,), [1, 2, 9, 9], 2),
        ((), [1, 2, 3], 2),
        ((), [3, 2, 3], 0),
        ((Span("a", 2, 3, (1, 6, 2)),), [1, 2, 9, 9, 9, 5, 6], 2),
    ],
    ids=["all", "text differs", "picture differs", "cut inside", "no picture", "nothing", "grid differs"],
)
def test_common_tokens_stop_at_a_pictures_edge(spans: tuple[Span, ...], ids: list[int], common: int) -> None:
    assert prefix([1, 2, 9, 9, 9, 5, 6], (A,)).common(torch.tensor(ids), spans) == common


def test_the_longest_is_found_and_the_oldest_goes() -> None:
    size = prefix([0] * 10).nbytes
    kept = ExactPrefixes(2 * size)
    one, two, three = (prefix([n] * 10) for n in (1, 2, 3))
    assert kept.put(one)
    assert kept.put(two)
    assert kept.longest(torch.tensor([1] * 12), ()) == (one, 10)
    assert kept.put(three)
    assert kept.longest(two.ids, ()) == (None, 0)
    assert kept.longest(one.ids, ())[1] == 10
    assert kept.held_bytes == 2 * size
    assert not kept.put(prefix([4] * 30))


def test_a_prompt_replaces_the_one_that_it_continues() -> None:
    kept = ExactPrefixes(10**6)
    assert kept.put(prefix([1, 2, 3]))
    assert kept.put(prefix([1, 2, 3, 4]))
    assert kept.held_bytes == prefix([1, 2, 3, 4]).nbytes
    assert not kept.put(prefix([1, 2]))


def test_cutting_does_not_hold_on_to_the_rest() -> None:
    whole = torch.arange(40.0).view(1, 2, 5, 4)
    assert cut(whole, 5) is whole
    part = cut(whole, 2)
    assert torch.equal(part, whole[:, :, :2])
    assert part.untyped_storage().nbytes() == 2 * 2 * 4 * 4
