"""Recompute a picture's front until it agrees: a chunked prefill that knows when to stop.

Blocks of tokens are computed from the front on, each on top of those before it, for as long as their fresh V differ
from the cached ones; then the text behind. The front is where another system prompt shows most. By itself that is not
enough: a question or a legend before the picture shows in its middle and leaves the front alone, see docs/accuracy.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from vlcache.context import Changed
from vlcache.errors import ConfigError
from vlcache.policies.base import Check, Evidence, Rule
from vlcache.policies.share import written
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Repair"]

_BLOCK = 8


@dataclass(frozen=True, slots=True)
class Repair(Rule):
    """`repair:0.1`.

    Attributes
    ----------
    eps : float
        Largest deviation of a block's V in the deeper half of the layers, relative to their length, that counts as
        none.
    block : int
        Tokens of a block; written behind eps where they are not 8.
    """

    eps: float
    block: int = _BLOCK

    def __post_init__(self) -> None:
        if not 0 <= self.eps < math.inf:
            raise ConfigError(f"policy repair: eps {self.eps} is not a deviation; give a share of V's length, 0.1")
        if self.block < 1:
            raise ConfigError(f"policy repair: blocks of {self.block} tokens; give 1 or more")

    @property
    def name(self) -> str:
        return f"repair:{written(self.eps)}" + (f",{self.block}" if self.block != _BLOCK else "")

    @property
    def check(self) -> Check:
        return Check(self.eps, self.block, 1, get_args(Changed), front=True)

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return ()
