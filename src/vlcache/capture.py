"""From a prefilled prompt to entries: only what was computed exactly becomes one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from vlcache.plan import LayerStep, Plan
from vlcache.prefill import Adapter, take
from vlcache.ranges import intersect, places
from vlcache.types import Context, Entry, Header, Span

__all__ = ["Checkpoints", "capture", "token_seconds"]


class Checkpoints:
    """Watches a prefill and copies exact rows' hidden states at some layers.

    Parameters
    ----------
    plan : Plan
    layers : sequence of int
        Layers whose input is copied.
    """

    def __init__(self, plan: Plan, layers: Sequence[int]) -> None:
        self._layers = frozenset(layers)
        self._begin = plan.begin
        self._exact = ((plan.begin, plan.exact_until()),) if plan.begin < plan.exact_until() else ()
        self._hidden: dict[int, Tensor] = {}

    def __call__(self, step: LayerStep, hidden: Tensor) -> None:
        if self._exact and step.layer in self._layers:
            rows = places(intersect(self._exact, step.rows), step.rows)
            self._hidden[step.layer] = take(hidden, rows).detach().cpu().clone()

    def of(self, span: Span) -> dict[int, Tensor]:
        """A span's checkpoints, `[N, hidden]` by layer."""
        start, stop = span.start - self._begin, span.stop - self._begin
        return {layer: hidden[start:stop].clone() for layer, hidden in self._hidden.items()}


def capture(
    adapter: Adapter,
    plan: Plan,
    spans: Sequence[Span],
    headers: Sequence[Header],
    encoded: Sequence[Tensor | None],
    positions: Tensor,
    known: Mapping[str, Entry],
    checkpoints: Checkpoints,
    where: Sequence[Context],
    token_s: tuple[float, float] = (0.0, 0.0),
) -> Iterator[Entry]:
    """Entries for what a prompt has shown for the first time, copied to the CPU.

    A picture behind repaired K/V gets an entry without K/V: its encoder output is exact, its K/V are not.

    Parameters
    ----------
    spans, headers, encoded, where
        Every picture of the prompt, what an entry for it says, its encoder output `[N, hidden * (1 + deepstack)]`, and
        what stands before it.
    positions : Tensor, int64, `[A, T]`
    known : mapping of str to Entry
        What the lookup found; a full entry is not made again.
    token_s : tuple of float
        Seconds that a token took to encode and to prefill, 0 if unknown.
    """
    done = set()
    # Of a picture that stands in the prompt twice, the exact one first
    pictures = sorted(zip(spans, headers, encoded, where, strict=True), key=lambda p: not _is_exact(p[0], plan))
    for span, header, output, context in pictures:
        is_exact = _is_exact(span, plan)
        old = known.get(span.content)
        if output is None or span.content in done or (old is not None and (old.has_kv or not is_exact)):
            continue
        done.add(span.content)
        keys = values = None
        if is_exact:
            kv = [adapter.read_kv(layer, span.start, span.stop) for layer in range(plan.layers)]
            keys, values = (torch.stack(tensors).cpu() for tensors in zip(*kv, strict=True))
        yield Entry(
            header=header,
            encoder=output.cpu(),
            positions=positions[:, span.start : span.stop].cpu().clone(),
            keys=keys,
            values=values,
            checkpoints=checkpoints.of(span) if is_exact else {},
            context=context if is_exact else None,
            created_s=time.time(),
            cost_s=(token_s[0] + is_exact * token_s[1]) * span.length,
        )


def token_seconds(
    passes: Sequence[Plan], spans: Sequence[Span], known: Mapping[str, Entry], seconds: Mapping[str, float]
) -> tuple[int, tuple[float, float]]:
    """New pictures' tokens in a prompt, and the seconds that one took to encode and to prefill; 0 if there are none.

    Parameters
    ----------
    passes : sequence of Plan
        All that was computed, the whole prompt first.
    seconds : mapping of str to float
        By stage; those of `encode` and `prefill` are read.
    """
    first = passes[0]
    new = sum(s.length for s in spans if s.start >= first.begin and s.content not in known)
    if not new:
        return 0, (0.0, 0.0)
    rows = sum(sum(plan.rows_per_layer()) for plan in passes) / first.layers
    return new, (seconds["encode"] / new, seconds["prefill"] / rows)


def _is_exact(span: Span, plan: Plan) -> bool:
    """Whether this pass computed the span's K/V, and on nothing but exact ones."""
    return plan.begin <= span.start and span.stop <= plan.exact_until()
