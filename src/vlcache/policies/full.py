"""Recompute everything: the reference that every other rule is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.policies.base import Evidence, Rule
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Full"]


@dataclass(frozen=True, slots=True)
class Full(Rule):
    """All tokens in all layers. The encoder output is still reused, which is exact."""

    @property
    def name(self) -> str:
        return "full"

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return ((0, span.length),)
