"""The default: what the measurement in docs/accuracy.md says is best at 99.5 % agreement with full recompute.

Pictures are reused as they are. Where what stands before them may have changed what was read into them, the answer is
verified, and what does not hold is repaired or recomputed. The numbers come from the model's own profile (`vlcache
profile`); a model without one gets cautious ones, and everything is recomputed where the answer moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.policies.base import Check, Evidence, Look
from vlcache.policies.front import Prefix
from vlcache.policies.verified import Verified
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Auto"]

_CAUTIOUS = Verified(tau=0.5, probes=16, base=Prefix(0.02))


@dataclass(frozen=True, slots=True)
class Auto:
    """`auto`.

    Attributes
    ----------
    verified : Verified
        With the profile's numbers where there is one.
    """

    verified: Verified = _CAUTIOUS

    @property
    def name(self) -> str:
        return "auto"

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return self.verified.checkpoints

    @property
    def check(self) -> Check | None:
        return self.verified.check

    def look(self, layers: int) -> Look | None:
        return self.verified.look(layers)

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return self.verified.rows(span, layer, evidence)
