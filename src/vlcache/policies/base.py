"""What a policy is: a pure rule that says which tokens of a known picture each layer computes afresh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Evidence", "Look", "Policy"]


@dataclass(frozen=True, slots=True)
class Look:
    """A measurement that a rule wants in the middle of the pass.

    Attributes
    ----------
    layer : int
        Once this layer has computed its rows' K and V, before its attention.
    what : {"values", "attention"}
        `values`: squared distance of each token's fresh V to the cached one, over heads and dimensions. `attention`:
        how far the attention that the text behind the span pays to each token moves with fresh K, summed over rows and
        heads.
    """

    layer: int
    what: Literal["values", "attention"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a policy may look at besides the span and the layer.

    Attributes
    ----------
    layers : int
        L.
    checkpoints : tuple of int
        Layers at which rows can enter from a cached hidden state (0 is always one and is not listed).
    scores : tuple of float or None
        By token of the span, what the rule's look measured; 0 where the looked-at layer did not compute the token. None
        before the look: the rule then says how many rows it is going to ask for, so that a plan's size is known.
    """

    layers: int
    checkpoints: tuple[int, ...] = ()
    scores: tuple[float, ...] | None = None


class Policy(Protocol):
    """A rule. Implementations are frozen dataclasses: hashable, picklable, without tensors."""

    @property
    def name(self) -> str:
        """How the rule is written on a command line, `prefix:0.02`."""
        ...

    def look(self, layers: int) -> Look | None:
        """What the rule measures in a model of so many layers; None if the span alone decides."""
        ...

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        """Tokens of `span` that `layer` computes, counted from the span's first token.

        The plan widens what cannot be: without a checkpoint at a layer its rows are computed in the layer
        before too. Behind a look it cannot, and computes those of them that are still there.
        """
        ...
