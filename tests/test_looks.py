"""Rules that measure in the middle of a pass, against a brute-force reference's scores and results, every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Lab, make_picture
from reference import Recording, Reused, picture_runs, record, replay
from test_exactness import check_equal, filled
from torch import Tensor

from vlcache.measure import attention_paid, moved_attention, moved_values
from vlcache.plan import make_plan, settle
from vlcache.policies import Band, CacheBlend, KVShare, Policy, parse_policy
from vlcache.policies.base import Evidence, Look, Rule
from vlcache.policies.share import highest
from vlcache.ranges import Ranges
from vlcache.types import Span

LAYERS = 4
A, B = make_picture(10), make_picture(11, 112, 196)


def best(scores: Tensor, count: int) -> set[int]:
    return set(scores.topk(count).indices.tolist())


def distance(fresh: Tensor, cached: Tensor) -> Tensor:
    return (fresh - cached).flatten(1).square().sum(1)


def cacheblend_sets(share: float) -> Callable[..., list[set[int]]]:
    def expected(lab: Lab, there: Any, recording: Recording, at: int, start: int, n: int) -> list[set[int]]:
        fresh = record(lab.model, there).values[1][start : start + n]
        chosen = best(distance(fresh, recording.values[1][at : at + n]), -(-round(share * 100) * n // 100))
        return [set(range(n)), set(range(n)), chosen, chosen]

    return expected


def kvshare_sets(share: float) -> Callable[..., list[set[int]]]:
    def expected(lab: Lab, there: Any, recording: Recording, at: int, start: int, n: int) -> list[set[int]]:
        """Attention of the text behind, from a full forward and from one whose layer 1 has the cached keys."""
        everything = [set(range(n))] * LAYERS
        only = [set(range(n)), set(), set(range(n)), set(range(n))]
        weights = []
        for sets in (everything, only):
            lab.model.set_attn_implementation("eager")
            seen: list[Tensor] = []
            layer = lab.model.model.language_model.layers[1].self_attn
            handle = layer.register_forward_hook(lambda m, i, o, seen=seen: seen.append(o[1][0]))
            replay(lab.model, there, [Reused(start, n, recording, at, sets)])
            handle.remove()
            lab.model.set_attn_implementation("sdpa")
            weights.append(seen[0][:, start + n :, start : start + n])
        chosen = best((weights[0] - weights[1]).abs().sum((0, 1)), -(-round(share * 100) * n // 100))
        return [*everything[:2], chosen, chosen]

    return expected


def band_sets(lab: Lab, there: Any, recording: Recording, at: int, start: int, n: int) -> list[set[int]]:
    """Enter at layer 1, choose a quarter at layer 2."""
    entered = [set(), set(range(n)), set(range(n)), set(range(n))]
    _, _, values = replay(lab.model, there, [Reused(start, n, recording, at, entered)])
    fresh = values[2][:, start : start + n].transpose(0, 1).flatten(1)
    chosen = best(distance(fresh, recording.values[2][at : at + n].flatten(1)), -(-n // 4))
    return [*entered[:3], chosen]


CASES = {
    "cacheblend:0.25": cacheblend_sets(0.25),
    "cacheblend:0.1": cacheblend_sets(0.1),
    "kvshare:0.25": kvshare_sets(0.25),
    "band:1,2,0.25": band_sets,
}


@pytest.mark.parametrize("text", CASES)
def test_a_rule_that_looks_chooses_and_computes_what_the_reference_does(lab: Lab, close: Any, text: str) -> None:
    first, second = lab.chat(A, "q"), lab.chat(A, "What is shown?", system="Another system prompt, of another length.")
    with lab.cache(text, checkpoint_layers=(1,)) as cache:
        cache.prefill(first)
        ours = filled(cache.prefill(second))
        source, there = lab.inputs(first), lab.inputs(second)
        ((at, n),), ((start, _),) = picture_runs(lab.model, source), picture_runs(lab.model, there)
        recording = record(lab.model, source)
        sets = CASES[text](lab, there, recording, at, start, n)
        assert cache.last.spans[0].rows == sum(map(len, sets))
        assert cache.last.rows == tuple(there["input_ids"].shape[1] - n + len(some) for some in sets)
        check_equal(close, ours, replay(lab.model, there, [Reused(start, n, recording, at, sets)]))


@pytest.mark.parametrize("text", ["cacheblend:0.2", "kvshare:0.2", "band:1,2,0.2"])
def test_each_of_several_pictures_has_its_own_share(lab: Lab, text: str) -> None:
    with lab.cache(text, checkpoint_layers=(1,)) as cache:
        cache.prefill(lab.chat(A, "q", B))
        cache.prefill(lab.chat(B, "and", A, "?", system="S"))
        sizes = {span.content: (span.tokens, span.rows) for span in cache.last.spans}
        assert len(sizes) == 2
        for tokens, rows in sizes.values():
            few = -(-tokens // 5)
            assert rows == (2 * tokens + few if text.startswith("band") else 2 * (tokens + few))


@pytest.mark.parametrize("text", ["cacheblend:1", "kvshare:1", "band:0,2,1", "band:0,4,0.1", "random:1"])
def test_share_one_equals_the_full_forward(lab: Lab, close: Any, text: str) -> None:
    chat = lab.chat(A, "What is shown?", system="Another system prompt.")
    with lab.cache(text) as cache:
        cache.prefill(lab.chat(A, "q"))
        check_equal(close, filled(cache.prefill(chat)), replay(lab.model, lab.inputs(chat), []))
        assert cache.last.computed_share == 1


def test_policies_side_by_side_give_what_each_gives_alone(one_lab: Lab, close: Any) -> None:
    policies = [
        "full",
        "cacheblend:0.2",
        "prefix:0.3",
        "kvshare:0.2",
        "band:1,2,0.2",
        "none",
        "cacheblend:0.5",
        "random:0.2",
    ]
    chats = [
        one_lab.chat("look", A, "and", B, text, system="S")
        for text in ("What is shown?", "Which is larger, the first?")
    ]
    answer = [5, 6, 7]
    with one_lab.cache("none", checkpoint_layers=(1,)) as cache:
        cache.prefill(one_lab.chat(B, A, "q"))
        together = cache.score_each(chats, [answer] * 2, policies)
        for chat, some in zip(chats, together, strict=True):
            for policy, one in zip(policies, some, strict=True):
                alone = cache.score_each([chat], [answer], [policy])[0][0]
                close(one.logits, alone.logits, 1e-4)
                assert one.report.spans == alone.report.spans
                assert one.report.rows == alone.report.rows
                assert one.report.policy == policy


def test_attention_paid_is_a_causal_softmax() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 3, 8), torch.randn(10, 2, 8)
    paid = attention_paid(queries * 0.3, keys, ((2, 4), (9, 10)))
    for row, index in enumerate((2, 3, 9)):
        for head in range(4):
            scores = keys[: index + 1, head // 2] @ queries[head, row] * 0.3
            assert torch.allclose(paid[head, row, : index + 1], scores.softmax(0), atol=1e-6)
            assert not paid[head, row, index + 1 :].any()


def test_attention_moves_where_keys_do() -> None:
    torch.manual_seed(0)
    queries, keys = 0.3 * torch.randn(4, 200, 8), torch.randn(210, 2, 8)
    cached = keys[2:8].clone()
    assert not moved_attention(queries, keys, cached, ((10, 210),), 2).any()
    cached[3] += 1
    moved = moved_attention(queries, keys, cached, ((10, 210),), 2)
    assert moved.argmax() == 3
    whole = attention_paid(queries, keys, ((10, 210),))
    keys[5] += 1
    expected = (attention_paid(queries, keys, ((10, 210),)) - whole)[:, :, 2:8].abs().sum((0, 1))
    assert torch.allclose(moved, expected, rtol=1e-4)


def test_values_move_by_their_squared_distance() -> None:
    fresh, cached = torch.zeros(3, 2, 4, dtype=torch.bfloat16), torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    fresh[1, 0, 0], fresh[1, 1, 3] = 3.0, 4.0
    assert moved_values(fresh, cached).tolist() == [0.0, 25.0, 0.0]


def test_the_highest_scores_are_taken_and_the_earlier_of_two_alike() -> None:
    assert highest((0.1, 0.9, 0.9, 0.9, 0.2), 2, 5) == ((1, 3),)
    assert highest((0.9, 0.1, 0.0, 0.5, 0.2), 3, 5) == ((0, 1), (3, 5))
    assert highest(None, 3, 5) == ((0, 3),)
    assert highest(None, 0, 5) == highest((0.0,) * 5, 0, 5) == ()


@pytest.mark.parametrize("policy", [CacheBlend(0.3), KVShare(0.3), Band(1, 2, 0.3)])
def test_a_plan_knows_its_size_before_the_look(policy: Policy) -> None:
    span = Span("a", 3, 10, (1, 2, 20))
    plan = make_plan(policy, [span], [Evidence(LAYERS, (1,))], 0, 20, LAYERS)
    settled = settle(plan, policy, [tuple(float(i) for i in range(10))])
    assert plan.rows_per_layer() == settled.rows_per_layer()
    assert plan.rows(3) != settled.rows(3)
    assert settled.spans[0].rows[3] == ((7, 10),)
    assert settled.look is None
    assert settle(plan, policy, [(0.0,) * 10]).spans[0].rows == plan.spans[0].rows


class Growing(Rule):
    """Asks for more behind the look than is there."""

    name = "growing"

    def look(self, layers: int) -> Look | None:
        return Look(1, "values")

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return ((0, 2),) if layer < 2 or evidence.scores is None else ((1, 6),)


@pytest.mark.parametrize(("checkpoints", "expected"), [((), ((1, 2),)), ((2,), ((1, 6),))])
def test_rows_that_are_gone_do_not_come_back(checkpoints: tuple[int, ...], expected: Ranges) -> None:
    policy = Growing()
    plan = make_plan(policy, [Span("a", 3, 10, (1, 2, 20))], [Evidence(LAYERS, checkpoints)], 0, 20, LAYERS)
    settled = settle(plan, policy, [(0.0,) * 10])
    assert settled.spans[0].rows == (((0, 2),), ((0, 2),), expected, expected)


def test_a_look_beyond_the_model_is_refused(one_lab: Lab) -> None:
    from vlcache.errors import ConfigError

    with pytest.raises(ConfigError, match="looks at layer 3"):
        make_plan(_Late(), [Span("a", 3, 10, (1, 2, 20))], [Evidence(LAYERS)], 0, 20, LAYERS)
    with pytest.raises(ConfigError, match=r"band: layers 3 to 2"):
        parse_policy("band:3,2,0.5")


class _Late(Growing):
    def look(self, layers: int) -> Look | None:
        return Look(3, "values")
