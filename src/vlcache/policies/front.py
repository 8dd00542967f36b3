"""Recompute the front of a picture, in every layer alike or by a budget per layer (VLCache, arXiv 2512.12977).

A reused token hands its error to every later one, so the first tokens' errors cost most; recomputing the leading
tokens removes the largest terms first. Layers differ in how much an error matters, hence a budget per layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vlcache.errors import ConfigError
from vlcache.policies.base import Evidence
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Layered", "Prefix"]


# Of a small picture 2 % is less than one token
_LEAST = 4


def _check(ratio: float, policy: str) -> None:
    if not 0 <= ratio <= 1:
        raise ConfigError(f"policy {policy}: ratio {ratio} is not between 0 and 1; give the share of tokens, 0.02")


def _written(ratio: float) -> str:
    """Short where that reads back as the same number."""
    short = f"{ratio:g}"
    return short if float(short) == ratio else repr(ratio)


def _front(length: int, ratio: float, least: int) -> Ranges:
    # ceil of a product such as 0.07 * 100 = 7.000000000000001 must not cost a token
    tokens = math.ceil(round(ratio * length, 9))
    tokens = min(length, max(tokens, least)) if ratio > 0 else 0
    return ((0, tokens),) if tokens else ()


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `ceil(ratio * N)` tokens in every layer, at least `least` of them.

    Attributes
    ----------
    ratio : float
        Share of the picture's tokens, 0 to 1.
    least : int
        Tokens computed at the least where `ratio` is over 0. Written behind the ratio where it is not 4:
        `prefix:0.02,1`.
    """

    ratio: float
    least: int = _LEAST

    def __post_init__(self) -> None:
        _check(self.ratio, "prefix")
        if self.least < 0:
            raise ConfigError(f"policy prefix: at least {self.least} tokens; give 0 or more")

    @property
    def name(self) -> str:
        return f"prefix:{_written(self.ratio)}" + (f",{self.least}" if self.least != _LEAST else "")

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return _front(span.length, self.ratio, self.least)


@dataclass(frozen=True, slots=True)
class Layered:
    """The first `ceil(ratios[layer] * N)` tokens of each layer.

    Ratios that grow with depth are widened, see `vlcache.plan`.

    Attributes
    ----------
    ratios : tuple of float
        One share per decoder layer, 0 to 1.
    """

    ratios: tuple[float, ...]

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            _check(ratio, "layered")

    @property
    def name(self) -> str:
        return "layered:" + ",".join(map(_written, self.ratios))

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        if len(self.ratios) != evidence.layers:
            raise ConfigError(
                f"policy layered: {len(self.ratios)} ratios for a model of {evidence.layers} layers; give one per layer"
            )
        return _front(span.length, self.ratios[layer], 0)
