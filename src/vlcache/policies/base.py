"""What a policy is: a pure rule that says which tokens of a known picture each layer computes afresh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from vlcache.context import Changed
from vlcache.ranges import Ranges
from vlcache.types import Span

__all__ = ["Check", "Evidence", "Look", "Policy", "Rule"]


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
    changed : {"text", "turn", "pictures", "neighbours"}
        What differs before the span from where its entry was captured, see `vlcache.context`; the gravest where that is
        not known.
    scores : tuple of float or None
        By token of the span, what the rule's look measured; 0 where the looked-at layer did not compute the token. None
        before the look: the rule then says how many rows it is going to ask for, so that a plan's size is known.
    """

    layers: int
    checkpoints: tuple[int, ...] = ()
    changed: Changed = "neighbours"
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """How reuse is verified once a prompt has been filled, see `vlcache.verify`.

    Attributes
    ----------
    tau : float
        Largest movement of the answering row's distribution that counts as none: KL, nats.
    probes : int
        Tokens that the check computes afresh to see.
    looks : int
        How often at most, the check included. Each has twice as many tokens fresh as the one before, of several
        suspicious pictures so many for each: those that are attended to then besides the earlier ones.
    suspects : tuple of {"text", "turn", "pictures", "neighbours"}
        What has to differ before a picture for it to be looked at, see `vlcache.context`.
    checked : tuple of {"text", "turn", "pictures", "neighbours"}
        Of these, what a check decides about. Where others differ there is none, and the second look comes at once.
    sure : float
        Probability of the first token from which on the answer of a look is taken.
    calm : bool
        Whether it is also taken where it has not moved, however sure.
    repair : Policy, optional
        What is computed first where a check fails and text of the turn is all that differs.
    follow : float
        The answering row's attention is followed in the layers behind this share of the depth.
    recompute : bool
        Whether everything is computed again where nothing else settles the answer; False is for measurements.
    front : bool
        Instead of looking where the answer looks: `probes` tokens after the other from each picture's front, until
        their V deviate by at most `tau`.
    text : int
        Text rows before the answering one that a look computes again at most: what the question's own rows have
        gathered from the pictures. The check computes none of them.
    """

    tau: float
    probes: int
    looks: int
    suspects: tuple[Changed, ...]
    checked: tuple[Changed, ...] = ()
    sure: float = 2.0
    calm: bool = True
    repair: Policy | None = None
    follow: float = 0.5
    text: int = 16
    recompute: bool = True
    front: bool = False


class Policy(Protocol):
    """A rule. Implementations are frozen dataclasses: hashable, picklable, without tensors."""

    @property
    def name(self) -> str:
        """How the rule is written on a command line, `prefix:0.02`."""
        ...

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Layers at which the rule has rows enter: entries captured under it keep hidden states there."""
        ...

    @property
    def check(self) -> Check | None:
        """How the rule is verified, if it is."""
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


class Rule:
    """What most rules are: nothing is measured on the way, nothing checked afterwards."""

    __slots__ = ()

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return ()

    @property
    def check(self) -> Check | None:
        return None

    def look(self, layers: int) -> Look | None:
        return None
