"""What happened: to one prompt, and since the cache was opened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vlcache.plan import Plan
from vlcache.ranges import count, intersect
from vlcache.types import Entry, Span
from vlcache.verify import Verdict

__all__ = ["Clock", "Counters", "Outcome", "Report", "SpanReport", "report_prompt"]

Outcome = Literal["reused", "prefix", "encoder", "new"]


@dataclass(frozen=True, slots=True)
class SpanReport:
    """One picture of a prompt.

    Attributes
    ----------
    content : str
        Its digest.
    start, tokens : int
        Where its vision tokens stand and how many they are (N).
    outcome : {"reused", "prefix", "encoder", "new"}
        `reused`: K/V moved and repaired. `prefix`: inside an exact prefix, nothing to do. `encoder`: only the
        encoder output came from the cache. `new`: nothing did.
    rows : int
        Its rows computed, summed over the layers (of `layers * tokens`) and over passes.
    """

    content: str
    start: int
    tokens: int
    outcome: Outcome
    rows: int


@dataclass(frozen=True, slots=True)
class Report:
    """One prompt, see `VLCache.last`.

    Attributes
    ----------
    spans : tuple of SpanReport
    policy : str
    prompt_tokens : int
        T.
    exact_prefix_tokens : int
        Leading tokens taken from an earlier prompt, exactly.
    rows : tuple of int
        Rows computed in each layer.
    moved_bytes : int
        K/V bytes put in place for reused tokens.
    verdict : Verdict or None
        What checking the reuse found; None under a policy without a check.
    seconds : dict
        Wall time by stage: media, tokens, lookup, encode, prefill, store; and lost, where an entry was found damaged
        while it was used.
    """

    spans: tuple[SpanReport, ...]
    policy: str
    prompt_tokens: int
    exact_prefix_tokens: int = 0
    rows: tuple[int, ...] = ()
    moved_bytes: int = 0
    verdict: Verdict | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        """Pictures that were neither encoded nor prefilled in full."""
        return sum(span.outcome in ("reused", "prefix") for span in self.spans)

    @property
    def vision_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def computed_share(self) -> float:
        """Rows of vision tokens computed, as a share of all layers times all vision tokens. Over 1 where a check came
        before computing everything."""
        total = self.vision_tokens * len(self.rows)
        return sum(span.rows for span in self.spans) / total if total else 0.0

    @property
    def computed_vision_tokens(self) -> int:
        """Vision tokens computed, in the mean over the layers, rounded; those of several passes add up."""
        return round(self.computed_share * self.vision_tokens)

    @property
    def reused_vision_tokens(self) -> int:
        """The others; none where further passes computed as many and more."""
        return max(0, self.vision_tokens - self.computed_vision_tokens)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = ("hits", "vision_tokens", "computed_vision_tokens", "reused_vision_tokens", "computed_share")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(slots=True)
class Counters:
    """Since the cache was opened.

    Attributes
    ----------
    known_files : int
        Pictures recognised by their bytes alone, without decoding (first level).
    known_pictures : int
        Pictures recognised by their pixels, after decoding (second level).
    new_pictures : int
        Pictures never seen under these settings.
    decoded, preprocessed, encoded : int
        Pictures decoded, run through the processor, run through the encoder.
    reused, prefix_hits, encoder_hits, misses : int
        Spans by outcome.
    rejects : dict
        Entries found but not used, by reason.
    verified : dict
        Prompts under a policy with a check, by its result: `skipped`, `safe`, `repaired`, `recomputed`.
    """

    known_files: int = 0
    known_pictures: int = 0
    new_pictures: int = 0
    decoded: int = 0
    preprocessed: int = 0
    encoded: int = 0
    reused: int = 0
    prefix_hits: int = 0
    encoder_hits: int = 0
    misses: int = 0
    rejects: dict[str, int] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Count a prompt's spans by outcome, and what checking it found."""
        if report.verdict is not None and any(span.outcome == "reused" for span in report.spans):
            result = report.verdict.result
            self.verified[result] = self.verified.get(result, 0) + 1
        for span in report.spans:
            name = {"reused": "reused", "prefix": "prefix_hits", "encoder": "encoder_hits", "new": "misses"}[
                span.outcome
            ]
            setattr(self, name, getattr(self, name) + 1)

    def reject(self, reasons: Sequence[str]) -> None:
        """Count entries that were not used."""
        for reason in reasons:
            self.rejects[reason] = self.rejects.get(reason, 0) + 1


def report_prompt(
    policy: str,
    passes: Sequence[Plan],
    spans: Sequence[Span],
    known: Mapping[str, Entry],
    seconds: Mapping[str, float],
    token_bytes: int,
    verdict: Verdict | None = None,
) -> Report:
    """What was done with a prompt.

    Parameters
    ----------
    passes : sequence of Plan
        One after the other; the first one is over the whole prompt.
    known : mapping of str to Entry
        What the lookup found.
    token_bytes : int
        Of a token's K and V in one layer.
    """
    first = passes[0]
    reused = sum(count(ranges) for plan in passes for step in plan.steps() for ranges in step.reuse)
    return Report(
        spans=_report_spans(passes, spans, known),
        policy=policy,
        prompt_tokens=first.end,
        exact_prefix_tokens=first.begin,
        rows=tuple(map(sum, zip(*(plan.rows_per_layer() for plan in passes), strict=True))),
        moved_bytes=reused * token_bytes,
        verdict=verdict,
        seconds=dict(seconds),
    )


def _report_spans(passes: Sequence[Plan], spans: Sequence[Span], known: Mapping[str, Entry]) -> tuple[SpanReport, ...]:
    plan = passes[0]
    computed = {s.span.start: 0 for s in plan.spans}
    for one in (one for some in passes for one in some.spans):
        computed[one.span.start] += one.computed
    reports = []
    for span in spans:
        outcome: Outcome
        if span.start < plan.begin:
            outcome, rows = "prefix", 0
        elif span.start in computed:
            outcome, rows = "reused", computed[span.start]
        else:
            outcome = "encoder" if span.content in known else "new"
            its = ((span.start, span.stop),)
            rows = sum(count(intersect(some.text_rows(), its)) * (some.layers - some.first) for some in passes)
        reports.append(SpanReport(span.content, span.start, span.length, outcome, rows))
    return tuple(reports)


class Clock:
    """Wall seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def lose(self) -> None:
        """What was spent so far on looking up and computing was in vain; it counts as `lost`."""
        spent = sum(self.seconds.pop(name, 0.0) for name in ("lookup", "encode", "prefill"))
        self.seconds["lost"] = self.seconds.get("lost", 0.0) + spent

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
