"""CacheBlend's rule (arXiv 2405.16444): the tokens whose V changed most after two layers.

Layers 0 and 1 compute every token's K and V. At layer 1 each reused token is scored by the squared distance of its
fresh V to the cached one, and the highest-scored share goes on through all deeper layers: tokens that deviate early are
expected to deviate later.

Differs from the source: the mask is exactly causal (the public code lets a row in the middle of the prompt see later
keys); the share is the same in all deeper layers (the paper narrows it layer by layer, the public code does not).
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.policies.base import Evidence, Look, Rule
from vlcache.policies.share import check_share, highest, share_of, written
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["CacheBlend"]

_LOOK = 1


@dataclass(frozen=True, slots=True)
class CacheBlend(Rule):
    """`ceil(ratio * N)` tokens from layer 2 on, those whose V moved most at layer 1: `cacheblend:0.15`."""

    ratio: float

    def __post_init__(self) -> None:
        check_share(self.ratio, "cacheblend")

    @property
    def name(self) -> str:
        return f"cacheblend:{written(self.ratio)}"

    def look(self, layers: int) -> Look | None:
        return Look(_LOOK, "values")

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        if layer <= _LOOK:
            return ((0, span.length),)
        return highest(evidence.scores, share_of(self.ratio, span.length), span.length)
