"""Recompute nothing: keys are moved, that is all. The naive reuse that repairs are measured against."""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.policies.base import Evidence, Rule
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["NoRecompute"]


@dataclass(frozen=True, slots=True)
class NoRecompute(Rule):
    """No token in any layer."""

    @property
    def name(self) -> str:
        return "none"

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return ()
