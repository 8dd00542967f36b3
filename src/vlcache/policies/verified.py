"""Reuse that verifies itself: look where the answer looks, compute just that afresh, and see whether the answer moves.

A picture keeps what it was read for: a question, a legend, a picture that is a key. No measurement on its front tells
(its deviation there is that of any new context), and neither does a deviation at the tokens that matter, which another
system prompt moves as well. What the answer does when exactly those tokens are computed afresh does tell.

    base        the rule by which the picture is reused at first
    check       where only pictures of earlier turns differ: the tokens that the last rows attend to most, and the
                answering row
    look        where the check moved the answer, and at once where its own turn differs: twice as many tokens, and the
                text that ends the prompt; the answer is taken where it is sure, or stays; if not, once more
    repair      a band of deep layers, where nothing but text of the turn differs
    recompute   everything from the first suspicious picture on, where that did not settle it

Text and pictures of the turn are what a picture was read for, so most of the time a check there would only say that it
has to be looked at; and where it would not, the reused answer itself may be looking at what the old text asked for.
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

__all__ = ["CHECKED", "SURE", "Verified"]

_NAIVE = NoRecompute()
_LOOKS = 3
SURE = 0.98
"""Probability of the first token from which on the answer of a look is taken, unless a profile says another."""
SUSPICIOUS: tuple[Changed, ...] = ("pictures", "turn", "neighbours")
CHECKED: tuple[Changed, ...] = ("pictures",)


@dataclass(frozen=True, slots=True)
class Verified:
    """`verified:0.3,12`, with the number of looks `verified:0.3,12,3`, with a band to repair
    `verified:0.3,12,3,8,20,0.25`, on top of another rule `verified:0.3,12/prefix:0.02`.

    Attributes
    ----------
    tau : float
        Largest movement of the answering row's distribution that counts as none: KL, nats.
    probes : int
        Tokens that the check computes afresh to see.
    looks : int
        How often at most, the check included; each doubles the tokens.
    repair : Band, optional
        Tried before everything is recomputed, where nothing but text of the picture's own turn differs.
    base : Policy
        The rule by which pictures are reused at first; one that has no check.
    sure : float
        Probability of the first token from which on the answer of a look is taken.
    calm : bool
        Whether it is also taken where it has not moved. How sure a model's right answers are, a profile knows; without
        one an answer that is unsure but stays has to do.
    """

    tau: float
    probes: int
    looks: int = _LOOKS
    repair: Band | None = None
    base: Policy = _NAIVE
    sure: float = SURE
    calm: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.tau < float("inf"):
            raise ConfigError(f"policy verified: tau {self.tau} is not a divergence; give nats, 0.3")
        for name in ("probes", "looks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"policy verified: {getattr(self, name)} {name} show nothing; give 1 or more")
        if self.base.check is not None:
            raise ConfigError(f"policy verified: {self.base.name} is verified already; give a rule that is not")

    @property
    def name(self) -> str:
        numbers = [written(self.tau), str(self.probes)]
        if self.looks != _LOOKS or self.repair is not None:
            numbers.append(str(self.looks))
        if self.repair is not None:
            numbers.append(self.repair.name.removeprefix("band:"))
        return "verified:" + ",".join(numbers) + (f"/{self.base.name}" if self.base != _NAIVE else "")

    @property
    def checkpoints(self) -> tuple[int, ...]:
        repair = () if self.repair is None else self.repair.checkpoints
        return tuple(sorted({*self.base.checkpoints, *repair}))

    @property
    def check(self) -> Check:
        return Check(self.tau, self.probes, self.looks, SUSPICIOUS, CHECKED, self.sure, self.calm, self.repair)

    def look(self, layers: int) -> Look | None:
        return self.base.look(layers)

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return self.base.rows(span, layer, evidence)
