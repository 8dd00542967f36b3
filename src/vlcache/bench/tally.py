"""From outcomes to rows: accuracy, agreement with full recompute, KL and computed share, with 95 % intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap, mannwhitneyu

from vlcache.bench.accuracy import Outcome

__all__ = ["ALL", "Row", "checks", "enough", "tally"]

ALL = "all"
"""In a row's family or change: pooled over them."""

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one family under one change.

    Attributes
    ----------
    policy, family, change : str
        Family or change is `all` where rows are pooled.
    items : int
    accuracy, full_accuracy : float
        Shares of right answers: the policy's, and plain transformers' on the same items.
    accuracy_low, accuracy_high : float
        Wilson's 95 % interval.
    agreement, agreement_low, agreement_high : float
        Share of answers whose tokens are plain transformers'.
    lost, lost_low, lost_high : float
        Full recompute's accuracy less the policy's, item by item; bootstrapped 95 % interval.
    kl, kl_low, kl_high : float
        Mean over items, nats; bootstrapped 95 % interval.
    computed_share : float
        Mean over items.
    """

    policy: str
    family: str
    change: str
    items: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    full_accuracy: float
    lost: float
    lost_low: float
    lost_high: float
    agreement: float
    agreement_low: float
    agreement_high: float
    kl: float
    kl_low: float
    kl_high: float
    computed_share: float

    def to_dict(self) -> dict[str, Any]:
        return {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(self).items()}


def tally(outcomes: Iterable[Outcome]) -> list[Row]:
    """Rows per policy, family and change; then pooled over families, and over everything."""
    groups: dict[tuple[str, str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        for family, change in ((one.family, one.change), (ALL, one.change), (ALL, ALL)):
            groups[one.policy, family, change].append(one)
    rows = [_row(*key, group) for key, group in groups.items()]
    return sorted(rows, key=lambda row: (row.family == ALL) + (row.change == ALL))


def enough(rows: Iterable[Row], most_lost: float = 0.005) -> dict[str, float]:
    """By change, the smallest ratio of `prefix` from which on no ratio of the sweep loses more, pooled over families.

    `none` is ratio 0 and `full` is 1; a `prefix` whose least number of tokens is not 1 is left out. Changes under
    which even the largest ratio loses more are left out, too.
    """
    lost: dict[str, dict[float, float]] = defaultdict(dict)
    for row in rows:
        ratio = _ratio(row.policy)
        if row.family == ALL and ratio is not None:
            lost[row.change][ratio] = row.lost
    found = {}
    for change, by_ratio in lost.items():
        for ratio in sorted(by_ratio, reverse=True):
            if by_ratio[ratio] > most_lost:
                break
            found[change] = ratio
    return found


def checks(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """How well checks tell safe from unsafe reuse, by policy, over trials that were checked and that `none` answered.

    An alarm is a first token other than naive reuse's at the last look, or a recompute. `auc` is the area under the ROC
    of `against`, None where all trials are of one kind. `accepted_wrong` are answers that the check let stand or
    repaired and that are not full recompute's.
    """
    outcomes = list(outcomes)
    safe = {one.trial: one.agree for one in outcomes if one.policy == "none"}
    groups: dict[str, list[Outcome]] = defaultdict(list)
    asked: dict[str, int] = defaultdict(int)
    for one in outcomes:
        if one.verified and one.trial in safe:
            asked[one.policy] += 1
            if one.verified != "skipped":
                groups[one.policy].append(one)
    found = {}
    for policy, group in groups.items():
        right = [one for one in group if safe[one.trial]]
        wrong = [one for one in group if not safe[one.trial]]
        results = [one.verified for one in group]
        found[policy] = {
            "asked": asked[policy],
            "checked": len(group),
            "safe": len(right),
            "unsafe": len(wrong),
            "results": {result: results.count(result) for result in dict.fromkeys(results)},
            "auc": _auc([one.against for one in right], [one.against for one in wrong]),
            "false_alarms": sum(_alarmed(one) for one in right),
            "missed": sum(not _alarmed(one) for one in wrong),
            "accepted_wrong": sum(one.verified != "recomputed" and not one.agree for one in group),
        }
    return found


def _alarmed(one: Outcome) -> bool:
    return one.against > 0 or one.verified == "recomputed"


def _auc(low: Sequence[float], high: Sequence[float]) -> float | None:
    if not low or not high:
        return None
    return round(float(mannwhitneyu(high, low).statistic) / (len(low) * len(high)), 5)


def _ratio(policy: str) -> float | None:
    if policy in ("none", "full"):
        return float(policy == "full")
    name, _, numbers = policy.partition(":")
    ratio, _, least = numbers.partition(",")
    return float(ratio) if name == "prefix" and least == "1" else None


def _row(policy: str, family: str, change: str, group: Sequence[Outcome]) -> Row:
    n = len(group)
    right, agreed = sum(o.correct for o in group), sum(o.agree for o in group)
    accuracy, agreement = _wilson(right, n), _wilson(agreed, n)
    kl = _bootstrap([o.kl for o in group])
    lost = _bootstrap([float(o.full_correct) - float(o.correct) for o in group])
    return Row(
        policy=policy,
        family=family,
        change=change,
        items=n,
        accuracy=right / n,
        accuracy_low=accuracy[0],
        accuracy_high=accuracy[1],
        full_accuracy=sum(o.full_correct for o in group) / n,
        lost=lost[0],
        lost_low=lost[1],
        lost_high=lost[2],
        agreement=agreed / n,
        agreement_low=agreement[0],
        agreement_high=agreement[1],
        kl=kl[0],
        kl_low=kl[1],
        kl_high=kl[2],
        computed_share=sum(o.computed_share for o in group) / n,
    )


def _bootstrap(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval; where all values are the same, or there is one, nothing is known of its width."""
    mean = sum(values) / len(values)
    if len(set(values)) == 1:
        return mean, mean, mean
    options = {"method": "percentile", "n_resamples": _RESAMPLES, "batch": 100}
    interval = bootstrap((values,), np.mean, rng=np.random.default_rng(0), **options).confidence_interval
    return mean, float(interval.low), float(interval.high)


def _wilson(hits: int, n: int) -> tuple[float, float]:
    interval = binomtest(hits, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)
