"""Sorted sets of token indices as half-open ranges.

    tokens     0 1 2 3 4 5 6 7 8 9
    set        . x x x . . x . . .        -> ((1, 4), (6, 7))

A prompt has thousands of tokens but few runs, so plans stay small, hashable and picklable, and every run can
be handed to an attention kernel as one sequence. All functions take and return normal form: sorted, disjoint,
not touching, no empty range.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Ranges", "count", "indices", "intersect", "normal", "pieces", "places", "shift", "subtract", "union"]

Ranges = tuple[tuple[int, int], ...]


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort, drop empty ranges and join those that touch or overlap."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return tuple(out)


def union(*sets: Ranges) -> Ranges:
    return normal(r for s in sets for r in s)


def intersect(a: Ranges, b: Ranges) -> Ranges:
    out = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            out.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def subtract(a: Ranges, b: Ranges) -> Ranges:
    """Indices of `a` that are not in `b`."""
    out = []
    for start, stop in a:
        for cut_start, cut_stop in b:
            if cut_stop <= start:
                continue
            if cut_start >= stop:
                break
            if cut_start > start:
                out.append((start, cut_start))
            start = cut_stop
        if start < stop:
            out.append((start, stop))
    return tuple(out)


def shift(a: Ranges, by: int) -> Ranges:
    return tuple((start + by, stop + by) for start, stop in a)


def count(a: Ranges) -> int:
    return sum(stop - start for start, stop in a)


def indices(a: Ranges) -> list[int]:
    return [i for start, stop in a for i in range(start, stop)]


def pieces(inner: Ranges, outer: Ranges) -> list[tuple[int, int]]:
    """For each run of `inner` where it stands in the list of indices of `outer` (which holds them all).

    >>> pieces(((1, 4), (6, 7)), ((1, 4), (6, 8)))
    [(0, 3), (3, 4)]
    """
    out = []
    before = 0
    for start, stop in outer:
        for a, b in intersect(inner, ((start, stop),)):
            out.append((before + a - start, before + b - start))
        before += stop - start
    return out


def places(inner: Ranges, outer: Ranges) -> Ranges:
    """The same as a set: pieces that touch are one.

    >>> places(((1, 4), (6, 7)), ((1, 4), (6, 8)))
    ((0, 4),)
    """
    return normal(pieces(inner, outer))
