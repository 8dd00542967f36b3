"""One run of `vlcache profile`: calibration pairs in, a profile and its plots out.

pair -> plain answer -> naive reuse, a check and looks
                        nothing but other turns' text changed: each layer alone, all from each layer on, fronts
                        text of the turn changed, and the answer with it: all tokens from each layer on, then bands
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from rich.console import Console

from vlcache import __version__
from vlcache.bench.accuracy_run import Settings as TrialSettings
from vlcache.bench.accuracy_run import check as check_trials
from vlcache.bench.asking import Asker, divergence_of
from vlcache.bench.datasets import REAL_CHANGES, dataset_trials
from vlcache.bench.progress import progress
from vlcache.bench.rows import Skipped
from vlcache.bench.tileworld import NAME, tileworld_plan, tileworld_trial
from vlcache.bench.trials import Trial
from vlcache.context import Changed
from vlcache.engines.transformers.study import Study, study
from vlcache.engines.transformers.support import describe
from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.errors import ConfigError, InputError, MediaError
from vlcache.policies import Band, Check, Evidence, Full, Layered, NoRecompute, Policy, Prefix, Rule, Verified
from vlcache.policies.verified import CHECKED
from vlcache.profile import Profile
from vlcache.profiling.plots import plot_profile
from vlcache.profiling.records import RECORDS_VERSION, PairRecord, Records
from vlcache.profiling.solve import LEAST_PAIRS, Targets, bands_to_try, digits, enter_layer, make_profile
from vlcache.ranges import Ranges
from vlcache.types import Span
from vlcache.verify import Done

__all__ = ["Settings", "check", "run"]

T = TypeVar("T")

# Rules that hold their K/V side by side
_AT_ONCE = 8
_GRAVITY = get_args(Changed)
_FRONTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
# More of those that checks and looks decide about; text of other turns is for the layers
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
        Pairs, of those with nothing but other turns' text changed, that budgets are tested on and not solved on.
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
    deep_pairs: int = 12
    probes: int = 12
    target_kl: float | None = 0.005
    target_share: float | None = None
    dataset: str = NAME
    data: str = ""
    seed: int = 0
    max_new_tokens: int = 16


def check(settings: Settings) -> None:
    """Raise ConfigError for settings that cannot lead to a profile, before a model is loaded."""
    if settings.pairs < LEAST_PAIRS:
        raise ConfigError(f"--pairs {settings.pairs}: too few to say anything; give {LEAST_PAIRS} or more")
    check_trials(TrialSettings(dataset=settings.dataset, data=settings.data))


def run(settings: Settings, model: Any, processor: Any, out: Path, console: Console) -> Profile:
    """Measure, write `out` and plots beside it.

    What is measured is kept beside `out` until the end, so that an interrupted run goes on.

    Raises
    ------
    ConfigError
        As `check`; too few usable pairs; settings other than those of the run that is to be gone on with.
    """
    check(settings)
    layers = describe(model).layers
    fingerprint = WeightsWatch(model).profile_fingerprint()
    trials = list(_trials(settings))
    out.parent.mkdir(parents=True, exist_ok=True)
    settled = asdict(settings) | {"model": fingerprint, "dtype": str(model.dtype), "records": RECORDS_VERSION}
    records = Records(out.with_suffix(".pairs.jsonl"), json.dumps(settled, sort_keys=True))
    with Asker(model, processor, settings.max_new_tokens, range(1, layers)) as asker:
        measure = _Measure(asker, layers, settings)
        found = _each(trials, records, console, "pairs", measure.pair)
        bands = bands_to_try(enter_layer(list(found.values()), layers), layers)
        turn = [trial for trial in trials if trial.name in found and found[trial.name].changed == "turn"]
        found |= _each(turn, records, console, "bands", lambda trial, _: measure.bands(trial, found[trial.name], bands))
        targets = Targets(settings.target_kl, settings.target_share)
        profile = make_profile(fingerprint, layers, list(found.values()), targets, settings.probes)
        held_out = [trial for trial in trials if trial.name in found and found[trial.name].held_out]
        tested = [measure.divergence(trial, Layered(profile.budgets)) for trial in held_out]
    if tested:
        profile = replace(profile, measured_kl=digits(sum(tested) / len(tested)), held_out=len(tested))
    about = ("dataset", "seed", "max_new_tokens")
    how = {name: getattr(settings, name) for name in about} | {"dtype": str(model.dtype), "vlcache": __version__}
    profile = replace(profile, measured=how)
    profile.write(out)
    for path in (out, *plot_profile(profile, list(found.values()), out)):
        console.print(f"wrote {path}", markup=False)
    console.print(_in_words(profile), markup=False)
    records.close()
    return profile


def _in_words(profile: Profile) -> str:
    share = sum(profile.budgets) / profile.layers
    shown = "not tested, no pair was held out" if profile.measured_kl is None else f"measured {profile.measured_kl:.2g}"
    return (
        f"budgets compute {share:.1%} of a picture: KL predicted {profile.predicted_kl:.2g}, {shown} "
        f"({profile.held_out} pairs); band {profile.band}{' at once' if profile.at_once else ''}; tau {profile.tau}: "
        f"{profile.agreement:.1%} of {profile.checked} checked pairs end as full recompute does"
    )


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
) -> dict[str, PairRecord]:
    """Records of trials by name, those that are there already as they are; `measure` is told those before. A trial
    whose prompt cannot be used is named and left out."""
    found: dict[str, PairRecord] = {}
    with progress(console, len(trials), what) as step:
        for trial in trials:
            record = records.get(f"{what}/{trial.name}")
            if record is None:
                try:
                    record = replace(measure(trial, list(found.values())), name=f"{what}/{trial.name}")
                except (InputError, MediaError) as error:
                    console.print(f"skipped {trial.name}: {error}", markup=False)
                    step()
                    continue
                records.put(record)
            found[trial.name] = replace(record, name=trial.name)
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
        return replace(Verified(0.0, self.probes).check, tau=-1.0, sure=2.0, recompute=False)

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
        behind = [*probed.before[1:], probed.logits][: len(moved)]
        record = PairRecord(
            name=trial.name,
            changed=changed,
            kl=asked.divergence(none),
            agree=asked.agrees(none),
            full_sure=float(asked.logits[0].float().softmax(-1).max()),
            checked=all(evidence.changed in (*CHECKED, "text") for evidence in asked.study.known),
            moved=tuple(map(float, moved)),
            sure=tuple(float(logits[0].float().softmax(-1).max()) for logits in behind),
            settled=tuple(map(asked.agrees_with, behind)),
        )
        if changed == "text" and sum(one.held_out for one in before) < self._settings.held_out:
            return replace(record, held_out=True)
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
        stale = {layer: frozenset({layer}) for layer in layers}
        alone = asked.each([Full()] * self._layers, asked.both, stale)
        onward = asked.each([Layered((1.0,) * layer + (0.0,) * (self._layers - layer)) for layer in layers], asked.both)
        fronts = asked.each([Prefix(ratio, 1) for ratio in _FRONTS], asked.divergence)
        return {
            "alone": tuple(kl for kl, _ in alone),
            "alone_flips": tuple(not agree for _, agree in alone),
            "onward": tuple(kl for kl, _ in onward),
            "onward_flips": tuple(not agree for _, agree in onward),
            "fronts": {str(ratio): kl for ratio, kl in zip(_FRONTS, fronts, strict=True)},
        }

    def _ask(self, trial: Trial) -> _Asked:
        self._asker.capture(trial)
        plain = self._asker.plain(trial.asked)
        return _Asked(study(self._asker.cache, trial.asked, plain.tokens), plain.tokens, plain.logits)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A pair's prompt, and plain transformers' answer to it."""

    study: Study
    tokens: list[int]
    logits: torch.Tensor

    def divergence(self, done: Done) -> float:
        return divergence_of(self.logits, done.logits.float())

    def both(self, done: Done) -> tuple[float, bool]:
        return self.divergence(done), self.agrees(done)

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
