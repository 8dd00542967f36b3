"""From records of pairs to a profile: budgets, the band, and the check's threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vlcache.errors import ConfigError
from vlcache.policies import Band
from vlcache.policies.verified import SURE
from vlcache.profile import Profile
from vlcache.profiling.budgets import gain_curve, predicted, solve
from vlcache.profiling.records import PairRecord, outcome

__all__ = [
    "LEAST_PAIRS",
    "RISK",
    "Targets",
    "agreement",
    "bands_to_try",
    "digits",
    "enter_layer",
    "make_profile",
    "threshold",
]

LEAST_PAIRS = 24
"""Fewer pairs than this say nothing about a share of 99.5 %."""

RISK = 0.005
"""Share of answers that may differ from full recompute's."""

_SAFE_QUANTILE = 0.75
# What an answer moves by rounding alone
_LEAST_TAU = 1e-3


@dataclass(frozen=True, slots=True)
class Targets:
    """What budgets are solved for: one of the two.

    Attributes
    ----------
    kl : float or None
        Largest divergence of the answer, nats.
    share : float or None
        Largest computed share.
    """

    kl: float | None = None
    share: float | None = None


def enter_layer(records: Sequence[PairRecord], layers: int) -> int:
    """The deepest layer from which on it is enough to compute a picture's tokens, so that at most `RISK` of the answers
    differ; 0 where nothing was measured."""
    deep = [record.deep for record in records if record.deep]
    for layer in range(layers - 1, 0, -1):
        if deep and all(_share(its[m] for its in deep) >= 1 - RISK for m in range(1, layer + 1)):
            return layer
    return 0


def bands_to_try(enter: int, layers: int) -> list[Band]:
    """Bands from a layer on, cheapest first."""
    step = max(1, layers // 5)
    found = [Band(enter, narrow, share) for narrow in range(enter + step, layers, step) for share in (0.15, 0.3)]
    return sorted([*found, Band(enter, layers, 1.0)], key=lambda band: _cost(band, layers))


def _cost(band: Band, layers: int) -> float:
    """Computed share."""
    return (min(band.narrow + 1, layers) - band.enter + band.share * max(0, layers - band.narrow - 1)) / layers


def sureness(records: Sequence[PairRecord]) -> float:
    """How sure nine of ten of full recompute's answers are, `SURE` at most: one that is less is suspicious."""
    found = sorted(record.full_sure for record in records)
    return min(SURE, digits(found[len(found) // 10]))


def threshold(records: Sequence[PairRecord], sure: float) -> float:
    """Tau: what a check moves 75 % of the safe answers by at most, so that in doubt there is a look, which is cheap;
    less where more than `RISK` of the answers would differ, and 0 where no other is good.

    A smaller tau is not always safer: an answer that stood at the check may settle wrongly at a look. So the tau that
    is given was tried.
    """
    checked = [record for record in records if record.moved]
    tried = sorted({digits(moved) for record in checked for moved in record.moved} | {0.0})
    good = [tau for tau in tried if agreement(checked, tau, sure) >= 1 - RISK]
    safe = sorted(record.moved[0] for record in checked if record.agree)
    enough = digits(safe[math.ceil(_SAFE_QUANTILE * len(safe)) - 1]) if safe else 0.0
    return max((tau for tau in good if tau <= max(enough, _LEAST_TAU)), default=0.0)


def agreement(records: Sequence[PairRecord], tau: float, sure: float) -> float:
    """Share of checked pairs whose answer ends as full recompute's; what is recomputed does."""
    return _share(outcome(record, tau, sure)[0] for record in records)


def make_profile(model: str, layers: int, records: Sequence[PairRecord], targets: Targets, probes: int) -> Profile:
    """See `Profile`; its budgets are not tested yet.

    Raises
    ------
    ConfigError
        Too few pairs, none whose layers were measured, or none with anything suspicious.
    """
    measured = [record for record in records if record.alone]
    suspicious = [record for record in records if record.moved]
    if len(records) < LEAST_PAIRS or not measured or not suspicious:
        raise ConfigError(
            f"{len(records)} usable calibration pairs, in {len(measured)} of them nothing but other turns' text "
            f"changed, in {len(suspicious)} something suspicious; give at least {LEAST_PAIRS}, and both kinds"
        )
    by_layer = {
        name: _mean_by_layer([tuple(map(float, getattr(record, name))) for record in measured])
        for name in ("alone", "alone_flips", "onward", "onward_flips")
    }
    budgets, expected = _budgets(measured, by_layer["alone"], targets)
    enter = enter_layer(records, layers)
    band = _band(records, enter, layers)
    others = [record for record in suspicious if record.changed != "turn"]
    turn = [record for record in suspicious if record.changed == "turn"]
    sure = sureness(records)
    tau = threshold([record for record in suspicious if record.checked], sure)
    holds = band is not None and _share(record.bands.get(band.name, False) for record in turn) >= 1 - RISK
    at_once = holds and agreement(turn, tau, sure) < 1 - RISK
    return Profile(
        model=model,
        layers=layers,
        pairs=len(records),
        alone=_rounded(by_layer["alone"]),
        alone_flips=_rounded(by_layer["alone_flips"]),
        onward=_rounded(by_layer["onward"]),
        onward_flips=_rounded(by_layer["onward_flips"]),
        deep=_rounded(_mean_by_layer([tuple(map(float, record.deep)) for record in records if record.deep])),
        budgets=budgets,
        predicted_kl=digits(expected),
        measured_kl=None,
        held_out=0,
        band=None if band is None else (band.enter, band.narrow, band.share),
        at_once=at_once,
        tau=tau,
        probes=probes,
        sure=sure,
        checked=len(others if at_once else suspicious),
        agreement=digits(agreement(others if at_once else suspicious, tau, sure)),
    )


def _budgets(
    measured: Sequence[PairRecord], alone: Sequence[float], targets: Targets
) -> tuple[tuple[float, ...], float]:
    none = sum(record.kl for record in measured) / len(measured)
    fronts: Mapping[str, float] = {
        ratio: sum(record.fronts[ratio] for record in measured) / len(measured) for ratio in measured[0].fronts
    }
    gain = gain_curve(none, {float(ratio): kl for ratio, kl in fronts.items()})
    total = sum(alone)
    # Where no layer alone costs anything, what all of them cost together is laid on all alike
    cost = [none * each / total for each in alone] if total else [none / len(alone)] * len(alone)
    budgets = solve(cost, gain, targets.kl, targets.share)
    return budgets, predicted(cost, gain, budgets)


def _band(records: Sequence[PairRecord], enter: int, layers: int) -> Band | None:
    """The cheapest that repairs all pairs on which bands were tried; None where none is less than everything."""
    tried = [record.bands for record in records if record.bands]
    for band in bands_to_try(enter, layers) if enter and tried else ():
        if _share(its.get(band.name, False) for its in tried) >= 1 - RISK:
            return band
    return None


def _share(flags: Iterable[bool]) -> float:
    found = list(flags)
    return sum(found) / len(found) if found else 1.0


def _mean_by_layer(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(digits, values))


def digits(value: float) -> float:
    """Three significant digits: what differs between two runs on one machine is below."""
    return float(f"{value:.3g}")
