"""Reuse that verifies itself: fill a prompt on cached K/V, look where the answer looks, and compute just that afresh.

    fill        every text row on cached K/V; remember which of the pictures' tokens the last rows attend to
    check       compute the most attended tokens afresh from layer 0 on, and the answering row once more
                the answer stays: reuse was safe. It moves: it was not
    look        the tokens that are attended to now besides: twice as many, all of them afresh, and the last text rows,
                until the answer is sure, or stays. What differs may ask for this at once, without a check
    repair      where only text of the turn differs: the pictures' tokens in a band of layers, and the text behind them
                from that band on, if the answer is sure then, or stays
    recompute   everything behind the first suspicious picture. The encoder's output is reused in every case

All this where what stands before a picture may have changed what was read into it, see `vlcache.context`. A check, and
a look, is one pass over few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from vlcache.measure import Gaze, divergence, moved_values, preference
from vlcache.plan import LayerStep, Plan, SpanPlan, make_plan, plan_span
from vlcache.policies.base import Check, Policy
from vlcache.policies.full import Full
from vlcache.policies.none import NoRecompute
from vlcache.prefill import Job, RunLayer, selective_prefill, take
from vlcache.ranges import Ranges, count, intersect, normal, places, shift, subtract, union
from vlcache.types import Span

__all__ = ["Done", "Verdict", "checked_prefill"]

Result = Literal["skipped", "safe", "repaired", "recomputed"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What checking found.

    Attributes
    ----------
    result : {"skipped", "safe", "repaired", "recomputed"}
        `skipped`: nothing before the pictures was suspicious.
    moved : tuple of float
        How far the answering row's distribution moved with each pass behind the first: KL, nats. Under `repair` how far
        each block's V deviated.
    against : float
        By how much the last look prefers another first token to the one that the first pass gives: difference of
        log-probabilities, negative where it keeps that token. What tells safe from unsafe reuse.
    looked_at : tuple of int
        Prompt indices of the tokens that were computed afresh to see.
    """

    result: Result = "skipped"
    moved: tuple[float, ...] = ()
    against: float = 0.0
    looked_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """A job carried out.

    Attributes
    ----------
    passes : tuple of Plan
        What was computed, first to last.
    logits : Tensor, `[count(plan.want), vocabulary]`
        Of the last pass.
    before : tuple of Tensor
        Those of the passes before that had any, first to last.
    exact_until : int
        Index up to which the K/V are exact now.
    verdict : Verdict or None
        None where the policy has no check.
    """

    passes: tuple[Plan, ...]
    logits: Tensor
    exact_until: int
    verdict: Verdict | None = None
    before: tuple[Tensor, ...] = ()


class _Trail:
    """Copies the text rows' hidden states at the input of one layer, so that a later pass can start there."""

    def __init__(self, layer: int, rows: Ranges) -> None:
        self._layer = layer
        self._rows = rows
        self._hidden: Tensor | None = None

    def __call__(self, step: LayerStep, hidden: Tensor) -> None:
        if step.layer == self._layer:
            self._hidden = take(hidden, places(self._rows, step.rows)).clone()

    def resume(self, rows: Ranges) -> Tensor:
        assert self._hidden is not None
        return take(self._hidden, places(rows, self._rows))


@dataclass(slots=True)
class _Case:
    """A job that is checked."""

    job: Job
    check: Check
    suspects: tuple[SpanPlan, ...]
    gaze: Gaze
    repair: Plan | None
    trail: _Trail | None
    passes: list[Plan] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    looked_at: tuple[int, ...] = ()
    looks: int = 0
    answers: list[Tensor] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """Where what may have to be computed again starts."""
        return self.suspects[0].span.start

    def note(self, plan: Plan, answer: Tensor) -> None:
        """A pass was carried out."""
        self.job.adapter.follow_attention(None)
        self.passes.append(plan)
        if not len(answer):
            return
        if self.answers:
            self.moved.append(divergence(answer[0], self.answers[-1][0]))
        self.answers.append(answer)

    def close(self, result: Result, exact_until: int) -> Done:
        if result == "recomputed":  # of what stands before, as the first pass left it
            before = (s.span.start for s in self.passes[0].spans if s.span.start < self.begin and not s.exact)
            exact_until = min(before, default=self.passes[0].end)
        looked = self.answers[min(self.looks, len(self.answers) - 1)]
        against = preference(looked[0], self.answers[0][0])
        verdict = Verdict(result, tuple(self.moved), against, self.looked_at)
        return Done(tuple(self.passes), self.answers[-1], exact_until, verdict, tuple(self.answers[:-1]))


Stages = Generator[Job, None, Result]
"""The passes behind the first one, each made once the one before was carried out, and what came out."""

Run = Callable[[Sequence[int]], RunLayer]
Logits = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def checked_prefill(jobs: Sequence[Job], run: Run, logits: Logits) -> list[Done]:
    """`selective_prefill`, and what the jobs' policies want checked.

    Parameters
    ----------
    run : callable
        Gives a layer runner for some of the jobs, by number.
    logits : callable
        From the last layer's output, `[rows, hidden]` of several jobs, to logits, `[rows, vocabulary]` each.
    """
    cases = {number: case for number, job in enumerate(jobs) if (case := _case(job)) is not None}
    filling = [_watched(job, cases.get(number)) for number, job in enumerate(jobs)]
    filled = selective_prefill(filling, run(range(len(jobs))))
    answers = logits([hidden for _, hidden in filled])
    done = []
    for (plan, _), answer, job in zip(filled, answers, jobs, strict=True):
        checked = job.policy is not None and job.policy.check is not None
        done.append(Done((plan,), answer, plan.exact_until(), Verdict() if checked else None))
    for number, case in cases.items():
        case.note(filled[number][0], answers[number])
    going = {number: _front(case) if case.check.front else _verified(case) for number, case in cases.items()}
    work = dict(_advance(going, done, cases))
    while work:
        for some in _alike(work):
            ran = selective_prefill([work[number] for number in some], run(some))
            for number, (plan, _), answer in zip(some, ran, logits([hidden for _, hidden in ran]), strict=True):
                cases[number].note(plan, answer)
        work = dict(_advance({number: going[number] for number in work}, done, cases))
    return done


def _advance(going: Mapping[int, Stages], done: list[Done], cases: Mapping[int, _Case]) -> Iterator[tuple[int, Job]]:
    """Each case's next job; those that have come to their end are done."""
    for number, stages in going.items():
        try:
            yield number, next(stages)
        except StopIteration as end:
            done[number] = cases[number].close(end.value, done[number].exact_until)


def _case(job: Job) -> _Case | None:
    """None where there is nothing to check."""
    check = None if job.policy is None else job.policy.check
    plan = job.plan
    suspects = tuple(
        s for s in plan.spans if check is not None and s.evidence.changed in check.suspects and not s.exact
    )
    if check is None or not suspects:
        return None
    repair = trail = None
    layers = plan.layers
    if check.repair is not None and all(s.evidence.changed == "turn" for s in suspects):
        repair = _repair_plan(plan, check, suspects)
        if repair.first:
            trail = _Trail(repair.first, repair.text_rows())
    gaze = Gaze(_asking(plan, check, plan.want[0][0] + 1), min(layers - 1, round(check.follow * layers)))
    return _Case(job, check, suspects, gaze, repair, trail)


def _watched(job: Job, case: _Case | None) -> Job:
    if case is None:
        return job
    job.adapter.follow_attention(None if case.check.front else case.gaze)
    return job if case.trail is None else replace(job, watch=(*job.watch, case.trail))


def _repair_plan(plan: Plan, check: Check, suspects: tuple[SpanPlan, ...]) -> Plan:
    """The band of the suspicious spans, and the text behind the first of them from there on."""
    assert check.repair is not None
    begin, begins = suspects[0].span.start, {s.span for s in suspects}
    wanted = count(plan.want)
    behind = [s for s in plan.spans if s.span.start >= begin]
    made = make_plan(
        check.repair, [s.span for s in behind], [s.evidence for s in behind], begin, plan.end, plan.layers, wanted
    )
    spans = tuple(
        one if old in suspects else plan_span(NoRecompute(), old.span, old.evidence, plan.want)
        for one, old in zip(made.spans, behind, strict=True)
    )
    first = min(next((layer for layer, rows in enumerate(s.rows) if rows), 0) for s in spans if s.span in begins)
    # Cached K/V are in place, and what is fresh by now stays so
    return replace(made, spans=spans, first=first, text=made.text_rows())


def _verified(case: _Case) -> Stages:
    """A check where it decides, looks until the answer stays or is sure, then a band, then everything."""
    check = case.check
    has_check = check.looks > 1 and all(s.evidence.changed in check.checked for s in case.suspects)
    for look in range(0 if has_check else min(1, check.looks - 1), check.looks):
        is_check = has_check and not look
        job = _probe(case, check.probes * 2**look * (1 if is_check else len(case.suspects)), is_check)
        if job is None:
            break
        yield job
        stays = case.moved[-1] <= check.tau
        if stays if is_check else _taken(case):
            return "safe" if stays and len(case.moved) == 1 else "repaired"
    if case.repair is not None:
        yield _job(case, case.repair, check.repair)
        if _taken(case):
            return "repaired"
    if not case.check.recompute:
        return "repaired"
    plan, policy = case.passes[0], Full()
    behind = [s for s in plan.spans if s.span.start >= case.begin]
    spans, known = [s.span for s in behind], [s.evidence for s in behind]
    yield _job(case, make_plan(policy, spans, known, case.begin, plan.end, plan.layers, count(plan.want)), policy)
    return "recomputed"


def _taken(case: _Case) -> bool:
    """Whether the latest answer is sure, or has to do because it stays."""
    sure = float(case.answers[-1][0].float().softmax(-1).max())
    return sure >= case.check.sure or (case.check.calm and case.moved[-1] <= case.check.tau)


def _probe(case: _Case, tokens: int, is_check: bool) -> Job | None:
    """So many tokens of suspicious spans: those of earlier looks, and those that the last rows attend to most now. And
    the last text rows, of a check the answering one alone. None where all tokens are fresh."""
    assert case.gaze.paid is not None
    plan, paid = case.passes[0], case.gaze.paid.tolist()
    fresh = set(case.looked_at)
    stale = [i for s in case.suspects for i in range(s.span.start, s.span.stop) if i < len(paid) and i not in fresh]
    ranked = sorted(stale, key=lambda i: -paid[i])[: tokens - len(fresh)]
    if not ranked:
        return None
    case.looks += 1
    case.looked_at = tuple(sorted((*case.looked_at, *ranked)))
    case.gaze = case.gaze.again()
    case.job.adapter.follow_attention(case.gaze)
    # Those of earlier looks once more: they were computed on what was stale then
    text = _asking(plan, case.check, plan.end)
    return _some_rows(case, case.looked_at, intersect(text, ((plan.want[0][0], plan.end),)) if is_check else text)


def _front(case: _Case) -> Stages:
    """Blocks from the front of each span, one after the other, for as long as their V deviate; then the text behind."""
    plan, size = case.passes[0], case.check.probes
    deviations = []
    for one in case.suspects:
        for start in range(one.span.start, one.span.stop, size):
            block = range(start, min(start + size, one.span.stop))
            case.looked_at = (*case.looked_at, *block)
            yield _some_rows(case, block, ())
            deviations.append(_deviation(case, one.span, block))
            if deviations[-1] <= case.check.tau:
                break
    yield _some_rows(case, (), union(intersect(plan.text_rows(), ((case.begin, plan.end),)), plan.want))
    case.moved, case.looks = deviations, len(case.answers) - 1
    return "repaired"


def _deviation(case: _Case, span: Span, block: range) -> float:
    """How far the block's fresh V are from the cached ones in the deeper half: length of the difference over length."""
    (placed,) = (one for one in case.job.placed if one.span == span)
    layers = range(case.passes[0].layers // 2, case.passes[0].layers)
    found = []
    for layer in layers:
        fresh = case.job.adapter.read_kv(layer, block.start, block.stop)[1]
        cached = placed.kv(layer, block.start, block.stop)[1]
        length = moved_values(cached, torch.zeros_like(cached))
        found.append((moved_values(fresh, cached) / length.clamp_min(1e-12)).sqrt().mean())
    return float(torch.stack(found).mean())


def _some_rows(case: _Case, tokens: Iterable[int], text: Ranges) -> Job:
    """A pass over some of the pictures' tokens and some text, in every layer, on K/V that are in place."""
    plan = case.passes[0]
    vision = tuple((s.span.start, s.span.stop) for s in plan.spans)
    want = intersect(plan.want, union(text, vision)) if text else ()
    rows = union(normal((i, i + 1) for i in tokens), want)
    spans = tuple(
        replace(s, rows=(shift(intersect(rows, ((s.span.start, s.span.stop),)), -s.span.start),) * plan.layers)
        for s in plan.spans
    )
    fewer = replace(plan, spans=spans, look=None, text=subtract(text, vision), want=want)
    return replace(case.job, plan=fewer, watch=())


def _asking(plan: Plan, check: Check, stop: int) -> Ranges:
    """The last text rows up to the answering one, and what is wanted behind it before `stop`."""
    row = plan.want[0][0]
    text = intersect(plan.text_rows(), ((max(plan.spans[-1].span.stop, row - check.text), stop),))
    return union(text, ((row, row + 1),))


def _job(case: _Case, plan: Plan, policy: Policy | None) -> Job:
    starts = {s.span.start for s in plan.spans}
    return Job(
        adapter=case.job.adapter,
        plan=plan,
        placed=[placed for placed in case.job.placed if placed.span.start in starts],
        policy=policy,
        resume=case.trail.resume if case.trail is not None else None,
    )


def _alike(work: dict[int, Job]) -> Iterable[list[int]]:
    """Jobs that can run side by side: those that start in the same layer."""
    by_layer: dict[int, list[int]] = {}
    for number, job in work.items():
        by_layer.setdefault(job.plan.first, []).append(number)
    return by_layer.values()
