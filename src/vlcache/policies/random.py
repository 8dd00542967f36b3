"""Recompute tokens at random: the control that a rule which chooses has to beat."""

from __future__ import annotations

import random
from dataclasses import dataclass

from vlcache.policies.base import Evidence, Rule
from vlcache.policies.share import check_share, share_of, written
from vlcache.ranges import Ranges, normal
from vlcache.types import Span

__all__ = ["RandomTokens"]


@dataclass(frozen=True, slots=True)
class RandomTokens(Rule):
    """`ceil(ratio * N)` tokens drawn from picture and seed, the same in every layer: `random:0.1` or `random:0.1,7`.

    A picture's tokens are the same wherever it stands.
    """

    ratio: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_share(self.ratio, "random")

    @property
    def name(self) -> str:
        return f"random:{written(self.ratio)}" + (f",{self.seed}" if self.seed else "")

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        drawn = random.Random(f"{self.seed}/{span.content}").sample(
            range(span.length), share_of(self.ratio, span.length)
        )
        return normal((token, token + 1) for token in drawn)
