"""What a policy is: a pure rule that says which tokens of a known picture each layer computes afresh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Evidence", "Policy"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a policy may look at besides the span and the layer.

    Attributes
    ----------
    layers : int
        L.
    checkpoints : tuple of int
        Layers at which rows can enter from a cached hidden state (0 is always one and is not listed).

    Rules that measure (deviations, attention) get their measurements as further fields here, so that a rule stays
    a pure function.
    """

    layers: int
    checkpoints: tuple[int, ...] = ()


class Policy(Protocol):
    """A rule. Implementations are frozen dataclasses: hashable, picklable, without tensors."""

    @property
    def name(self) -> str:
        """How the rule is written on a command line, `prefix:0.02`."""
        ...

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        """Tokens of `span` that `layer` computes, counted from the span's first token.

        The plan widens what cannot be: without a checkpoint at a layer its rows are computed in the layer
        before too.
        """
        ...
