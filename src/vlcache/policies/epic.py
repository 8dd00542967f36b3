"""EPIC's rule (LegoLink, arXiv 2410.15332): the first k tokens of every reused chunk, in every layer.

A chunk that was computed at the start of a prompt gives its first tokens the attention that a prompt's first tokens
draw; in the middle of another prompt they mislead. Computing just those afresh takes that away, at a cost that does
not grow with the chunk.

Differs from the source: chunks are pictures, text is always computed; the first chunk is treated like the others
(there, it starts the prompt and is exact as it is).
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.policies.base import Evidence, Rule
from vlcache.policies.share import check_count
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Epic"]


@dataclass(frozen=True, slots=True)
class Epic(Rule):
    """The first `tokens` of each picture, `epic:16`."""

    tokens: int

    def __post_init__(self) -> None:
        check_count(self.tokens, "epic")

    @property
    def name(self) -> str:
        return f"epic:{self.tokens}"

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return ((0, min(self.tokens, span.length)),) if self.tokens else ()
