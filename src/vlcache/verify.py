"""Reuse that verifies itself: fill a prompt on cached K/V, look where the answer looks, and compute just that afresh.

    fill        every text row on cached K/V; remember which of the pictures' tokens the last rows attend to
    check       compute the most attended tokens afresh from layer 0 on, and the last text rows once more
                the answer stays: reuse was safe. It moves: it was not
    look again  at what the rows attend to now: as many tokens more as are fresh, until the answer stays
    repair      where only text of the turn differs: the pictures' tokens in a band of layers, and the text behind them
                from that band on, if the answer stays
    recompute   everything behind the first suspicious picture. The encoder's output is reused in every case

Checks run where what stands before a picture may have changed what was read into it, see `vlcache.context`. A check is
one pass over few rows, about a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from vlcache.measure import Gaze, divergence
from vlcache.plan import LayerStep, Plan, SpanPlan, make_plan
from vlcache.policies.base import Check, Policy
from vlcache.policies.full import Full
from vlcache.prefill import Job, RunLayer, selective_prefill, take
from vlcache.ranges import Ranges, count, intersect, normal, places, shift, subtract, union

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
        How far the answering row's distribution moved with each pass behind the first: KL, nats.
    looked_at : tuple of int
        Prompt indices of the tokens that were computed afresh to see.
    """

    result: Result = "skipped"
    moved: tuple[float, ...] = ()
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
    exact_until : int
        Index up to which the K/V are exact now.
    verdict : Verdict or None
        None where the policy has no check.
    """

    passes: tuple[Plan, ...]
    logits: Tensor
    exact_until: int
    verdict: Verdict | None = None


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
    answers: list[Tensor] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """Where what may have to be computed again starts."""
        return self.suspects[0].span.start

    def note(self, plan: Plan, answer: Tensor) -> None:
        """A pass was carried out."""
        self.job.adapter.follow_attention(None)
        if self.answers:
            self.moved.append(divergence(answer[0], self.answers[-1][0]))
        self.passes.append(plan)
        self.answers.append(answer)

    def close(self, result: Result, exact_until: int) -> Done:
        if result == "recomputed":  # of what stands before, as the first pass left it
            before = (s.span.start for s in self.passes[0].spans if s.span.start < self.begin and not s.exact)
            exact_until = min(before, default=self.passes[0].end)
        return Done(
            tuple(self.passes), self.answers[-1], exact_until, Verdict(result, tuple(self.moved), self.looked_at)
        )


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
    going = dict(cases)
    looks = max((case.check.looks for case in cases.values()), default=0)
    for stage in (*[_probe] * looks, _repair, _recompute):
        made = {number: stage(case) for number, case in going.items()}
        work = {number: job for number, job in made.items() if job is not None}
        for some in _alike(work):
            ran = selective_prefill([work[number] for number in some], run(some))
            for number, (plan, _), answer in zip(some, ran, logits([hidden for _, hidden in ran]), strict=True):
                cases[number].note(plan, answer)
        for number in work:
            result = _judge(cases[number], stage)
            if result is not None:
                done[number] = going.pop(number).close(result, done[number].exact_until)
    return done


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
    job.adapter.follow_attention(case.gaze)
    return job if case.trail is None else replace(job, watch=(*job.watch, case.trail))


def _repair_plan(plan: Plan, check: Check, suspects: tuple[SpanPlan, ...]) -> Plan:
    """The band of the suspicious spans, and the text behind the first of them from there on."""
    assert check.repair is not None
    begin = suspects[0].span.start
    wanted = count(plan.want)
    behind = [s for s in plan.spans if s.span.start >= begin]
    made = make_plan(
        check.repair, [s.span for s in behind], [s.evidence for s in behind], begin, plan.end, plan.layers, wanted
    )
    spans = tuple(
        made_one if old in suspects else replace(made_one, rows=((),) * plan.layers)
        for made_one, old in zip(made.spans, behind, strict=True)
    )
    first = min(next(layer for layer, rows in enumerate(s.rows) if rows) for s in spans if any(s.rows))
    return replace(made, spans=spans, first=first)


def _probe(case: _Case) -> Job | None:
    """The tokens of suspicious spans that the last rows attend to most and that are not fresh yet, and the last text
    rows; None after so many looks, or where all are fresh."""
    done = len(case.answers) - 1
    if done == case.check.looks:
        return None
    assert case.gaze.paid is not None
    plan, paid = case.passes[0], case.gaze.paid
    stale = [i for s in case.suspects for i in range(s.span.start, s.span.stop) if i < len(paid)]
    stale = [i for i in stale if i not in set(case.looked_at)]
    ranked = sorted(stale, key=lambda i: -float(paid[i]))[: case.check.probes * max(1, 2 ** (done - 1))]
    if not ranked:
        return None
    case.looked_at = tuple(sorted((*case.looked_at, *ranked)))
    case.gaze = case.gaze.again()
    case.job.adapter.follow_attention(case.gaze)
    rows = union(normal((i, i + 1) for i in ranked), plan.want)
    spans = tuple(
        replace(s, rows=(shift(intersect(rows, ((s.span.start, s.span.stop),)), -s.span.start),) * plan.layers)
        for s in plan.spans
    )
    text = subtract(_asking(plan, case.check, plan.end), tuple((s.span.start, s.span.stop) for s in plan.spans))
    return replace(case.job, plan=replace(plan, spans=spans, look=None, text=text), watch=())


def _asking(plan: Plan, check: Check, stop: int) -> Ranges:
    """The last text rows up to the answering one, and what is wanted behind it before `stop`."""
    row = plan.want[0][0]
    text = intersect(plan.text_rows(), ((max(plan.spans[-1].span.stop, row - check.text), stop),))
    return union(text, ((row, row + 1),))


def _repair(case: _Case) -> Job | None:
    if case.repair is None or case.check.repair is None:
        return None
    return _job(case, case.repair, case.check.repair)


def _recompute(case: _Case) -> Job:
    plan = case.passes[0]
    behind = [s for s in plan.spans if s.span.start >= case.begin]
    spans, known = [s.span for s in behind], [s.evidence for s in behind]
    policy = Full()
    return _job(case, make_plan(policy, spans, known, case.begin, plan.end, plan.layers, count(plan.want)), policy)


def _job(case: _Case, plan: Plan, policy: Policy) -> Job:
    starts = {s.span.start for s in plan.spans}
    return Job(
        adapter=case.job.adapter,
        plan=plan,
        placed=[placed for placed in case.job.placed if placed.span.start in starts],
        policy=policy,
        resume=case.trail.resume if case.trail is not None else None,
    )


def _judge(case: _Case, stage: Callable[[_Case], Job | None]) -> Result | None:
    """What came out, if that settles it."""
    if stage is _recompute:
        return "recomputed"
    if case.moved[-1] <= case.check.tau:
        return "safe" if len(case.moved) == 1 else "repaired"
    return None


def _alike(work: dict[int, Job]) -> Iterable[list[int]]:
    """Jobs that can run side by side: those that start in the same layer."""
    by_layer: dict[int, list[int]] = {}
    for number, job in work.items():
        by_layer.setdefault(job.plan.first, []).append(number)
    return by_layer.values()
