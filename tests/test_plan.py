"""Plans: what a policy asks for is made executable, and the steps say all that a driver needs."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache.plan import LayerStep, Plan, SpanPlan, plan_span
from vlcache.policies import Evidence, Rule, parse_policy
from vlcache.ranges import Ranges, normal
from vlcache.types import Span

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

LAYERS = 5


@dataclass(frozen=True)
class Asked(Rule):
    """A policy that asks for what the test says."""

    per_layer: tuple[Ranges, ...]
    name: str = "asked"

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return self.per_layer[layer]


def as_set(ranges: Ranges) -> set[int]:
    return {i for start, stop in ranges for i in range(start, stop)}


def as_ranges(values: set[int]) -> Ranges:
    return normal((i, i + 1) for i in values)


def make_span(start: int, length: int) -> Span:
    return Span(f"picture at {start}", start, length, (1, 2, 2 * length))


@st.composite
def asked_rows(draw: st.DrawFn, length: int) -> Asked:
    return Asked(tuple(as_ranges(draw(st.sets(st.integers(0, length - 1)))) for _ in range(LAYERS)))


checkpoint_layers = st.sets(st.integers(1, LAYERS - 1)).map(lambda s: tuple(sorted(s)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A prompt with up to three reused pictures between texts, a part of it filled already."""
    begin = at = draw(st.integers(0, 3))
    spans = []
    for _ in range(draw(st.integers(0, 3))):
        spans.append(make_span(at + draw(st.integers(0, 3)), draw(st.integers(1, 8))))
        at = spans[-1].stop
    end = at + draw(st.integers(1, 4))
    want = as_ranges(draw(st.sets(st.integers(begin, end - 1), min_size=1)))
    treated = (plan_span(draw(asked_rows(s.length)), s, Evidence(LAYERS, draw(checkpoint_layers)), want) for s in spans)
    return Plan(begin, end, LAYERS, want, tuple(treated))


@given(st.data(), st.integers(1, 12), checkpoint_layers)
def test_widened_rows_hold_the_asked_ones_and_lead_from_an_entrance(
    data: st.DataObject, length: int, checkpoints: tuple[int, ...]
) -> None:
    policy = data.draw(asked_rows(length))
    made = plan_span(policy, make_span(7, length), Evidence(LAYERS, checkpoints))
    rows = [as_set(r) for r in made.rows]
    assert len(rows) == LAYERS
    for layer in range(LAYERS):
        assert as_set(policy.per_layer[layer]) <= rows[layer] <= set(range(length))
        if layer and layer not in checkpoints:
            assert rows[layer] <= rows[layer - 1]


@given(st.data(), st.integers(1, 12), checkpoint_layers)
def test_widening_adds_only_rows_that_a_deeper_layer_needs(
    data: st.DataObject, length: int, checkpoints: tuple[int, ...]
) -> None:
    policy = data.draw(asked_rows(length))
    made = plan_span(policy, make_span(0, length), Evidence(LAYERS, checkpoints))
    for layer in range(LAYERS):
        needed = as_set(policy.per_layer[layer])
        for deeper in range(layer + 1, LAYERS):
            if deeper in checkpoints:
                break
            needed |= as_set(policy.per_layer[deeper])
        assert as_set(made.rows[layer]) == needed


@given(st.data(), st.integers(1, 8))
def test_rows_outside_the_span_are_dropped(data: st.DataObject, length: int) -> None:
    wild = data.draw(asked_rows(length + 5))
    made = plan_span(wild, make_span(3, length), Evidence(LAYERS))
    assert all(as_set(r) <= set(range(length)) for r in made.rows)


@given(st.data(), st.integers(1, 8), checkpoint_layers)
def test_wanted_tokens_of_a_span_are_computed_in_every_layer(
    data: st.DataObject, length: int, checkpoints: tuple[int, ...]
) -> None:
    policy, span = data.draw(asked_rows(length)), make_span(3, length)
    want = data.draw(st.sets(st.integers(0, 14)))
    made = plan_span(policy, span, Evidence(LAYERS, checkpoints), as_ranges(want))
    inside = {i - span.start for i in want} & set(range(length))
    without = plan_span(policy, span, Evidence(LAYERS, checkpoints))
    assert [as_set(r) for r in made.rows] == [as_set(r) | inside for r in without.rows]


def test_widening_by_hand_without_and_with_a_checkpoint() -> None:
    policy = Asked((((0, 2),), (), ((4, 6),), ((4, 5),), ()))
    span = make_span(0, 8)
    assert plan_span(policy, span, Evidence(LAYERS)).rows == (((0, 2), (4, 6)), ((4, 6),), ((4, 6),), ((4, 5),), ())
    assert plan_span(policy, span, Evidence(LAYERS, (2,))).rows == (((0, 2),), (), ((4, 6),), ((4, 5),), ())


def test_the_policy_is_told_layers_and_checkpoints() -> None:
    seen = []

    @dataclass(frozen=True)
    class Spy(Rule):
        name: str = "spy"

        def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
            seen.append((span, layer, evidence.layers, evidence.checkpoints))
            return ()

    span = make_span(2, 4)
    plan_span(Spy(), span, Evidence(3, (1, 2)))
    assert seen == [(span, layer, 3, (1, 2)) for layer in range(3)]


@given(plans())
def test_steps_tell_each_row_where_it_comes_from_and_goes(plan: Plan) -> None:
    steps = list(plan.steps())
    assert [s.layer for s in steps] == list(range(LAYERS))
    text = set(range(plan.begin, plan.end)) - {i for s in plan.spans for i in range(s.span.start, s.span.stop)}
    came: set[int] = set()
    for step in steps:
        rows, enter, keep = as_set(step.rows), as_set(step.enter), as_set(step.keep)
        assert rows == came | enter
        assert not came & enter
        assert keep <= rows
        assert rows == as_set(plan.rows(step.layer))
        assert text <= rows <= set(range(plan.begin, plan.end))
        came = keep
    assert came == as_set(plan.want), "the last layer keeps what is wanted and no more"
    assert as_set(steps[0].enter) == as_set(steps[0].rows)


@given(plans())
def test_a_kept_row_is_used_by_the_next_layer(plan: Plan) -> None:
    steps = list(plan.steps())
    for step, following in pairwise(steps):
        assert as_set(step.keep) == as_set(step.rows) & as_set(following.rows)


@given(plans())
def test_reuse_is_what_is_not_computed_of_each_span(plan: Plan) -> None:
    for step in plan.steps():
        assert len(step.reuse) == len(plan.spans)
        for treated, reuse in zip(plan.spans, step.reuse, strict=True):
            inside = set(range(treated.span.start, treated.span.stop))
            assert as_set(reuse) == inside - as_set(step.rows)
            assert {i - treated.span.start for i in inside - as_set(reuse)} == as_set(treated.rows[step.layer])


@given(plans())
def test_rows_enter_past_layer_zero_only_inside_a_span(plan: Plan) -> None:
    inside = {i for s in plan.spans for i in range(s.span.start, s.span.stop)}
    for step in list(plan.steps())[1:]:
        assert as_set(step.enter) <= inside


@given(st.data())
def test_rows_enter_only_where_a_checkpoint_is(data: st.DataObject) -> None:
    checkpoints = data.draw(checkpoint_layers)
    treated = plan_span(data.draw(asked_rows(8)), make_span(2, 8), Evidence(LAYERS, checkpoints))
    for step in Plan(0, 12, LAYERS, ((11, 12),), (treated,)).steps():
        assert not step.enter or step.layer == 0 or step.layer in checkpoints


def test_steps_by_hand() -> None:
    """Two text tokens, a picture of four that loses a row a layer, one text token."""
    treated = SpanPlan(make_span(2, 4), (((0, 2),), ((0, 1),)), Evidence(2))
    assert list(Plan(0, 7, 2, ((6, 7),), (treated,)).steps()) == [
        LayerStep(0, ((0, 4), (6, 7)), ((0, 4), (6, 7)), ((0, 3), (6, 7)), (((4, 6),),)),
        LayerStep(1, (), ((0, 3), (6, 7)), ((6, 7),), (((3, 6),),)),
    ]


def test_a_prompt_without_known_pictures_is_computed_in_full() -> None:
    plan = Plan(3, 9, LAYERS, ((8, 9),))
    for step in plan.steps():
        assert step.rows == ((3, 9),)
        assert step.reuse == ()
    assert plan.rows_per_layer() == (6,) * LAYERS
    assert plan.exact_until() == 9


@given(plans())
def test_rows_per_layer_counts_the_steps_rows(plan: Plan) -> None:
    assert plan.rows_per_layer() == tuple(len(as_set(step.rows)) for step in plan.steps())
    text = plan.end - plan.begin - sum(s.span.length for s in plan.spans)
    assert sum(plan.rows_per_layer()) == LAYERS * text + sum(s.computed for s in plan.spans)


@given(plans())
def test_exact_up_to_the_first_span_with_a_cached_token(plan: Plan) -> None:
    reused = [i for step in plan.steps() for r in step.reuse for i in as_set(r)]
    starts = [s.span.start for s in plan.spans if any(s.span.start <= i < s.span.stop for i in reused)]
    assert plan.exact_until() == min(starts, default=plan.end)
    for treated in plan.spans:
        assert treated.exact == (treated.span.start not in starts)


@pytest.mark.parametrize(
    ("policy", "exact"),
    [("full", True), ("prefix:1", True), ("layered:1,1", True), ("layered:1,0.9", False), ("none", False)],
)
def test_a_span_is_exact_only_if_every_token_is_computed_in_every_layer(policy: str, exact: bool) -> None:
    treated = plan_span(parse_policy(policy), make_span(4, 10), Evidence(2))
    assert treated.exact is exact
    assert Plan(0, 20, 2, ((19, 20),), (treated,)).exact_until() == (20 if exact else 4)


def contents(value: Any) -> list[Any]:
    """Every object inside a plan, itself included."""
    if dataclasses.is_dataclass(value):
        inner = [getattr(value, f.name) for f in dataclasses.fields(value)]
    elif isinstance(value, tuple | list | set | frozenset):
        inner = list(value)
    elif isinstance(value, dict):
        inner = [*value, *value.values()]
    else:
        inner = []
    return [value, *(x for i in inner for x in contents(i))]


@given(plans())
def test_plans_are_pure_data(plan: Plan) -> None:
    for value in (plan, *plan.steps()):
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert hash(again) == hash(value)
        parts = contents(value)
        assert not [x for x in parts if isinstance(x, torch.Tensor)]
        assert {type(x) for x in parts} <= {Plan, SpanPlan, Evidence, LayerStep, Span, tuple, int, str, type(None)}


def test_plans_are_frozen() -> None:
    plan = Plan(0, 4, 1, ((3, 4),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.end = 9  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        next(plan.steps()).layer = 2  # type: ignore[misc]


@given(plans())
def test_every_layer_computes_everything_up_to_where_a_plan_says_so(plan: Plan) -> None:
    front = set(range(plan.begin, plan.computed_until()))
    assert all(front <= as_set(plan.rows(layer)) for layer in range(LAYERS))
    assert plan.exact_until() <= plan.computed_until() <= plan.end
    if plan.computed_until() < plan.end:
        assert any(plan.computed_until() not in as_set(plan.rows(layer)) for layer in range(LAYERS))


@given(st.data(), plans())
def test_the_rest_of_a_plan_is_its_work_from_there_on(data: st.DataObject, plan: Plan) -> None:
    begin = data.draw(st.integers(plan.begin, plan.want[0][0]))
    rest = plan.behind(begin)
    behind = set(range(begin, plan.end))
    for mine, whole in zip(rest.steps(), plan.steps(), strict=True):
        for name in ("enter", "rows", "keep"):
            assert as_set(getattr(mine, name)) == as_set(getattr(whole, name)) & behind
        reused = set[int]().union(*map(as_set, mine.reuse))
        assert reused == set[int]().union(*map(as_set, whole.reuse)) & behind
