"""The reuse error itself: what reused tokens are off by, what they hand to later ones, and what repairing buys.

    e_self(i)      a token's cached K and V against a fresh prefill's
    e_prop(i)      what token i hands on: all later tokens' error when i alone is reused
    e_total(k)     the error that is left when k tokens are computed: from the front, from the back, at random, or those
                   whose V deviates most at layer 1

Errors are squared, relative to the fresh vectors' own squared length, in the mean over layers, K and V.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlcache.bench.asking import Asker, divergence_of
from vlcache.bench.trials import Trial
from vlcache.engines.transformers.adapter import PromptPass
from vlcache.engines.transformers.study import Study, study
from vlcache.policies import Evidence, Full, Policy, Rule
from vlcache.ranges import Ranges, normal
from vlcache.types import Span

__all__ = ["ORDERS", "SHARES", "Errors", "measure"]

ORDERS = ("front", "back", "deviation", "random")
SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
_BINS = 8
# Passes that hold their K/V side by side
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Chosen(Rule):
    """These tokens of the picture at `start`, in every layer; others' pictures are computed in full."""

    start: int
    tokens: Ranges

    @property
    def name(self) -> str:
        return "chosen"

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return self.tokens if span.start == self.start else ((0, span.length),)


@dataclass(frozen=True, slots=True)
class Errors:
    """Of one pair's last picture.

    Attributes
    ----------
    change : str
    own, handed_on : Tensor, `[8]`
        e_self and e_prop, in the mean over the tokens of each eighth of the picture.
    total, kl : dict of str to Tensor, `[len(SHARES)]`
        By order: e_total, in the mean over the picture's tokens, and the answer's divergence, nats.
    by_layer : Tensor, `[L]`
        e_self, in the mean over the tokens.
    """

    change: str
    own: Tensor
    handed_on: Tensor
    total: dict[str, Tensor]
    kl: dict[str, Tensor]
    by_layer: Tensor


def measure(asker: Asker, trial: Trial, seed: int = 0) -> Errors:
    """Measure a pair; MediaError or InputError for a prompt that cannot be used."""
    asker.capture(trial)
    plain = asker.plain(trial.asked)
    asked = study(asker.cache, trial.asked, plain.tokens)
    span = asked.placed[-1].span
    fresh = _vectors(asked.run([Full()])[0][1], span)
    cached = _vectors(asked.run([_Chosen(span.start, ())])[0][1], span)
    own = _error(cached, fresh)
    handed = []
    singles = [_Chosen(span.start, normal(((0, i), (i + 1, span.length)))) for i in range(span.length)]
    for number, (_, work) in enumerate(_each(asked, singles)):
        error = _error(_vectors(work, span), fresh).mean(0)
        handed.append(float(error[number + 1 :].sum()))
    values = _values_at(cached, fresh, 1)
    total, kl = {}, {}
    for order in ORDERS:
        ranked = _ranked(order, values, random.Random(seed))
        chosen = [ranked[: round(share * span.length)] for share in SHARES]
        policies = [_Chosen(span.start, normal((i, i + 1) for i in some)) for some in chosen]
        ran = _each(asked, policies)
        total[order] = torch.stack([_error(_vectors(work, span), fresh).mean() for _, work in ran])
        kl[order] = torch.tensor([divergence_of(plain.logits, done.logits.float()) for done, _ in ran])
    return Errors(trial.change, _eighths(own.mean(0)), _eighths(torch.tensor(handed)), total, kl, own.mean(1))


def _each(asked: Study, policies: Sequence[Policy]) -> list[tuple[Any, PromptPass]]:
    found: list[tuple[Any, PromptPass]] = []
    for start in range(0, len(policies), _AT_ONCE):
        found += asked.run(policies[start : start + _AT_ONCE])
    return found


def _vectors(work: PromptPass, span: Span) -> Tensor:
    """K and V side by side, `[L, 2, N, H * D]`."""
    layers = [
        [kv[layer][0, :, span.start : span.stop].transpose(0, 1).flatten(1) for kv in (work.keys, work.values)]
        for layer in range(len(work.keys))
    ]
    return torch.stack([torch.stack(kv) for kv in layers]).float()


def _error(vectors: Tensor, fresh: Tensor) -> Tensor:
    """Squared and relative, in the mean over K and V: `[L, N]`."""
    return ((vectors - fresh).square().sum(-1) / fresh.square().sum(-1)).mean(1)


def _values_at(cached: Tensor, fresh: Tensor, layer: int) -> list[float]:
    distance: list[float] = (cached[layer, 1] - fresh[layer, 1]).square().sum(-1).tolist()
    return distance


def _ranked(order: str, values: Sequence[float], rng: random.Random) -> list[int]:
    tokens = list(range(len(values)))
    if order == "back":
        tokens.reverse()
    elif order == "deviation":
        tokens.sort(key=lambda token: -values[token])
    elif order == "random":
        rng.shuffle(tokens)
    return tokens


def _eighths(by_token: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in torch.tensor_split(by_token, _BINS)])
