"""Prompts run by one or several plans: what comes out is a pass with its K/V filled, and logits.

Plans run side by side, and what two of them have in common is computed once. Of the plans of one prompt, the one that
computes most of the prompt's front leads; another takes from it the front that it would compute itself. A prompt that
differs from the first one only in its tail takes what stands before the tail from the first one's pass under its plan.

    first prompt    leader    # # # # # # # # # #
                    other     | from it  | . . # #
    second prompt   other     | from that one | # #
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlcache.capture import Checkpoints
from vlcache.engines.transformers.adapter import PromptPass, run_layer
from vlcache.engines.transformers.prompt import Prompt
from vlcache.exact import ExactPrefix, common_tokens
from vlcache.plan import Plan
from vlcache.prefill import Job, place, selective_prefill
from vlcache.report import Report
from vlcache.types import Entry, Geometry

__all__ = ["Ran", "Scored", "run_plans"]


@dataclass(frozen=True, slots=True)
class Scored:
    """A continuation under one policy.

    Attributes
    ----------
    logits : Tensor, `[len(continuation), vocabulary]`
    report : Report
        As if it had been scored alone; but `seconds` are the whole call's.
    """

    logits: Tensor
    report: Report


@dataclass(frozen=True, slots=True)
class Ran:
    """What came out.

    Attributes
    ----------
    plan : Plan
        The leader of the first prompt's.
    work : PromptPass
        Its pass: K/V of the whole prompt.
    watch : Checkpoints
        Of its pass.
    logits : list of list of Tensor, `[count(plan.want), vocabulary]`
        By prompt and plan, in the order given.
    """

    plan: Plan
    work: PromptPass
    watch: Checkpoints
    logits: list[list[Tensor]]


def run_plans(
    model: Any,
    geometry: Geometry,
    prompts: Sequence[Prompt],
    encoded: Sequence[Tensor | None],
    plans: Sequence[Sequence[Plan]],
    entries: Mapping[str, Entry],
    prefix: ExactPrefix | None,
    checkpoint_layers: Sequence[int] = (),
) -> Ran:
    """Fill the prompts' K/V by each plan.

    Parameters
    ----------
    prompts : sequence of Prompt
        Equal up to the end of their last picture.
    encoded : sequence of Tensor or None
        Encoder outputs of their pictures, see `PromptPass`.
    plans : sequence of sequence of Plan
        By prompt, for the same policies. All have the same `begin`; the K/V of what stands before it are in `prefix`.
    entries : mapping of str to Entry
        Of the pictures that plans reuse, by digest.
    checkpoint_layers : sequence of int
        Layers whose input the leader's pass keeps.
    """
    jobs: list[Job] = []
    passes: list[PromptPass] = []
    device = model.get_input_embeddings().weight.device
    leader, *others = sorted(dict.fromkeys(plans[0]), key=lambda plan: -plan.computed_until())
    watch = Checkpoints(leader, checkpoint_layers)

    def add(prompt: Prompt, plan: Plan, source: int | None) -> int:
        work = PromptPass(model, geometry, prompt.ids, prompt.positions, prompt.spans, encoded)
        if source is not None:
            work.follow(passes[source], plan.begin)
        elif prefix is not None:
            work.fill(prefix.keys, prefix.values, plan.begin)
        positions = prompt.positions.to(device)
        spans = [s.span for s in plan.spans]
        placed = [place(entries[s.content], s, positions[:, s.start : s.stop], geometry.rope) for s in spans]
        jobs.append(Job(work, plan, placed, watch if source is None else None))
        passes.append(work)
        return len(jobs) - 1

    first = {leader: add(prompts[0], leader, None)}
    for plan in others:
        begin = min(plan.computed_until(), plan.want[0][0])
        first[plan] = add(prompts[0], plan.behind(begin), first[leader])
    where = [first]
    for prompt, its in zip(prompts[1:], plans[1:], strict=True):
        same, mine = common_tokens(prompts[0].ids, prompt.ids), {}
        for plan, like in zip(its, plans[0], strict=True):
            if plan not in mine:
                mine[plan] = add(prompt, plan.behind(min(same, plan.want[0][0])), first[like])
        where.append(mine)
    hidden = selective_prefill(jobs, lambda steps, rows: run_layer(passes, steps, rows))
    joined: Tensor = model.lm_head(model.model.language_model.norm(torch.cat(hidden)[None]))[0]
    by_job = torch.split(joined, [len(rows) for rows in hidden])
    logits = [[by_job[mine[plan]] for plan in its] for its, mine in zip(plans, where, strict=True)]
    return Ran(leader, passes[0], watch, logits)
