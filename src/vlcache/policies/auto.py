"""The default: what holds best on the calibration pairs of docs/accuracy.md.

    before the picture differs        what is done
    nothing, or text of other turns   the front that the profile's budgets say, which may be nothing
    text of its own turn              a band of deep layers, if the model's profile has one that holds; else verified
    pictures                          verified: what does not hold is recomputed

The numbers come from the model's own profile (`vlcache profile`). A model without one gets cautious ones: the first 2 %
of a picture's tokens where nothing suspicious differs, and checks everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlcache.errors import ConfigError
from vlcache.policies.band import Band
from vlcache.policies.base import Check, Evidence, Look, Policy
from vlcache.policies.front import Prefix
from vlcache.policies.verified import Verified
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Auto"]

_CAUTIOUS = Verified(tau=0.1, probes=12)
_FRONT = Prefix(0.02)


@dataclass(frozen=True, slots=True)
class Auto:
    """`auto`.

    Attributes
    ----------
    verified : Verified
        Where what differs is suspicious.
    band : Band, optional
        Computed at once, without a check, where text of the picture's own turn is what differs.
    base : Policy
        Where nothing suspicious differs.
    """

    verified: Verified = _CAUTIOUS
    band: Band | None = None
    base: Policy = _FRONT

    def __post_init__(self) -> None:
        for rule in (self.verified.base, self.base):
            if rule.look(1 << 20) is not None:
                raise ConfigError(f"policy auto: {rule.name} measures on its way, which only the band can here")

    @property
    def name(self) -> str:
        return "auto"

    @property
    def checkpoints(self) -> tuple[int, ...]:
        band = () if self.band is None else self.band.checkpoints
        return tuple(sorted({*self.verified.checkpoints, *band}))

    @property
    def check(self) -> Check:
        check = self.verified.check
        if self.band is None:
            return check
        return replace(check, suspects=tuple(changed for changed in check.suspects if changed != "turn"))

    def look(self, layers: int) -> Look | None:
        return None if self.band is None else self.band.look(layers)

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        if self.band is not None and evidence.changed == "turn":
            return self.band.rows(span, layer, evidence)
        rule = self.base if evidence.changed == "text" else self.verified
        return rule.rows(span, layer, evidence)
