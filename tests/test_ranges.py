"""Range sets against Python sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlcache.ranges import Ranges, count, indices, intersect, normal, places, shift, subtract, union

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

raw_ranges = st.lists(st.tuples(st.integers(-5, 40), st.integers(-5, 40)), max_size=8)


def as_set(ranges: list[tuple[int, int]] | Ranges) -> set[int]:
    """The indices that ranges stand for, written without the code under test."""
    return {i for start, stop in ranges for i in range(start, stop)}


def from_set(values: set[int]) -> Ranges:
    """Normal form of a set, built one index after another."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and runs[-1][1] == value:
            runs[-1][1] += 1
        else:
            runs.append([value, value + 1])
    return tuple((start, stop) for start, stop in runs)


def is_normal(ranges: Ranges) -> bool:
    """Sorted, disjoint, not touching, no empty range; tuples all the way, so that plans hash."""
    hash(ranges)
    flat = [edge for r in ranges for edge in r]
    return isinstance(ranges, tuple) and all(a < b for a, b in pairwise(flat))


normal_ranges = st.sets(st.integers(-5, 40)).map(from_set)


@given(raw_ranges)
def test_normal_keeps_the_indices_in_normal_form(ranges: list[tuple[int, int]]) -> None:
    assert normal(ranges) == from_set(as_set(ranges))
    assert is_normal(normal(ranges))


@given(normal_ranges)
def test_normal_form_is_left_alone(ranges: Ranges) -> None:
    assert normal(ranges) == ranges


def test_normal_takes_any_iterable() -> None:
    assert normal(r for r in [(3, 5), (0, 1), (1, 3), (9, 9), (8, 7)]) == ((0, 5),)


@given(st.lists(normal_ranges, max_size=4))
def test_union_is_that_of_sets(sets: list[Ranges]) -> None:
    out = union(*sets)
    assert out == from_set(set().union(*map(as_set, sets)))
    assert is_normal(out)


@given(normal_ranges, normal_ranges)
def test_intersect_is_that_of_sets(a: Ranges, b: Ranges) -> None:
    out = intersect(a, b)
    assert out == from_set(as_set(a) & as_set(b))
    assert is_normal(out)


@given(normal_ranges, normal_ranges)
def test_subtract_is_that_of_sets(a: Ranges, b: Ranges) -> None:
    out = subtract(a, b)
    assert out == from_set(as_set(a) - as_set(b))
    assert is_normal(out)


@given(normal_ranges, st.integers(-50, 50))
def test_shift_moves_every_index(a: Ranges, by: int) -> None:
    out = shift(a, by)
    assert out == from_set({i + by for i in as_set(a)})
    assert shift(out, -by) == a
    assert is_normal(out)


@given(normal_ranges)
def test_count_and_indices_are_those_of_the_set(a: Ranges) -> None:
    assert count(a) == len(as_set(a))
    assert indices(a) == sorted(as_set(a))


@given(st.data(), normal_ranges)
def test_places_are_positions_in_the_list_of_the_outer_set(data: st.DataObject, outer: Ranges) -> None:
    listed = sorted(as_set(outer))
    chosen = data.draw(st.sets(st.sampled_from(listed)) if listed else st.just(set()))
    out = places(from_set(chosen), outer)
    assert indices(out) == [listed.index(i) for i in sorted(chosen)]
    assert is_normal(out)


@given(normal_ranges)
def test_a_set_fills_all_its_own_places(a: Ranges) -> None:
    assert places(a, a) == (((0, len(as_set(a))),) if a else ())


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (((6, 7),), ((1, 4), (6, 8)), ((3, 4),)),
        (((3, 4), (6, 7)), ((1, 4), (6, 8)), ((2, 4),)),
        (((1, 2), (7, 8)), ((1, 4), (6, 8)), ((0, 1), (4, 5))),
        ((), ((1, 4),), ()),
        ((), (), ()),
    ],
)
def test_places_by_hand(inner: Ranges, outer: Ranges, expected: Ranges) -> None:
    assert places(inner, outer) == expected
