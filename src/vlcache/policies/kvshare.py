"""KVShare's rule (arXiv 2503.16525): the tokens that the text's attention leaves or finds once K is fresh.

Like CacheBlend with another score: at layer 1 the attention of the text behind the picture is taken with fresh keys
and with cached ones, and the tokens whose share moved most go on.

Differs from the source, whose exact formula is not public: the score is the absolute difference of the two attention
weights, summed over heads and over the text rows behind the picture.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.policies.base import Evidence, Look, Rule
from vlcache.policies.share import check_share, highest, share_of, written
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["KVShare"]

_LOOK = 1


@dataclass(frozen=True, slots=True)
class KVShare(Rule):
    """`ceil(ratio * N)` tokens from layer 2 on, those to which attention moved most at layer 1: `kvshare:0.15`."""

    ratio: float

    def __post_init__(self) -> None:
        check_share(self.ratio, "kvshare")

    @property
    def name(self) -> str:
        return f"kvshare:{written(self.ratio)}"

    def look(self, layers: int) -> Look | None:
        return Look(_LOOK, "attention")

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        if layer <= _LOOK:
            return ((0, span.length),)
        return highest(evidence.scores, share_of(self.ratio, span.length), span.length)
