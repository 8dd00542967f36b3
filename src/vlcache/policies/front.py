"""Recompute the front of a picture, in every layer alike or by a budget per layer (VLCache, arXiv 2512.12977).

A reused token hands its error to every later one, so the first tokens' errors cost most; recomputing the leading
tokens removes the largest terms first. Layers differ in how much an error matters, hence a budget per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.errors import ConfigError
from vlcache.policies.base import Evidence, Rule
from vlcache.policies.share import check_share, share_of, written
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Layered", "Prefix"]


# Of a small picture 2 % is less than one token
_LEAST = 4


def _front(length: int, ratio: float, least: int) -> Ranges:
    tokens = min(length, max(share_of(ratio, length), least)) if ratio > 0 else 0
    return ((0, tokens),) if tokens else ()


@dataclass(frozen=True, slots=True)
class Prefix(Rule):
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
        check_share(self.ratio, "prefix")
        if self.least < 0:
            raise ConfigError(f"policy prefix: at least {self.least} tokens; give 0 or more")

    @property
    def name(self) -> str:
        return f"prefix:{written(self.ratio)}" + (f",{self.least}" if self.least != _LEAST else "")

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return _front(span.length, self.ratio, self.least)


@dataclass(frozen=True, slots=True)
class Layered(Rule):
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
            check_share(ratio, "layered")

    @property
    def name(self) -> str:
        return "layered:" + ",".join(map(written, self.ratios))

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        if len(self.ratios) != evidence.layers:
            raise ConfigError(
                f"policy layered: {len(self.ratios)} ratios for a model of {evidence.layers} layers; give one per layer"
            )
        return _front(span.length, self.ratios[layer], 0)
