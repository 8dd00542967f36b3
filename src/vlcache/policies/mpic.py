"""MPIC's rule (arXiv 2502.01960): all text, and the first k tokens of every picture, in every layer.

The first published position-independent reuse for pictures. Its reason for the front is the attention that text pays
to a picture's first tokens.

Differs from the source: keys are moved to their new positions, there they stay as captured. Here text is always
computed, whatever the rule, so on a prompt of text and pictures `mpic:k` computes what `epic:k` does; the two are kept
apart because a comparison names its sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.policies.base import Evidence, Rule
from vlcache.policies.share import check_count
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Mpic"]


@dataclass(frozen=True, slots=True)
class Mpic(Rule):
    """The first `tokens` of each picture, `mpic:32`."""

    tokens: int

    def __post_init__(self) -> None:
        check_count(self.tokens, "mpic")

    @property
    def name(self) -> str:
        return f"mpic:{self.tokens}"

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return ((0, min(self.tokens, span.length)),) if self.tokens else ()
