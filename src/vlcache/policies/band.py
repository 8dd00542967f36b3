"""Recompute a picture where the context was written into it: in a band of deep layers, entered at a checkpoint.

    layer 0            nothing            the shallow layers had read the picture itself
    layer m  ------    every token        enters with its hidden state of the capture
    layer m2 ------    the share q        whose fresh V is farthest from the cached one goes on to the end

A context that changes what a picture's tokens are about (a question, a legend, another picture that is a key) is
written into them by the middle layers, sparsely and at no particular end; everything below can stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlcache.errors import ConfigError
from vlcache.policies.base import Evidence, Look, Rule
from vlcache.policies.share import check_share, highest, share_of, written
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Band"]


@dataclass(frozen=True, slots=True)
class Band(Rule):
    """`band:15,22,0.25`: all tokens in layers `enter` to `narrow`, then `ceil(share * N)` of them.

    Attributes
    ----------
    enter : int
        Layer at which the tokens enter. An entry without a checkpoint there is computed from its last checkpoint
        before, or from the first layer.
    narrow : int
        Layer whose fresh V choose those that go on; L and more: all go on.
    share : float
    """

    enter: int
    narrow: int
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.enter <= self.narrow:
            raise ConfigError(f"policy band: layers {self.enter} to {self.narrow} are no band; write band:15,22,0.25")
        check_share(self.share, "band")

    @property
    def name(self) -> str:
        return f"band:{self.enter},{self.narrow},{written(self.share)}"

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return (self.enter,) if self.enter else ()

    def look(self, layers: int) -> Look | None:
        return Look(self.narrow, "values") if self.narrow < layers - 1 and self.share < 1 else None

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        if layer < self.enter:
            return ()
        if layer <= self.narrow or self.share == 1:
            return ((0, span.length),)
        return highest(evidence.scores, share_of(self.share, span.length), span.length)
