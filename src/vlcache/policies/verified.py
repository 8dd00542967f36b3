"""Reuse that verifies itself: look where the answer looks, compute just that afresh, and see whether the answer moves.

A picture keeps what it was read for: a question, a legend, a picture that is a key. No measurement on its front tells
(its deviation there is that of any new context), and neither does a deviation at the tokens that matter, which another
system prompt moves as well. What the answer does when exactly those tokens are computed afresh does tell.

    base        the rule by which the picture is reused at first
    check       one pass over the tokens that the answering row attends to most, and over the text that ends the prompt
    repair      a band of deep layers, where nothing but text of the turn differs
    recompute   everything from the first suspicious picture on, where that did not settle it

Where nothing suspicious differs before a picture nothing is checked. See `vlcache.verify` for the passes and
`vlcache.context` for what is suspicious.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.context import Changed
from vlcache.errors import ConfigError
from vlcache.policies.band import Band
from vlcache.policies.base import Check, Evidence, Look, Policy
from vlcache.policies.none import NoRecompute
from vlcache.policies.share import written
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Verified"]

_NAIVE = NoRecompute()
SUSPICIOUS: tuple[Changed, ...] = ("pictures", "turn", "neighbours")


@dataclass(frozen=True, slots=True)
class Verified:
    """`verified:0.7,12` or, with a band to repair, `verified:0.7,12,8,20,0.25`.

    Attributes
    ----------
    tau : float
        Largest movement of the answering row's distribution that counts as none: KL, nats.
    probes : int
        Tokens that are computed afresh to see.
    repair : Band, optional
        Tried before everything is recomputed, where nothing but text of the picture's own turn differs.
    base : Policy
        The rule by which pictures are reused at first; one that has no check.
    """

    tau: float
    probes: int
    repair: Band | None = None
    base: Policy = _NAIVE

    def __post_init__(self) -> None:
        if not 0 <= self.tau < float("inf"):
            raise ConfigError(f"policy verified: tau {self.tau} is not a divergence; give nats, 0.7")
        if self.probes < 1:
            raise ConfigError(f"policy verified: {self.probes} probes show nothing; give 1 or more, 12")
        if self.base.check is not None:
            raise ConfigError(f"policy verified: {self.base.name} is verified already; give a rule that is not")

    @property
    def name(self) -> str:
        band = self.repair.name.removeprefix("band:") if self.repair is not None else ""
        return f"verified:{written(self.tau)},{self.probes}" + (f",{band}" if band else "")

    @property
    def checkpoints(self) -> tuple[int, ...]:
        repair = () if self.repair is None else self.repair.checkpoints
        return tuple(sorted({*self.base.checkpoints, *repair}))

    @property
    def check(self) -> Check:
        return Check(self.tau, self.probes, SUSPICIOUS, self.repair)

    def look(self, layers: int) -> Look | None:
        return self.base.look(layers)

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return self.base.rows(span, layer, evidence)
