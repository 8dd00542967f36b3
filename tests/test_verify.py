"""Reuse that verifies itself: what is looked at, what each stage computes, what comes out, against the reference."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import Lab, make_picture
from reference import Recording, Reused, picture_runs, record, replay
from test_exactness import bare, check_equal, filled
from torch import Tensor

from vlcache import VLCache
from vlcache.context import TurnMarks, compare, contexts
from vlcache.engines.transformers.prompt import turn_marks
from vlcache.errors import ConfigError
from vlcache.measure import divergence
from vlcache.policies import Auto, Band, Check, Evidence, Look, Prefix, Repair, Rule, Verified
from vlcache.ranges import Ranges
from vlcache.types import Span

LAYERS = 4
A, B = make_picture(10), make_picture(11, 112, 196)
NEVER, ALWAYS = 0.0, 1e9
"""Tau that takes no answer for unmoved, and one that takes every answer."""
ALL = 10_000
"""Probes: every token of a picture."""


@dataclass(frozen=True)
class WholeTail(Rule):
    """Verified, but its check computes all text behind the pictures again, so that a reference can say the result."""

    verified: Verified
    name: str = "whole tail"

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return self.verified.checkpoints

    @property
    def check(self) -> Check | None:
        check = self.verified.check
        assert check is not None
        return replace(check, text=10_000)

    def look(self, layers: int) -> Look | None:
        return self.verified.look(layers)

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return self.verified.rows(span, layer, evidence)


def captured(lab: Lab, cache: VLCache, chat: Any) -> tuple[Recording, list[tuple[int, int]]]:
    cache.prefill(chat)
    inputs = lab.inputs(chat)
    return record(lab.model, inputs), picture_runs(lab.model, inputs)


def most_attended(lab: Lab, inputs: Any, reused: list[Reused], probes: int, but: Collection[int] = ()) -> list[int]:
    """By eager attention of the last rows in layers 2 and 3, on the cached K/V of `reused`."""
    seen: list[Tensor] = []
    lab.model.set_attn_implementation("eager")
    layers = lab.model.model.language_model.layers
    handles = [layer.self_attn.register_forward_hook(lambda m, i, o: seen.append(o[1][0])) for layer in layers]
    replay(lab.model, inputs, reused)
    for handle in handles:
        handle.remove()
    lab.model.set_attn_implementation("sdpa")
    tail = reused[-1].start + reused[-1].length
    rows = [weights.mean(0)[tail:] for weights in seen[2:]]
    rows[-1] = rows[-1][-1:]  # in the last layer there is no other
    paid = sum(its[-1] + its.mean(0) for its in rows)
    inside = [i for r in reused for i in range(r.start, r.start + r.length) if i not in but]
    return sorted(sorted(inside, key=lambda i: -float(paid[i]))[:probes])


def sets(*layers: set[int]) -> list[set[int]]:
    return list(layers) if len(layers) == LAYERS else list(layers) * LAYERS


def test_an_answer_that_stays_stands(lab: Lab, close: Any) -> None:
    """The check's tokens are those attended to most; what it computes is what a reference computes of just them."""
    second = lab.chat("Look at this.", A, "What is shown?", system="S")
    with lab.cache(WholeTail(Verified(ALWAYS, 5, 1))) as cache:
        recording, ((at, n),) = captured(lab, cache, lab.chat("Here.", A, "q"))
        ours = filled(cache.prefill(second))
        inputs = lab.inputs(second)
        ((start, _),) = picture_runs(lab.model, inputs)
        naive = [Reused(start, n, recording, at, sets(set()))]
        looked_at = most_attended(lab, inputs, naive, 5)
        verdict = cache.last.verdict
        assert verdict.result == "safe"
        assert list(verdict.looked_at) == looked_at
        fresh = [replace(naive[0], computed=sets({i - start for i in looked_at}))]
        check_equal(close, ours, replay(lab.model, inputs, fresh))
        moved = divergence(replay(lab.model, inputs, fresh)[0], replay(lab.model, inputs, naive)[0])
        assert verdict.moved == (pytest.approx(moved, rel=1e-2, abs=1e-6),)
        assert cache.last.spans[0].rows == 5 * LAYERS
        assert cache.counters.verified == {"safe": 1}


def test_an_answer_that_moves_is_computed_again_exactly(lab: Lab, close: Any) -> None:
    second = lab.chat("Look at this.", A, "What is shown?", system="S")
    plain = lab.model.generate(**lab.inputs(second), max_new_tokens=16, min_new_tokens=16)
    with lab.cache(Verified(NEVER, 5, 1)) as cache:
        cache.prefill(lab.chat("Here.", A, "q"))
        check_equal(close, filled(cache.prefill(second)), replay(lab.model, lab.inputs(second), []))
        assert cache.last.verdict.result == "recomputed"
        assert len(cache.last.verdict.moved) == 2
        tokens = lab.model.generate(**cache.prefill(second), max_new_tokens=16, min_new_tokens=16)
        assert torch.equal(tokens, plain)
        assert cache.counters.verified == {"recomputed": 2}
        assert cache.counters.encoded == 1
        n = cache.last.spans[0].tokens
        assert cache.last.spans[0].rows == (5 + n) * LAYERS


def test_recomputed_kv_are_exact_and_serve_as_a_prefix(one_lab: Lab) -> None:
    second = one_lab.chat("Look at this.", A, "What is shown?", system="S")
    with one_lab.cache(Verified(NEVER, 5, 1), prefix_cache=True) as cache:
        cache.prefill(one_lab.chat("Here.", A, "q"))
        cache.prefill(second)
        assert cache.last.verdict.result == "recomputed"
        cache.prefill(second)
        assert [span.outcome for span in cache.last.spans] == ["prefix"]
    with one_lab.cache(Verified(ALWAYS, 5, 1), prefix_cache=True) as cache:
        cache.prefill(one_lab.chat("Here.", A, "q"))
        cache.prefill(second)
        assert cache.last.verdict.result == "safe"
        cache.prefill(second)
        assert [span.outcome for span in cache.last.spans] == ["reused"]


def settled_by_the_band(lab: Lab, cache: VLCache) -> tuple[Any, Any, float]:
    """Two prompts, and a tau between what the check moves the second one's answer by and what the band then does."""
    for seed in range(20, 60):
        picture = make_picture(seed)
        first = lab.chat("Here.", picture, "q")
        second = lab.chat("Look at this.", picture, "What is shown?", system="S")
        cache.prefill(first)
        cache.prefill(second)
        probed, repaired, _ = cache.last.verdict.moved
        if repaired < probed:
            return first, second, (probed + repaired) / 2
    pytest.fail("no picture's band moves its answer less than its check")


def test_a_repair_is_its_band_and_the_text_behind_it(lab: Lab, close: Any) -> None:
    """A tau between what the check and what the repair move leads through all stages of that case."""
    band = Band(1, 9, 1.0)
    with lab.cache(Verified(NEVER, ALL, 1, band)) as cache:
        first, second, tau = settled_by_the_band(lab, cache)
        recording, ((at, n),) = captured(lab, cache, first)
        inputs = lab.inputs(second)
        ((start, _),) = picture_runs(lab.model, inputs)
        expected = replay(lab.model, inputs, [Reused(start, n, recording, at, [set(), *[set(range(n))] * 3])])
        logits, keys, values = filled(cache.prefill(second, policy=Verified(tau, ALL, 1, band)))
        assert cache.last.verdict.result == "repaired"
        close(logits, expected[0], 1e-4)
        for layer in range(1, LAYERS):
            close(keys[layer], expected[1][layer], 1e-4)
            close(values[layer], expected[2][layer], 1e-4)
        cache.prefill(second, policy=Verified(ALWAYS, ALL, 1, band))
        assert cache.last.verdict.result == "safe"


def test_a_moving_answer_is_looked_at_again(lab: Lab, close: Any) -> None:
    """Each look doubles what is fresh, of the tokens attended to then; the last one's result is the reference's."""
    second = lab.chat("Look at this.", A, "What is shown?", system="S")
    with lab.cache(WholeTail(Verified(NEVER, 3, 3))) as cache:
        recording, ((at, n),) = captured(lab, cache, lab.chat("Here.", A, "q"))
        cache.prefill(second)
        assert cache.last.verdict.result == "recomputed"
        assert len(cache.last.verdict.moved) == 3  # no check: the turn's own text differs
        assert len(cache.last.verdict.looked_at) == 12
        assert cache.last.spans[0].rows == (6 + 12 + n) * LAYERS
        inputs = lab.inputs(second)
        ((start, _),) = picture_runs(lab.model, inputs)
        naive = [Reused(start, n, recording, at, sets(set()))]
        one = most_attended(lab, inputs, naive, 6)
        fresh = [replace(naive[0], computed=sets({i - start for i in one}))]
        assert list(cache.last.verdict.looked_at) == sorted({*one, *most_attended(lab, inputs, fresh, 6, but=one)})
        cache.prefill(second, policy=WholeTail(Verified(NEVER, 3, 2)))
        assert list(cache.last.verdict.looked_at) == one


def test_earlier_pictures_are_checked_first_with_the_answering_row_alone(one_lab: Lab) -> None:
    lab, small = one_lab, make_picture(12, 56, 56)
    turns = [*lab.chat(small, "what?"), {"role": "assistant", "content": "a thing"}, lab.chat(A, "which?")[1]]
    with lab.cache(Verified(ALWAYS, 5)) as cache:
        cache.prefill(lab.chat(small, "what?"))
        cache.prefill(lab.chat(A, "q"))
        cache.prefill(turns)
        seen, asked = cache.last.spans
        text = cache.last.prompt_tokens - seen.tokens - asked.tokens
        assert cache.last.verdict.result == "safe"
        assert cache.last.rows == (text + 5 + 1,) * LAYERS
        assert (seen.rows, asked.rows) == (0, 5 * LAYERS)
        cache.prefill(turns, policy=Verified(NEVER, 5))
        assert cache.last.verdict.result == "recomputed"
        assert len(cache.last.verdict.moved) == 4
        assert cache.last.spans[1].rows == (5 + 10 + 20 + asked.tokens) * LAYERS


@dataclass(frozen=True)
class Sure(WholeTail):
    """Verified, but the answer of any look is sure enough."""

    @property
    def check(self) -> Check | None:
        check = self.verified.check
        assert check is not None
        return replace(check, sure=0.0)


def test_a_sure_answer_of_a_look_is_taken_but_not_a_checks(one_lab: Lab) -> None:
    lab, policy = one_lab, Sure(Verified(NEVER, 5))
    assert stages(lab, policy, lab.chat("Here.", A, "q"), lab.chat("There.", A, "q")) == ("repaired", [10 * LAYERS])
    with lab.cache(policy) as cache:
        cache.prefill(lab.chat(B, "what?"))
        cache.prefill(lab.chat(A, "q"))
        cache.prefill([*lab.chat(B, "what?"), {"role": "assistant", "content": "b"}, lab.chat(A, "which?")[1]])
        assert cache.last.verdict.result == "repaired"
        assert cache.last.spans[1].rows == (5 + 10) * LAYERS


def test_an_unsure_answer_that_stays_is_taken_only_where_nothing_says_how_sure_it_should_be(one_lab: Lab) -> None:
    chats = one_lab.chat("Here.", A, "q"), one_lab.chat("There.", A, "q")
    assert stages(one_lab, Verified(ALWAYS, 5), *chats) == ("safe", [10 * LAYERS])
    assert stages(one_lab, Verified(ALWAYS, 5, sure=0.9, calm=False), *chats)[0] == "recomputed"
    assert stages(one_lab, Verified(ALWAYS, 5, sure=0.0, calm=False), *chats) == ("safe", [10 * LAYERS])


def test_an_answer_that_settles_at_a_later_look_is_repaired(one_lab: Lab) -> None:
    """Of many pictures some do; a tau between what the first and what the second look moved ends it there."""
    settled = 0
    for seed in range(20, 32):
        picture = make_picture(seed)
        with one_lab.cache(Verified(NEVER, 3, 3)) as cache:
            cache.prefill(one_lab.chat("Here.", picture, "q"))
            chat = one_lab.chat("Look at this.", picture, "What is shown?")
            cache.prefill(chat)
            first, again, _ = cache.last.verdict.moved
            if again < first:
                cache.prefill(chat, policy=Verified((first + again) / 2, 3, 3))
                assert cache.last.verdict.result == "repaired"
                assert cache.last.verdict.moved == pytest.approx((first, again))
                assert cache.last.spans[0].rows == (6 + 12) * LAYERS
                settled += 1
    assert settled > 0


def test_a_front_is_repaired_until_a_block_agrees(lab: Lab, close: Any) -> None:
    """eps 0: every block, and so everything; an eps that all keep: the first block. Deviations are the reference's."""
    second = lab.chat("Look at this.", A, "What is shown?", system="S")
    with lab.cache(Repair(0.0, 5)) as cache:
        recording, ((at, n),) = captured(lab, cache, lab.chat("Here.", A, "q"))
        inputs = lab.inputs(second)
        ((start, _),) = picture_runs(lab.model, inputs)
        check_equal(close, filled(cache.prefill(second)), replay(lab.model, inputs, []))
        deviations = cache.last.verdict.moved
        assert len(deviations) == -(-n // 5)
        assert cache.last.spans[0].rows == n * LAYERS
        _, _, values = replay(lab.model, inputs, [Reused(start, n, recording, at, sets(set(range(5))))])
        expected = []
        for layer in range(LAYERS // 2, LAYERS):
            fresh = values[layer][:, start : start + 5].transpose(0, 1).flatten(1)
            cached = recording.values[layer][at : at + 5].flatten(1)
            expected.append(((fresh - cached).norm(dim=1) / cached.norm(dim=1)).mean())
        assert deviations[0] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-3)
        ours = filled(cache.prefill(second, policy=Repair(max(deviations) * 1.01, 5)))
        assert cache.last.spans[0].rows == 5 * LAYERS
        check_equal(close, ours, replay(lab.model, inputs, [Reused(start, n, recording, at, sets(set(range(5))))]))


def stages(lab: Lab, policy: Any, first: Any, second: Any, **options: Any) -> tuple[str, list[int]]:
    with lab.cache(policy, **options) as cache:
        cache.prefill(first)
        cache.prefill(second)
        return cache.last.verdict.result, [span.rows for span in cache.last.spans]


def test_what_is_checked_is_what_may_have_been_read_into_the_picture(one_lab: Lab) -> None:
    lab, policy = one_lab, Verified(ALWAYS, 5, 1)
    first = lab.chat("Here.", A, "q")
    turns = [*lab.chat(B, "what?"), {"role": "assistant", "content": "a thing"}]
    later = [*turns, lab.chat("Here.", A, "what?")[1]]
    talk = [*lab.chat("Hello"), {"role": "assistant", "content": "Hi"}, lab.chat("Here.", A, "what?")[1]]
    assert stages(lab, policy, first, lab.chat("Here.", A, "what?", system="S")) == ("skipped", [0])
    assert stages(lab, policy, first, talk) == ("skipped", [0])
    assert stages(lab, policy, first, lab.chat("There.", A, "what?")) == ("safe", [20])
    bare_first = [{"role": "user", "content": [{"type": "image", "image": A}, {"type": "text", "text": "q"}]}]
    again = [*lab.chat("Hello"), {"role": "assistant", "content": "Hi"}, bare_first[0]]
    assert stages(lab, policy, bare_first, again) == ("skipped", [0])
    assert stages(lab, policy, first, later)[0] == "safe"
    assert stages(lab, policy, lab.chat(A, B, "q"), lab.chat(B, A, "q"))[0] == "safe"
    assert stages(lab, policy, lab.chat(A, B, "q"), lab.chat(A, B, "q", system="S")) == ("skipped", [0, 0])


def test_only_the_suspicious_picture_is_checked_and_all_behind_it_is_recomputed(one_lab: Lab) -> None:
    lab = one_lab
    with lab.cache(Verified(ALWAYS, 5, 1)) as cache:
        first = [*lab.chat(A, "q"), {"role": "assistant", "content": "a"}, lab.chat("Here.", B, "q")[1]]
        cache.prefill(first)
        second = [*lab.chat(A, "q", system="S"), {"role": "assistant", "content": "a"}, lab.chat("There.", B, "q")[1]]
        cache.prefill(second)
        (a, b) = cache.last.spans
        assert cache.last.verdict.result == "safe"
        assert (a.rows, b.rows) == (0, 5 * LAYERS)
        assert all(b.start <= i < b.start + b.tokens for i in cache.last.verdict.looked_at)
        cache.prefill(second, policy=Verified(NEVER, 5, 1))
        (a, b) = cache.last.spans
        assert (a.rows, b.rows) == (0, (5 + b.tokens) * LAYERS)


def test_a_new_picture_that_is_computed_twice_counts_twice(one_lab: Lab) -> None:
    lab = one_lab
    with lab.cache(Verified(NEVER, 5, 1)) as cache:
        cache.prefill(lab.chat("Here.", A, "q"))
        cache.prefill(lab.chat("There.", A, B, "Which of them is larger than the other one, and by how many dots?"))
        known, new = cache.last.spans
        assert cache.last.verdict.result == "recomputed"
        assert (known.outcome, new.outcome) == ("reused", "new")
        assert new.rows == 2 * new.tokens * LAYERS
        assert known.rows == (5 + known.tokens) * LAYERS


def test_pictures_of_the_turn_that_changed_are_not_repaired_in_part(one_lab: Lab) -> None:
    policy = Verified(NEVER, 5, 1, Band(1, 2, 0.25))
    result, rows = stages(one_lab, policy, one_lab.chat(A, B, "q"), one_lab.chat(B, A, "q"))
    assert result == "recomputed"
    with one_lab.cache(policy) as cache:
        cache.prefill(one_lab.chat(A, B, "q"))
        cache.prefill(one_lab.chat(B, A, "q"))
        assert sum(rows) == (2 * 5 + cache.last.vision_tokens) * LAYERS


def test_an_entry_without_the_checkpoint_is_repaired_from_the_first_layer(one_lab: Lab) -> None:
    lab, band = one_lab, Band(2, 9, 1.0)
    first, second = lab.chat("Here.", A, "q"), lab.chat("There.", A, "what?")
    with lab.cache("none") as cache:
        cache.prefill(first)
        cache.prefill(second, policy=Verified(NEVER, 5, 1, band))
        n = cache.last.spans[0].tokens
        assert cache.last.spans[0].rows == (5 + 2 * n) * LAYERS
    result, (rows,) = stages(lab, Verified(NEVER, 5, 1, band), first, second)
    assert (result, rows) == ("recomputed", 5 * LAYERS + 2 * n + n * LAYERS)


@pytest.mark.parametrize("base", [Prefix(0.25), Prefix(1)])
def test_another_rule_may_come_first(lab: Lab, close: Any, base: Prefix) -> None:
    second = lab.chat("Look at this.", A, "What is shown?", system="S")
    with lab.cache(Verified(NEVER, 5, 1, base=base)) as cache:
        cache.prefill(lab.chat("Here.", A, "q"))
        check_equal(close, filled(cache.prefill(second)), replay(lab.model, lab.inputs(second), []))
        assert cache.last.verdict.result == ("skipped" if base.ratio == 1 else "recomputed")


def test_a_picture_that_ends_the_prompt(lab: Lab, close: Any) -> None:
    """The answering row is then one of the picture's own."""
    first, second = bare(lab, "an earlier prompt", A, "q"), bare(lab, "look at this", A, "")
    for tau, result in ((ALWAYS, "safe"), (NEVER, "recomputed")):
        with lab.cache(Verified(tau, 5, 1)) as cache:
            cache.prefill(first)
            logits, _, _ = filled(cache.prefill(second))
            assert cache.last.verdict.result == result
    close(logits, replay(lab.model, second, [])[0], 1e-4)


def test_scores_are_those_of_the_prompt_that_is_generated_from(one_lab: Lab, close: Any) -> None:
    """Side by side with other rules and questions as alone, and the first row as a prefill has it."""
    lab = one_lab
    policies = ["none", Verified(ALWAYS, 5, 1), Verified(NEVER, 5, 1), Verified(NEVER, 5, 1, Band(1, 2, 0.5)), "full"]
    chats = [lab.chat("There.", A, "and", B, text) for text in ("What is shown?", "Which is larger?")]
    with lab.cache("none", checkpoint_layers=(1,)) as cache:
        cache.prefill(lab.chat("Here.", A, "and", B, "q"))
        together = cache.score_each(chats, [[5, 6, 7]] * 2, policies)
        for chat, some in zip(chats, together, strict=True):
            for policy, one in zip(policies, some, strict=True):
                alone = cache.score_each([chat], [[5, 6, 7]], [policy])[0][0]
                close(one.logits, alone.logits, 1e-4)
                assert one.report.spans == alone.report.spans
                assert (one.report.verdict is None) == isinstance(policy, str)
                if one.report.verdict is not None:
                    assert one.report.verdict.result == alone.report.verdict.result
                logits, _, _ = filled(cache.prefill(chat, policy=policy))
                close(one.logits[0], logits, 1e-4)
            close(some[2].logits, some[-1].logits, 1e-4)


def test_a_decoded_answer_goes_on_from_what_was_checked(one_lab: Lab) -> None:
    lab = one_lab
    chat = lab.chat("There.", A, "What is shown?")
    with lab.cache(Verified(ALWAYS, 5, 1)) as cache:
        cache.prefill(lab.chat("Here.", A, "q"))
        out = cache.prefill(chat)
        start = out["input_ids"].shape[1]
        tokens = lab.model.generate(**out, max_new_tokens=6, min_new_tokens=6)[0, start:].tolist()
        scores = cache.score(chat, tokens)
        assert scores.argmax(-1).tolist() == tokens


def test_pictures_and_text_that_both_changed_count_as_pictures(one_lab: Lab) -> None:
    """A band may do for text alone; with other pictures before it is checked."""
    lab = one_lab
    answer = {"role": "assistant", "content": "a thing"}
    first = [*lab.chat(make_picture(40), "key"), answer, lab.chat("By the key:", A, "q")[1]]
    second = [*lab.chat(make_picture(41), "key"), answer, lab.chat("By that key:", A, "q")[1]]
    auto = Auto(Verified(ALWAYS, 5, 1), Band(1, 2, 0.5))
    with lab.cache(auto) as cache:
        cache.prefill(first)
        cache.prefill(second)
        assert cache.last.verdict.result == "safe"
        assert cache.last.spans[1].rows == 5 * LAYERS
        cache.prefill([first[0], first[1], answer, lab.chat("By that key:", A, "q")[1]])
        assert cache.last.verdict.result == "skipped"


def test_a_word_that_ends_texts_but_no_turn_hides_nothing(one_lab: Lab) -> None:
    """A stop token that the chat template does not write is text: what stands before it in the turn still counts."""
    lab = one_lab
    marks = turn_marks(lab.model, lab.processor)
    assert marks.ends == {lab.processor.tokenizer.eos_token_id}
    other = lab.processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    own = lab.model.generation_config.eos_token_id
    lab.model.generation_config.eos_token_id = [lab.processor.tokenizer.eos_token_id, other]
    try:
        assert turn_marks(lab.model, lab.processor) == marks
    finally:
        lab.model.generation_config.eos_token_id = own


def test_where_a_neighbour_stands_in_the_text_counts() -> None:
    ids = torch.arange(20)
    a, b = Span("a", 3, 2, (1, 2, 4)), Span("b", 10, 2, (1, 2, 4))
    moved = torch.cat((ids[:3], ids[5:8], ids[3:5], ids[8:]))
    one = contexts(ids, [a, b], TurnMarks(), "scope")[1]
    other = contexts(moved, [Span("a", 6, 2, (1, 2, 4)), b], TurnMarks(), "scope")[1]
    assert one.neighbours == other.neighbours
    assert one.turn != other.turn
    assert compare(one, other) == "turn"
    assert compare(None, one) == "neighbours"
    assert contexts(ids, [a, b], TurnMarks(), "another")[1].turn != one.turn


def test_what_is_no_number_has_moved() -> None:
    logits = torch.tensor([1.0, 2.0, float("-inf")])
    assert divergence(logits, logits) == 0.0
    assert divergence(torch.tensor([1.0, float("nan"), 0.0]), logits) == float("inf")
    assert divergence(torch.tensor([1.0, 2.0, 0.0]), logits) == float("inf")


@pytest.mark.parametrize("policy", ["band:99,120,1", "verified:0.3,12,3,99,120,1", "cacheblend:0.1"])
def test_a_rule_that_does_not_fit_the_model_is_refused_before_any_work(one_lab: Lab, policy: str) -> None:
    with one_lab.cache("none") as cache:
        cache.prefill(one_lab.chat("Here.", A, "q"))
        if policy == "cacheblend:0.1":  # fits
            cache.prefill(one_lab.chat("There.", A, "q"), policy=policy)
            return
        with pytest.raises(ConfigError, match="beyond the model's 4"):
            cache.prefill(one_lab.chat("There.", A, "q"), policy=policy)
        assert cache.counters.reused == 0


def test_a_repair_leaves_fresh_what_is(one_lab: Lab, close: Any) -> None:
    """The band's pass computes its own rows; what the looks have computed above it stays."""
    lab, band = one_lab, Band(1, 1, 0.0)
    with lab.cache(Verified(NEVER, ALL, 1, band)) as cache:
        _, chat, tau = settled_by_the_band(lab, cache)
        looked_at = list(cache.last.verdict.looked_at)
        _, keys, _ = filled(cache.prefill(chat, policy=Verified(ALWAYS, ALL, 1)))
        _, after, _ = filled(cache.prefill(chat, policy=Verified(tau, ALL, 1, band)))
        assert cache.last.verdict.result == "repaired"
        close(after[3][:, looked_at], keys[3][:, looked_at], 1e-5)
