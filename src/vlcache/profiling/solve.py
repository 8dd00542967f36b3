"""From records of pairs to a profile: budgets, the band, and the check's threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlcache.errors import ConfigError
from vlcache.policies import Band
from vlcache.profile import Profile
from vlcache.profiling.budgets import gain_curve, predicted, solve
from vlcache.profiling.records import PairRecord, outcome

__all__ = ["LEAST_PAIRS", "RISK", "Targets", "agreement", "bands_to_try", "enter_layer", "make_profile", "threshold"]

LEAST_PAIRS = 24
"""Fewer pairs than this say nothing about a share of 99.5 %."""

RISK = 0.005
"""Share of answers that may differ from full recompute's."""

_SAFE_QUANTILE = 0.75


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


def threshold(records: Sequence[PairRecord]) -> float:
    """Tau: what the first look moves three quarters of the safe answers by, so that in doubt there is a further look,
    which costs little; less where more than `RISK` of the answers would differ."""
    checked = [record for record in records if record.moved]
    tried = sorted({moved for record in checked for moved in record.moved} | {0.0})
    good = [tau for tau in tried if agreement(checked, tau) >= 1 - RISK]
    largest = good[-1] if good else 0.0
    safe = sorted(record.moved[0] for record in checked if record.agree)
    return min(largest, safe[math.ceil(_SAFE_QUANTILE * len(safe)) - 1]) if safe else largest


def agreement(records: Sequence[PairRecord], tau: float) -> float:
    """Share of checked pairs whose answer ends as full recompute's; what is recomputed does."""
    return _share(outcome(record, tau)[0] for record in records)


def make_profile(
    model: str, layers: int, records: Sequence[PairRecord], targets: Targets, probes: int, measured_kl: float = 0.0
) -> Profile:
    """See `Profile`.

    Raises
    ------
    ConfigError
        Too few pairs, or none whose layers were measured.
    """
    measured = [record for record in records if record.alone]
    if len(records) < LEAST_PAIRS or not measured:
        raise ConfigError(
            f"{len(records)} calibration pairs, {len(measured)} of them with nothing but other turns' text changed; "
            f"give at least {LEAST_PAIRS}, and 1 of those"
        )
    alone, onward = (_mean_by_layer([getattr(record, name) for record in measured]) for name in ("alone", "onward"))
    budgets, expected = _budgets(measured, alone, targets)
    enter = enter_layer(records, layers)
    band = _band(records, enter, layers)
    suspicious = [record for record in records if record.moved]
    others = [record for record in suspicious if record.changed != "turn"]
    turn = [record for record in suspicious if record.changed == "turn"]
    tau = threshold(others or suspicious)
    blind = agreement(turn, tau) < 1 - RISK
    at_once = blind and _share(record.bands.get(band.name, False) for record in turn) >= 1 - RISK
    if blind and not at_once:
        tau = threshold(suspicious)
    return Profile(
        model=model,
        layers=layers,
        pairs=len(records),
        alone=_rounded(alone),
        onward=_rounded(onward),
        deep=_rounded(_mean_by_layer([tuple(map(float, record.deep)) for record in records if record.deep])),
        budgets=budgets,
        predicted_kl=_digits(expected),
        measured_kl=_digits(measured_kl),
        band=(band.enter, band.narrow, band.share),
        at_once=at_once,
        tau=_digits(tau),
        probes=probes,
        agreement=_digits(agreement(others if at_once else suspicious, tau)),
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
    cost = [none * each / total for each in alone] if total else [0.0] * len(alone)
    budgets = solve(cost, gain, targets.kl, targets.share)
    return budgets, predicted(cost, gain, budgets)


def _band(records: Sequence[PairRecord], enter: int, layers: int) -> Band:
    tried = [record.bands for record in records if record.bands]
    for band in bands_to_try(enter, layers):
        if tried and _share(its.get(band.name, False) for its in tried) >= 1 - RISK:
            return band
    return Band(enter, layers, 1.0)


def _share(flags: object) -> float:
    found = [bool(flag) for flag in flags]  # type: ignore[attr-defined]
    return sum(found) / len(found) if found else 1.0


def _mean_by_layer(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(_digits, values))


def _digits(value: float) -> float:
    """Three significant digits: what differs between two runs on one machine is below."""
    return float(f"{value:.3g}")
