"""One contract suite over every policy, and how policies are written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache.errors import ConfigError
from vlcache.policies import POLICIES, Evidence, Full, Layered, NoRecompute, Policy, Prefix, parse_policy
from vlcache.ranges import Ranges, count, indices, intersect
from vlcache.types import Span

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

LAYERS = 4
EVIDENCE = Evidence(layers=LAYERS)
SCORES = tuple(float(7919 * token % 10007) for token in range(20000))

# Of every registered name the ways to write it that the suite runs over, for a model of LAYERS layers
EXAMPLES = {
    "full": ["full"],
    "none": ["none"],
    "prefix": ["prefix", "prefix:0", "prefix:0.02", "prefix:0.02,1", "prefix:0.5", "prefix:1"],
    "layered": ["layered:1,0.5,0.1,0", "layered:0.2,0.4,0.4,0.2", "layered:0,0,0,0"],
    "band": ["band:0,2,0.25", "band:1,2,0.1", "band:2,9,0.5", "band:0,9,1", "band:3,3,0"],
    "epic": ["epic:0", "epic:16", "epic:100000"],
    "mpic": ["mpic:0", "mpic:32", "mpic:100000"],
    "cacheblend": ["cacheblend:0.15", "cacheblend:0", "cacheblend:1"],
    "kvshare": ["kvshare:0.15", "kvshare:0", "kvshare:1"],
    "verified": ["verified:0.3,12", "verified:0.3,12,1", "verified:0.3,12,3,1,2,0.25", "verified:0,1/prefix:0.02"],
    "repair": ["repair:0.1", "repair:0.1,4", "repair:0"],
    "auto": ["auto"],
    "random": ["random:0.1", "random:0.1,7", "random:0", "random:1"],
}
CONSTANT = ["full", "none", *EXAMPLES["prefix"], *EXAMPLES["epic"], *EXAMPLES["mpic"], *EXAMPLES["random"]]
NARROWING = [*CONSTANT, *EXAMPLES["cacheblend"], *EXAMPLES["kvshare"], "layered:1,0.5,0.1,0"]
EVERYTHING = ["full", "prefix:1", "layered:1,1,1,1", "band:0,9,1", "cacheblend:1", "kvshare:1", "random:1"]

lengths = st.integers(1, 5000)
ratios = st.floats(0, 1, allow_subnormal=False)


@pytest.fixture(params=[text for texts in EXAMPLES.values() for text in texts])
def policy(request: pytest.FixtureRequest) -> Policy:
    return parse_policy(request.param)


def make_span(length: int, start: int = 0) -> Span:
    return Span("picture", start, length, (1, 2, 2 * length))


def asked(policy: Policy, length: int, start: int = 0) -> list[Ranges]:
    """Rows by layer, as the driver asks for them: behind a look, with its scores."""
    look = policy.look(LAYERS)
    behind = replace(EVIDENCE, scores=SCORES[:length])
    evidence = [behind if look is not None and layer > look.layer else EVIDENCE for layer in range(LAYERS)]
    return [policy.rows(make_span(length, start), layer, evidence[layer]) for layer in range(LAYERS)]


def tokens(policy: Policy, length: int, layer: int = 0) -> int:
    """How many of the front tokens are asked for; fails if they are not the front."""
    rows = policy.rows(make_span(length), layer, EVIDENCE)
    assert rows == () or (len(rows) == 1 and rows[0][0] == 0)
    return rows[0][1] if rows else 0


def test_every_registered_policy_is_in_this_suite() -> None:
    assert set(EXAMPLES) == set(POLICIES)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 49, 50, 51, 1000, 16384])
def test_rows_are_sorted_apart_and_in_range(policy: Policy, length: int) -> None:
    for rows in asked(policy, length):
        edges = [edge for r in rows for edge in r]
        assert all(a < b for a, b in pairwise(edges))
        assert all(0 <= edge <= length for edge in edges)


@pytest.mark.parametrize("length", [1, 77, 1000])
def test_rows_are_the_same_each_time_and_wherever_the_picture_stands(policy: Policy, length: int) -> None:
    first = asked(policy, length)
    assert asked(policy, length) == first
    assert asked(policy, length, start=900) == first


def test_a_policy_pickles_and_hashes(policy: Policy) -> None:
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert asked(again, 100) == asked(policy, 100)


def test_a_policy_cannot_be_changed(policy: Policy) -> None:
    for name in ("ratio", "ratios", "name"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(policy, name, 0.5)


def test_the_name_reads_back_as_the_policy(policy: Policy) -> None:
    assert parse_policy(policy.name) == policy
    assert parse_policy(policy.name).name == policy.name


@pytest.mark.parametrize("text", CONSTANT)
@pytest.mark.parametrize("length", [1, 50, 1000])
def test_constant_policies_are_nested(text: str, length: int) -> None:
    for shallow, deep in pairwise(asked(parse_policy(text), length)):
        assert shallow == deep


@pytest.mark.parametrize("text", NARROWING)
@pytest.mark.parametrize("length", [1, 50, 1000])
def test_deeper_layers_compute_no_other_rows(text: str, length: int) -> None:
    for shallow, deep in pairwise(asked(parse_policy(text), length)):
        assert intersect(shallow, deep) == deep


@pytest.mark.parametrize("length", [1, 50, 1000])
def test_a_rule_that_looks_says_before_how_many_rows_it_will_ask_for(policy: Policy, length: int) -> None:
    before = [count(policy.rows(make_span(length), layer, EVIDENCE)) for layer in range(LAYERS)]
    assert list(map(count, asked(policy, length))) == before


@pytest.mark.parametrize("text", EVERYTHING)
@given(length=lengths)
def test_ratio_one_is_full(text: str, length: int) -> None:
    assert asked(parse_policy(text), length) == [((0, length),)] * LAYERS == asked(Full(), length)


@pytest.mark.parametrize("text", ["none", "prefix:0", "layered:0,0,0,0"])
@given(length=lengths)
def test_ratio_zero_is_none(text: str, length: int) -> None:
    assert asked(parse_policy(text), length) == [()] * LAYERS == asked(NoRecompute(), length)


@given(ratios, ratios, lengths)
def test_a_larger_ratio_computes_no_fewer_tokens(a: float, b: float, length: int) -> None:
    low, high = sorted((a, b))
    assert tokens(Prefix(low), length) <= tokens(Prefix(high), length)


@given(st.integers(0, 100), st.integers(1, 20000))
def test_a_share_in_percent_is_rounded_up_without_float_dust(percent: int, length: int) -> None:
    """ceil(percent * N / 100), in integers."""
    exact = -(-percent * length // 100)
    assert tokens(Prefix(percent / 100, least=0), length) == exact
    assert tokens(Layered((percent / 100,) * LAYERS), length) == exact
    assert tokens(Prefix(percent / 100), length) == (min(length, max(exact, 4)) if percent else 0)


@pytest.mark.parametrize(
    ("ratio", "length", "expected"), [(0.07, 100, 7), (0.29, 100, 29), (0.1, 30, 3), (0.02, 1001, 21), (0.05, 1000, 50)]
)
def test_rounding_by_hand(ratio: float, length: int, expected: int) -> None:
    assert tokens(Prefix(ratio, least=0), length) == expected


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 1), (3, 3), (4, 4), (5, 4), (50, 4), (200, 4), (201, 5), (1000, 20)]
)
def test_prefix_computes_at_least_four_tokens_of_a_small_picture(length: int, expected: int) -> None:
    assert tokens(Prefix(0.02), length) == expected


def test_prefix_alone_means_two_percent() -> None:
    assert parse_policy("prefix") == parse_policy("prefix:0.02") == Prefix(0.02)


def test_layered_takes_each_layers_own_ratio() -> None:
    assert [tokens(parse_policy("layered:1,0.5,0.101,0"), 100, layer) for layer in range(4)] == [100, 50, 11, 0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", Full()),
        ("none", NoRecompute()),
        ("prefix:.25", Prefix(0.25)),
        ("prefix:.25,4", Prefix(0.25)),
        ("prefix:.25,1", Prefix(0.25, least=1)),
        ("layered:1,.5,0", Layered((1.0, 0.5, 0.0))),
    ],
)
def test_policies_are_read_as_written(text: str, expected: Policy) -> None:
    assert parse_policy(text) == expected


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (Full(), "full"),
        (NoRecompute(), "none"),
        (Prefix(0.02), "prefix:0.02"),
        (Prefix(0.02, least=1), "prefix:0.02,1"),
        (Layered((1, 0.5, 0)), "layered:1,0.5,0"),
    ],
)
def test_names_are_short(policy: Policy, name: str) -> None:
    assert policy.name == name


@given(ratios)
def test_the_name_keeps_the_whole_ratio(ratio: float) -> None:
    """A measured profile's 0.3333333333 must not come back from a report as 0.333333."""
    assert parse_policy(Prefix(ratio).name) == Prefix(ratio)
    assert parse_policy(Layered((ratio, 1.0)).name) == Layered((ratio, 1.0))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prefx:0.02", ["'prefx'", "prefix"]),
        ("Full", ["'Full'", "full"]),
        ("layerd:1", ["'layerd'", "layered"]),
        ("nome", ["'nome'", "none"]),
        (" prefix", ["' prefix'", "prefix"]),
    ],
)
def test_an_unknown_name_is_told_the_nearest(text: str, told: list[str]) -> None:
    message = refusal(lambda: parse_policy(text))
    assert all(part in message for part in [*told, "did you mean"])


@pytest.mark.parametrize("text", ["", "cross-attention-sink", ":0.02", "8"])
def test_a_name_near_none_is_told_all(text: str) -> None:
    message = refusal(lambda: parse_policy(text))
    assert repr(text.partition(":")[0]) in message
    assert all(name in message for name in POLICIES)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("full:1", ["policy full", "takes no argument", "'1'"]),
        ("full:", ["policy full", "takes no argument"]),
        ("none:0.02", ["policy none", "takes no argument", "'0.02'"]),
        ("prefix:", ["policy prefix", "''", "prefix:0.02"]),
        ("prefix:two", ["policy prefix", "'two'", "prefix:0.02"]),
        ("prefix:2%", ["policy prefix", "'2%'"]),
        ("prefix:0.1,0.2", ["policy prefix", "one ratio", "'0.1,0.2'", "layered"]),
        ("prefix:0.1,2,3", ["policy prefix", "one ratio", "layered"]),
        ("prefix:0.1,nan", ["policy prefix", "whole number"]),
        ("prefix:0.1,-1", ["policy prefix", "-1 tokens", "0 or more"]),
        ("prefix:1.5", ["policy prefix", "1.5", "between 0 and 1"]),
        ("prefix:-0.1", ["policy prefix", "-0.1", "between 0 and 1"]),
        ("prefix:nan", ["policy prefix", "nan", "between 0 and 1"]),
        ("prefix:inf", ["policy prefix", "inf", "between 0 and 1"]),
        ("prefix:2", ["policy prefix", "2", "0.02"]),
        ("layered", ["policy layered", "ratio per layer", "layered:1,0.5"]),
        ("layered:", ["policy layered", "''"]),
        ("layered:1,,0", ["policy layered", "'1,,0'"]),
        ("layered:1,x", ["policy layered", "'1,x'"]),
        ("layered:1,7", ["policy layered", "7", "between 0 and 1"]),
        ("band", ["policy band", "None", "band:15,22,0.25"]),
        ("band:1,2", ["policy band", "'1,2'", "two layers and a share"]),
        ("band:1.5,2,0.1", ["policy band", "'1.5,2,0.1'"]),
        ("band:3,2,0.1", ["policy band", "layers 3 to 2"]),
        ("band:-1,2,0.1", ["policy band", "layers -1 to 2"]),
        ("band:1,2,1.1", ["policy band", "1.1", "between 0 and 1"]),
        ("epic", ["policy epic", "None", "epic:16"]),
        ("epic:0.5", ["policy epic", "whole number", "'0.5'"]),
        ("epic:-1", ["policy epic", "-1 tokens"]),
        ("mpic:many", ["policy mpic", "'many'"]),
        ("mpic:-3", ["policy mpic", "-3 tokens"]),
        ("cacheblend", ["policy cacheblend", "cacheblend:0.15"]),
        ("cacheblend:0.1,2", ["policy cacheblend", "'0.1,2'"]),
        ("kvshare:7", ["policy kvshare", "7", "between 0 and 1"]),
        ("verified", ["policy verified", "None", "verified:0.3,12"]),
        ("verified:0.3", ["policy verified", "'0.3'"]),
        ("verified:0.3,12,1.5", ["policy verified", "'0.3,12,1.5'"]),
        ("verified:0.3,12,3,1", ["policy verified", "'0.3,12,3,1'"]),
        ("verified:-1,12", ["policy verified", "tau -1.0", "nats"]),
        ("verified:nan,12", ["policy verified", "tau nan"]),
        ("verified:0.3,0", ["policy verified", "0 probes"]),
        ("verified:0.3,1,0", ["policy verified", "0 looks"]),
        ("verified:0.3,12,3,5,2,0.1", ["policy band", "layers 5 to 2"]),
        ("verified:0.3,12/prefx", ["'prefx'", "prefix"]),
        ("verified:0.3,12/auto", ["policy verified", "auto is verified already"]),
        ("repair", ["policy repair", "None", "repair:0.1"]),
        ("repair:0.1,2.5", ["policy repair", "'0.1,2.5'"]),
        ("repair:-0.1", ["policy repair", "eps -0.1"]),
        ("repair:inf", ["policy repair", "eps inf"]),
        ("repair:0.1,0", ["policy repair", "blocks of 0"]),
        ("auto:1", ["policy auto", "takes no argument"]),
        ("random", ["policy random", "None", "seed"]),
        ("random:0.1,0.2", ["policy random", "'0.1,0.2'", "seed"]),
        ("random:nan", ["policy random", "nan", "between 0 and 1"]),
    ],
)
def test_a_wrong_argument_is_named(text: str, told: list[str]) -> None:
    message = refusal(lambda: parse_policy(text))
    assert [part for part in told if part not in message] == []


@pytest.mark.parametrize("make", [lambda: Prefix(1.01), lambda: Layered((0.5, -1))])
def test_a_ratio_out_of_range_is_refused_in_code_too(make: Callable[[], Policy]) -> None:
    assert "between 0 and 1" in refusal(make)


@pytest.mark.parametrize("ratios", [1, 3, 5])
def test_layered_says_how_many_ratios_the_model_needs(ratios: int) -> None:
    policy = Layered((0.5,) * ratios)
    message = refusal(lambda: policy.rows(make_span(10), 0, EVIDENCE))
    assert all(part in message for part in ("policy layered", f"{ratios} ratios", f"{LAYERS} layers"))


def test_random_tokens_are_spread_and_change_with_picture_and_seed() -> None:
    rows = [indices(asked(parse_policy(text), 1000)[0]) for text in ("random:0.1", "random:0.1,7")]
    assert all(len(some) == 100 and 300 < sum(some) / 100 < 700 for some in rows)
    assert rows[0] != rows[1]
    assert (
        parse_policy("random:0.1").rows(Span("other", 0, 1000, (1, 2, 2000)), 0, EVIDENCE)
        != asked(parse_policy("random:0.1"), 1000)[0]
    )


@pytest.mark.parametrize("rule", ["epic", "mpic"])
def test_a_count_of_front_tokens(rule: str) -> None:
    assert [tokens(parse_policy(f"{rule}:16"), length, layer) for length, layer in ((10, 0), (16, 1), (900, 3))] == [
        10,
        16,
        16,
    ]


def test_a_band_by_hand() -> None:
    assert asked(parse_policy("band:1,2,0.25"), 8) == [(), ((0, 8),), ((0, 8),), ((1, 2), (5, 6))]
    assert sorted(range(8), key=lambda token: -SCORES[token])[:2] == [5, 1]


def test_measured_rules_take_the_highest_scores() -> None:
    for text in ("cacheblend:0.25", "kvshare:0.25"):
        assert asked(parse_policy(text), 8) == [((0, 8),), ((0, 8),), ((1, 2), (5, 6)), ((1, 2), (5, 6))]


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)
