"""One run of `vlcache profile`: calibration pairs in, a profile and its plots out.

pair -> plain answer -> naive reuse and a check
                        nothing but other turns' text changed: each layer alone, all from each layer on, fronts
                        text of the turn changed, and the answer with it: all tokens from each layer on, then bands
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from vlcache.bench.asking import Asker, divergence_of
from vlcache.bench.datasets import REAL_CHANGES, dataset_trials
from vlcache.bench.progress import progress
from vlcache.bench.rows import Skipped
from vlcache.bench.tileworld import NAME, tileworld_plan, tileworld_trial
from vlcache.bench.trials import Trial
from vlcache.engines.transformers.study import Study, study
from vlcache.engines.transformers.support import describe
from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.errors import InputError, MediaError
from vlcache.policies import Band, Check, Evidence, Full, Layered, NoRecompute, Policy, Prefix, Rule, Verified
from vlcache.profile import Profile
from vlcache.profiling.plots import plot_profile
from vlcache.profiling.records import PairRecord, Records
from vlcache.profiling.solve import Targets, bands_to_try, enter_layer, make_profile
from vlcache.ranges import Ranges
from vlcache.types import Span
from vlcache.verify import Done

__all__ = ["Settings", "run"]

T = TypeVar("T")

# Rules that hold their K/V side by side
_AT_ONCE = 8
_GRAVITY = ("text", "pictures", "turn", "neighbours")
_FRONTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
# More of those that a check decides about; text of other turns is for the layers
_TURNS = (
    *("swapped", "question", "picture", "system", "swapped", "legend"),
    *("picture", "question", "swapped", "turn", "picture", "legend"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes
    ----------
    pairs : int
        Calibration pairs.
    held_out : int
        Pairs, of those whose layers are measured, that budgets are tested on instead.
    layer_pairs, deep_pairs : int
        Of how many pairs single layers, and depths, are measured.
    probes : int
        Of the check.
    target_kl, target_share : float or None
        What budgets are solved for.
    dataset, data : str
        As for `vlcache bench accuracy`; tileworld's calibration split unless given.
    seed, max_new_tokens : int
    """

    pairs: int = 108
    held_out: int = 2
    layer_pairs: int = 4
    deep_pairs: int = 6
    probes: int = 12
    target_kl: float | None = 0.005
    target_share: float | None = None
    dataset: str = NAME
    data: str = ""
    seed: int = 0
    max_new_tokens: int = 16


def run(settings: Settings, model: Any, processor: Any, out: Path, console: Console) -> Profile:
    """Measure, write `out` and plots beside it.

    What is measured is kept beside `out` until the end, so that an interrupted run goes on.

    Raises
    ------
    ConfigError
        Too few pairs; settings other than those of the run that is to be gone on with.
    """
    layers = describe(model).layers
    fingerprint = WeightsWatch(model).profile_fingerprint()
    trials = list(_trials(settings))
    out.parent.mkdir(parents=True, exist_ok=True)
    about = json.dumps(asdict(settings) | {"model": fingerprint}, sort_keys=True)
    records = Records(out.with_suffix(".pairs.jsonl"), about)
    with Asker(model, processor, settings.max_new_tokens, range(1, layers)) as asker:
        measure = _Measure(asker, layers, settings)
        found = _each(trials, records, console, "pairs", measure.pair)
        enter = enter_layer(found, layers)
        bands = bands_to_try(enter, layers)
        turn = [trial for trial, record in zip(trials, found, strict=True) if record.changed == "turn"]
        named = {trial.name: record for trial, record in zip(trials, found, strict=True)}
        for record in _each(
            turn, records, console, "bands", lambda trial, _: measure.bands(trial, named[trial.name], bands)
        ):
            named[record.name] = record
        targets = Targets(settings.target_kl, settings.target_share)
        profile = make_profile(fingerprint, layers, list(named.values()), targets, settings.probes)
        budgets = Layered(profile.budgets)
        benign = [trial for trial in trials if named[trial.name].changed == "text" and not named[trial.name].alone]
        measured = [measure.divergence(trial, budgets) for trial in benign[: settings.held_out]]
    if measured:
        profile = replace(profile, measured_kl=float(f"{sum(measured) / len(measured):.3g}"))
    profile.write(out)
    plot_profile(profile, list(named.values()), out)
    records.close()
    return profile


def _trials(settings: Settings) -> Iterator[Trial]:
    """Pairs of every change in turn, in an order that the seed draws."""
    by_change: dict[str, Iterator[Trial]] = {}
    for change in dict.fromkeys(_TURNS):
        if settings.dataset == NAME:
            drawn = list(tileworld_plan(settings.pairs, None, (change,)))
            random.Random(settings.seed).shuffle(drawn)
            by_change[change] = (tileworld_trial("calibration", settings.seed, *which) for which in drawn)
        elif change in REAL_CHANGES:
            rows = dataset_trials(settings.dataset, Path(settings.data), settings.pairs, (change,), None)
            by_change[change] = (one for one in rows if not isinstance(one, Skipped))
    left = settings.pairs
    while left and by_change:
        for change in _TURNS:
            trial = next(by_change[change], None) if change in by_change else None
            if trial is None:
                by_change.pop(change, None)
            elif left:
                left -= 1
                yield trial


def _each(
    trials: Sequence[Trial],
    records: Records,
    console: Console,
    what: str,
    measure: Callable[[Trial, Sequence[PairRecord]], PairRecord],
) -> list[PairRecord]:
    """Records of trials, those that are there already as they are; `measure` is told those before."""
    found: list[PairRecord] = []
    with progress(console, len(trials), what) as step:
        for trial in trials:
            record = records.get(f"{what}/{trial.name}")
            if record is None:
                record = replace(measure(trial, found), name=f"{what}/{trial.name}")
                records.put(record)
            found.append(replace(record, name=trial.name))
            step()
    return found


@dataclass(frozen=True, slots=True)
class _EveryLook(Rule):
    """`verified` that takes all its looks, whatever they move, and stops there."""

    probes: int

    @property
    def name(self) -> str:
        return "every look"

    @property
    def check(self) -> Check:
        return replace(Verified(0.0, self.probes).check, tau=-1.0, recompute=False)

    def rows(self, span: Span, layer: int, evidence: Evidence) -> Ranges:
        return ()


class _Measure:
    """Runs pairs."""

    def __init__(self, asker: Asker, layers: int, settings: Settings) -> None:
        self._asker = asker
        self._layers = layers
        self._settings = settings

    def pair(self, trial: Trial, before: Sequence[PairRecord]) -> PairRecord:
        """Naive reuse and a check; where the change asks for it each layer, or each depth."""
        asked = self._ask(trial)
        changed = max((evidence.changed for evidence in asked.study.known), key=_GRAVITY.index)
        check = _EveryLook(self._settings.probes)
        (none, _), (probed, _) = asked.study.run([NoRecompute(), check])
        moved = probed.verdict.moved if probed.verdict is not None else ()
        settled = [asked.agrees_with(logits) for logits in (*probed.before[1:], probed.logits)][: len(moved)]
        record = PairRecord(
            name=trial.name,
            changed=changed,
            kl=asked.divergence(none),
            agree=asked.agrees(none),
            moved=tuple(map(float, moved)),
            settled=tuple(settled),
        )
        if changed == "text" and sum(bool(one.alone) for one in before) < self._settings.layer_pairs:
            return replace(record, **self._by_layer(asked))
        missing_deep = sum(bool(one.deep) for one in before) < self._settings.deep_pairs
        if changed == "turn" and not record.agree and missing_deep:
            deep = asked.each([Band(layer, self._layers, 1.0) for layer in range(self._layers)], asked.agrees)
            return replace(record, deep=tuple(deep))
        return record

    def bands(self, trial: Trial, record: PairRecord, bands: Sequence[Band]) -> PairRecord:
        """Whether each band repairs a pair."""
        asked = self._ask(trial)
        repaired = asked.each(bands, asked.agrees)
        return replace(record, bands={band.name: good for band, good in zip(bands, repaired, strict=True)})

    def divergence(self, trial: Trial, policy: Policy) -> float:
        """What a rule costs on a pair."""
        asked = self._ask(trial)
        return asked.each([policy], asked.divergence)[0]

    def _by_layer(self, asked: _Asked) -> dict[str, Any]:
        layers = range(self._layers)
        everything = [Full()] * self._layers
        alone = asked.each(everything, asked.divergence, {layer: frozenset({layer}) for layer in layers})
        from_on = [Layered((1.0,) * layer + (0.0,) * (self._layers - layer)) for layer in layers]
        fronts = asked.each([Prefix(ratio, 1) for ratio in _FRONTS], asked.divergence)
        return {
            "alone": tuple(alone),
            "onward": tuple(asked.each(from_on, asked.divergence)),
            "fronts": {str(ratio): kl for ratio, kl in zip(_FRONTS, fronts, strict=True)},
        }

    def _ask(self, trial: Trial) -> _Asked:
        try:
            self._asker.capture(trial)
            plain = self._asker.plain(trial.asked)
            return _Asked(study(self._asker.cache, trial.asked, plain.tokens), plain.tokens, plain.logits)
        except MediaError as error:
            raise InputError(f"{trial.name}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Asked:
    """A pair's prompt, and plain transformers' answer to it."""

    study: Study
    tokens: list[int]
    logits: torch.Tensor

    def divergence(self, done: Done) -> float:
        return divergence_of(self.logits, done.logits.float())

    def agrees(self, done: Done) -> bool:
        return self.agrees_with(done.logits)

    def agrees_with(self, logits: torch.Tensor) -> bool:
        agree: bool = logits.argmax(-1).tolist() == self.tokens
        return agree

    def each(
        self,
        policies: Sequence[Policy],
        what: Callable[[Done], T],
        stale: Mapping[int, frozenset[int]] | None = None,
    ) -> list[T]:
        """What each rule gives, a few side by side."""
        found: list[T] = []
        for start in range(0, len(policies), _AT_ONCE):
            some = policies[start : start + _AT_ONCE]
            its = {number - start: layers for number, layers in (stale or {}).items()}
            found += [what(done) for done, _ in self.study.run(some, its)]
        return found
