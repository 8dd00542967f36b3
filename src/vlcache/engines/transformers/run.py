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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vlcache.capture import Checkpoints
from vlcache.engines.transformers.adapter import PromptPass, run_layer
from vlcache.engines.transformers.prompt import Prompt
from vlcache.exact import ExactPrefix, common_tokens
from vlcache.plan import Plan
from vlcache.policies import Policy
from vlcache.prefill import Job, place
from vlcache.report import Report
from vlcache.types import Entry, Geometry
from vlcache.verify import Done, checked_prefill

__all__ = ["Ran", "Scored", "run_jobs", "run_plans"]


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
    done : list of list of Done
        By prompt and policy, in the order given, each as if it had run alone.
    exact_until : int
        Index up to which the K/V of `work` are exact.
    """

    plan: Plan
    work: PromptPass
    watch: Checkpoints
    done: list[list[Done]]
    exact_until: int


def run_plans(
    model: Any,
    geometry: Geometry,
    prompts: Sequence[Prompt],
    encoded: Sequence[Tensor | None],
    plans: Sequence[Sequence[Plan]],
    policies: Sequence[Policy],
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
        By prompt and policy. All have the same `begin`; the K/V of what stands before it are in `prefix`.
    policies : sequence of Policy
    entries : mapping of str to Entry
        Of the pictures that plans reuse, by digest.
    checkpoint_layers : sequence of int
        Layers whose input the leader's pass keeps.
    """
    jobs: list[Job] = []
    passes: list[PromptPass] = []
    device = model.get_input_embeddings().weight.device
    asked = [[_Asked.of(*one) for one in zip(its, policies, strict=True)] for its in plans]
    leader, *others = sorted(dict.fromkeys(asked[0]), key=lambda one: -one.plan.computed_until())
    watch = Checkpoints(leader.plan, checkpoint_layers)

    def add(prompt: Prompt, one: _Asked, source: int | None = None, begin: int = 0) -> int:
        work = PromptPass(model, geometry, prompt.ids, prompt.positions, prompt.spans, encoded)
        plan = one.plan if source is None else one.plan.behind(begin)
        if source is not None:
            work.follow(passes[source], begin)
        elif prefix is not None:
            work.fill(prefix.keys, prefix.values, plan.begin)
        positions = prompt.positions.to(device)
        spans = [s.span for s in plan.spans]
        placed = [place(entries[s.content], s, positions[:, s.start : s.stop], geometry.rope) for s in spans]
        jobs.append(Job(work, plan, placed, one.policy, (watch,) if source is None else ()))
        passes.append(work)
        return len(jobs) - 1

    first = {leader: add(prompts[0], leader)}
    for one in others:
        first[one] = add(prompts[0], one, first[leader], one.common(one.plan.end))
    where = [first]
    for prompt, its in zip(prompts[1:], asked[1:], strict=True):
        same, mine = common_tokens(prompts[0].ids, prompt.ids), {}
        for one, like in zip(its, asked[0], strict=True):
            if one not in mine and one.looks_behind:
                mine[one] = add(prompt, one, first[leader], one.common(same))
            elif one not in mine:
                mine[one] = add(prompt, one, first[like], min(same, one.plan.want[0][0]))
        where.append(mine)
    ran = run_jobs(model, jobs, passes)
    done = []
    for its, mine in zip(asked, where, strict=True):
        # A tail that follows a pass over the same pictures settles nothing itself
        alone = [(one.plan, ran[mine[one]], ran[first[like]]) for one, like in zip(its, asked[0], strict=True)]
        done.append([_as_alone(plan, own, like) for plan, own, like in alone])
    return Ran(done[0][asked[0].index(leader)].passes[0], passes[0], watch, done, ran[0].exact_until)


def run_jobs(model: Any, jobs: Sequence[Job], passes: Sequence[PromptPass]) -> list[Done]:
    """Carry out jobs side by side, and what their policies want checked; `passes` are their adapters."""

    def logits(hidden: Sequence[Tensor]) -> Sequence[Tensor]:
        joined: Tensor = model.lm_head(model.model.language_model.norm(torch.cat(list(hidden))[None]))[0]
        return torch.split(joined, [len(rows) for rows in hidden])

    return checked_prefill(jobs, lambda numbers: partial(run_layer, [passes[n] for n in numbers]), logits)


def _as_alone(plan: Plan, own: Done, like: Done) -> Done:
    """What a pass did, with what it took from others as if it had computed that itself."""
    first = plan.settled_as(own.passes[0] if own.passes[0].spans else like.passes[0])
    return replace(own, passes=(first, *own.passes[1:]))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A plan, and the policy that settles it where it looks: what is computed once if it is asked for twice."""

    plan: Plan
    policy: Policy | None

    @classmethod
    def of(cls, plan: Plan, policy: Policy) -> _Asked:
        return cls(plan, None if plan.look is None and policy.check is None else policy)

    @property
    def looks_behind(self) -> bool:
        """Whether it depends on the text behind the pictures what is computed of them."""
        checked = self.policy is not None and self.policy.check is not None
        return checked or (self.plan.look is not None and self.plan.look.what == "attention")

    def common(self, stop: int) -> int:
        """Up to where a pass may follow another one of a prompt that is the same up to `stop`."""
        alike = self.plan.exact_until() if self.looks_behind else self.plan.computed_until()
        return min(alike, self.plan.want[0][0], stop)
