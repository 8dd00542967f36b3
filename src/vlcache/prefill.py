"""Selective prefill: one driver for every policy, and the protocol that an engine's adapter fulfils.

Each layer: put the reused spans' moved K/V in place, let rows enter, compute the rows' K/V, take the look that a rule
may want and settle the deeper layers' rows, then attention and MLP for those that go on. The driver holds hidden
states of live rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from vlcache.measure import Gaze, moved_attention, moved_values
from vlcache.plan import LayerStep, Plan, settle
from vlcache.policies.base import Policy
from vlcache.ranges import Ranges, count, intersect, pieces, places, shift, subtract, union
from vlcache.rope import Rope, Rotation, rotate
from vlcache.types import Entry, Geometry, Span

__all__ = [
    "Adapter",
    "Job",
    "Placed",
    "Queries",
    "RunLayer",
    "at_vision",
    "place",
    "put_reused",
    "selective_prefill",
    "take",
]


class Adapter(Protocol):
    """One prompt on one engine. Row sets are prompt indices; hidden states are `[rows, hidden]`."""

    @property
    def geometry(self) -> Geometry: ...

    def embed(self, rows: Ranges) -> Tensor:
        """Input of layer 0: text embeddings, and encoder outputs at vision tokens."""
        ...

    def read_kv(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of the prompt's tokens, `[stop - start, H, D]` each; valid until the next write."""
        ...

    def write_kv(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Put K and V, `[n, H, D]`, at the prompt's tokens from `start` on."""
        ...

    def follow_attention(self, gaze: Gaze | None) -> None:
        """Have `gaze` see each layer's queries from now on; None: no longer."""
        ...


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry brought to the place of a span: K/V per layer, moved on demand."""

    span: Span
    entry: Entry
    rotation: Rotation | None
    device: torch.device

    def kv(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Moved K and V of prompt tokens `start` to `stop`, `[stop - start, H, D]`; EntryLostError if they are not to
        be had."""
        a, b = start - self.span.start, stop - self.span.start
        keys, values = (kv[a:b].to(self.device, non_blocking=True) for kv in self.entry.kv(layer))
        return rotate(keys, self.rotation and self.rotation.rows(a, b)), values

    def hidden(self, layer: int, rows: Ranges) -> Tensor:
        """Checkpointed hidden states of prompt tokens `rows`, `[rows, hidden]`."""
        hidden = self.entry.checkpoints[layer].to(self.device)
        return take(hidden, shift(rows, -self.span.start))


def place(entry: Entry, span: Span, positions: Tensor, rope: Rope) -> Placed:
    """Bring an entry to a span whose tokens have the rotary `positions`, int64 `[A, N]`."""
    old = entry.positions.to(positions.device)
    return Placed(span, entry, rope.turn(old, positions), positions.device)


def take(tensor: Tensor, where: Ranges) -> Tensor:
    """Rows of a tensor; a view where they are one run."""
    if len(where) == 1:
        start, stop = where[0]
        return tensor[start:stop]
    return torch.cat([tensor[start:stop] for start, stop in where]) if where else tensor[:0]


def at_vision(
    hidden: Tensor, rows: Ranges, spans: Sequence[Span], encoded: Sequence[Tensor | None], part: int, add: bool
) -> None:
    """Set or add the encoder's `part` (0 the embedding, then DeepStack's features) at vision tokens among rows.

    Parameters
    ----------
    hidden : Tensor, `[count(rows), hidden]`
        Written to.
    encoded : sequence of Tensor or None, `[N, hidden * (1 + deepstack)]`
        Encoder outputs of `spans`; None for spans that have no row here.
    """
    width = hidden.shape[-1]
    for span, output in zip(spans, encoded, strict=True):
        mine = intersect(rows, ((span.start, span.stop),))
        if not mine:
            continue
        assert output is not None, "a span is embedded that was not encoded"
        features = output[:, part * width : (part + 1) * width]
        for (a, b), (c, d) in zip(pieces(mine, rows), shift(mine, -span.start), strict=True):
            if add:
                hidden[a:b] += features[c:d]
            else:
                hidden[a:b] = features[c:d]


def put_reused(adapter: Adapter, step: LayerStep, placed: Sequence[Placed]) -> None:
    """Write the moved K/V of every reused token of this layer."""
    for span, ranges in zip(placed, step.reuse, strict=True):
        for start, stop in ranges:
            adapter.write_kv(step.layer, start, *span.kv(step.layer, start, stop))


@dataclass(frozen=True, slots=True)
class Job:
    """One prefill: a prompt on an engine, its plan, and the entries of `plan.spans` in the same order.

    Attributes
    ----------
    policy : Policy, optional
        Asked again after the plan's look; needed where there is one.
    watch : sequence of callable
        Called with each layer's step and its input `[rows, hidden]`, to capture hidden states. They must copy what
        they keep.
    stale : frozenset of int
        Layers in which the pictures' cached K/V take the place of those computed before attention sees them, although
        their tokens go on: how much a layer's reuse costs by itself. For measurements only.
    resume : callable, optional
        Hidden states of rows outside of the pictures at the plan's first layer, `[rows, hidden]`; needed where that is
        not layer 0.
    """

    adapter: Adapter
    plan: Plan
    placed: Sequence[Placed] = ()
    policy: Policy | None = None
    watch: Sequence[Callable[[LayerStep, Tensor], None]] = ()
    stale: frozenset[int] = frozenset()
    resume: Callable[[Ranges], Tensor] | None = None


Queries = Callable[[int, Ranges], Tensor]
"""A job's queries at some of its step's rows, turned and times the attention's scale: `[heads, count(rows), D]`."""

RunLayer = Callable[[Sequence[LayerStep], Sequence[Tensor], Callable[[Queries], Sequence[LayerStep]]], Sequence[Tensor]]
"""One layer of several jobs: for each its step and input `[count(step.rows), hidden]`.

Computes and writes K/V of `step.rows`; then calls its third argument, which gives the steps with other rows to keep
where a rule has looked; and returns the layer's output at those steps' `keep`, by job. A row attends to every key of
its job at its own index and before it. Inputs may be overwritten.
"""


def selective_prefill(jobs: Sequence[Job], run_layer: RunLayer) -> list[tuple[Plan, Tensor]]:
    """Fill the K/V of prompts by their plans, layer by layer, all of them in the same layer at a time.

    Parameters
    ----------
    jobs : sequence of Job
    run_layer : callable
        Runs the jobs' steps of one layer, see `RunLayer`.

    Returns
    -------
    list of tuple
        For each job its plan as it was carried out, and the last layer's output, before the final norm,
        `[count(plan.want), hidden]`.
    """
    plans = [job.plan for job in jobs]
    assert len({(plan.first, plan.layers) for plan in plans}) == 1, "jobs in different layers"
    hidden: Sequence[Tensor] = [torch.empty(0)] * len(jobs)
    for layer in range(plans[0].first, plans[0].layers):

        def look(queries: Queries, layer: int = layer) -> list[LayerStep]:
            for number, (job, plan) in enumerate(zip(jobs, plans, strict=True)):
                for placed in job.placed if layer in job.stale else ():
                    span = placed.span
                    job.adapter.write_kv(layer, span.start, *placed.kv(layer, span.start, span.stop))
                if plan.look is not None and plan.look.layer == layer:
                    assert job.policy is not None
                    scores = _scores(job, plan, partial(queries, number))
                    plans[number] = settle(plan, job.policy, scores)
            return [plan.step(layer) for plan in plans]

        steps = [plan.step(layer) for plan in plans]
        rows = [_rows(job, step, h) for job, step, h in zip(jobs, steps, hidden, strict=True)]
        hidden = run_layer(steps, rows, look)
    return list(zip(plans, hidden, strict=True))


def _scores(job: Job, plan: Plan, queries: Callable[[Ranges], Tensor]) -> list[tuple[float, ...]]:
    """What a plan's look measures, by span and token."""
    assert plan.look is not None
    layer = plan.look.layer
    scores = []
    for one, placed in zip(plan.spans, job.placed, strict=True):
        span = one.span
        cached_keys, cached_values = placed.kv(layer, span.start, span.stop)
        if plan.look.what == "values":
            moved = moved_values(job.adapter.read_kv(layer, span.start, span.stop)[1], cached_values)
        else:
            behind = intersect(plan.text_rows(), ((span.stop, plan.end),))
            keys = job.adapter.read_kv(layer, 0, plan.end)[0]
            moved = moved_attention(queries(behind), keys, cached_keys, behind, span.start)
        computed = torch.zeros(span.length, dtype=torch.bool, device=moved.device)
        for start, stop in one.rows[layer]:
            computed[start:stop] = True
        scores.append(tuple(moved.where(computed, 0.0).tolist()))
    return scores


def _rows(job: Job, step: LayerStep, hidden: Tensor) -> Tensor:
    """A step's input, `[count(step.rows), hidden]`, once its reused K/V are in place."""
    put_reused(job.adapter, step, job.placed)
    if step.layer == 0:
        hidden = job.adapter.embed(step.rows)
    elif step.enter:
        hidden = _admit(step, hidden, job)
    for watch in job.watch:
        watch(step, hidden)
    return hidden


def _admit(step: LayerStep, hidden: Tensor, job: Job) -> Tensor:
    """Hidden states of `step.rows`: those that came from the layer before, and those that enter here."""
    came = subtract(step.rows, step.enter)
    parts: list[tuple[Ranges, Tensor]] = [(came, hidden)] if came else []
    text = step.enter
    for span in job.placed:
        rows = intersect(step.enter, ((span.span.start, span.span.stop),))
        text = subtract(text, rows)
        if rows:
            parts.append((rows, span.hidden(step.layer, rows)))
    if text:
        assert job.resume is not None, "text enters a layer that nothing was kept of"
        parts.append((text, job.resume(text)))
    assert union(*(rows for rows, _ in parts)) == step.rows, "rows enter that no checkpoint holds"
    out = parts[0][1].new_empty(count(step.rows), parts[0][1].shape[-1])
    for rows, part in parts:
        at = 0
        for start, stop in places(rows, step.rows):
            out[start:stop] = part[at : at + stop - start]
            at += stop - start
    return out
