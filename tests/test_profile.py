"""Profiles: how budgets, band and threshold follow from records, the file, and a whole run on a tiny model."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from conftest import Lab, make_picture
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from vlcache import VLCache
from vlcache.bench.tileworld import find_model
from vlcache.cli import main
from vlcache.engines.transformers import load_checkpoint
from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.errors import ConfigError
from vlcache.policies import Auto, Band, Layered, NoRecompute, Verified
from vlcache.policies.verified import SURE
from vlcache.profile import PROFILE_NAME, Profile, read_profile
from vlcache.profiling import run as profiling
from vlcache.profiling.budgets import gain_curve, predicted, solve
from vlcache.profiling.records import PairRecord, Records, outcome
from vlcache.profiling.solve import Targets, agreement, bands_to_try, enter_layer, make_profile, sureness, threshold

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

LAYERS = 4
GAIN = {0.0: 0.0, 0.1: 0.5, 0.5: 0.8, 1.0: 1.0}
PROFILE = Profile(
    model="m" * 64,
    layers=LAYERS,
    pairs=30,
    alone=(0.1, 0.2, 0.3, 0.1),
    alone_flips=(0.0, 0.5, 0.5, 0.0),
    onward=(0.4, 0.3, 0.3, 0.1),
    onward_flips=(1.0, 0.5, 0.5, 0.0),
    deep=(1.0, 1.0, 0.5, 0.2),
    budgets=(0.5, 0.1, 0.1, 0.0),
    predicted_kl=0.01,
    measured_kl=0.012,
    held_out=2,
    band=(1, 2, 0.25),
    at_once=False,
    tau=0.7,
    probes=12,
    sure=0.9,
    checked=20,
    agreement=1.0,
)


def all_budgets() -> list[tuple[float, ...]]:
    return [b for b in product(GAIN, repeat=LAYERS) if all(x >= y for x, y in pairwise(b))]


costs = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=LAYERS, max_size=LAYERS)


@given(costs, st.floats(0, 4))
def test_budgets_are_the_cheapest_within_the_bound(cost: list[float], bound: float) -> None:
    budgets = solve(cost, GAIN, target_kl=bound)
    assert budgets in all_budgets()
    assert predicted(cost, GAIN, budgets) <= bound + 1e-9
    assert sum(budgets) <= min(sum(b) for b in all_budgets() if predicted(cost, GAIN, b) <= bound) + 1e-9


@given(costs, st.floats(0, 1))
def test_budgets_are_the_best_within_their_share(cost: list[float], share: float) -> None:
    budgets = solve(cost, GAIN, target_share=share)
    assert budgets in all_budgets()
    assert sum(budgets) / LAYERS <= share + 1e-9
    best = min(predicted(cost, GAIN, b) for b in all_budgets() if sum(b) / LAYERS <= share)
    assert predicted(cost, GAIN, budgets) <= best + 1e-9


def test_budgets_by_hand() -> None:
    """All of the cost in the second layer: it and the one before are computed as far as the bound asks."""
    cost = [0.0, 1.0, 0.0, 0.0]
    assert solve(cost, GAIN, target_kl=1.0) == (0.0,) * 4
    assert solve(cost, GAIN, target_kl=0.5) == (0.1, 0.1, 0.0, 0.0)
    assert solve(cost, GAIN, target_kl=0.1) == (1.0, 1.0, 0.0, 0.0)
    assert solve([0.0] * 4, GAIN, target_kl=0.0) == (0.0,) * 4
    assert solve([1.0] * 4, GAIN, target_share=1.0) == (1.0,) * 4
    assert solve([1.0] * 4, GAIN, target_share=0.09) == (0.1, 0.1, 0.1, 0.0)
    assert solve([0.25] * 4, GAIN, target_kl=0.7) == (0.1, 0.1, 0.1, 0.0)


def test_a_gain_curve_never_falls_and_ends_at_everything() -> None:
    measured = gain_curve(2.0, {0.1: 1.0, 0.2: 1.5, 0.5: 0.5})
    assert measured == {0.0: 0.0, 0.1: 0.25, 0.2: 0.25, 0.5: 0.75, 1.0: 1.0}
    assert gain_curve(1.0, {0.1: 3.0}) == {0.0: 0.0, 0.1: 0.0, 1.0: 1.0}
    assert gain_curve(0.0, {0.1: 0.0}) == {0.0: 0.0, 0.1: 0.0, 1.0: 1.0}


def record(name: str, changed: str = "pictures", agree: bool = True, **more: Any) -> PairRecord:
    return PairRecord(name, changed, 0.0 if agree else 1.0, agree, **more)


def test_a_picture_enters_at_the_deepest_layer_that_still_repairs_all() -> None:
    deep = [(True, True, True, False), (True, True, True, True), (True, True, False, False)]
    assert enter_layer([record(str(n), deep=flags) for n, flags in enumerate(deep)], LAYERS) == 1
    assert enter_layer([record("a", deep=(True, True, True, False))], LAYERS) == 2
    assert enter_layer([record("a", deep=(True, False, True, True))], LAYERS) == 0
    assert enter_layer([record("a")], LAYERS) == 0


def test_bands_are_tried_from_the_cheapest_to_all_layers() -> None:
    bands = bands_to_try(8, 30)
    assert bands[-1] == Band(8, 30, 1.0)
    assert all(band.enter == 8 for band in bands)
    assert Band(8, 20, 0.15) in bands
    assert bands[0] == Band(8, 14, 0.15)


def checked(
    name: str, *looks: tuple[float, bool], agree: bool = True, changed: str = "pictures", **more: Any
) -> PairRecord:
    moved, settled = zip(*looks, strict=True)
    unsure = {"checked": changed != "turn", "sure": (0.5,) * len(looks)}
    return record(name, changed, agree, **{**unsure, "moved": moved, "settled": settled, **more})


SAFE = [checked(f"s{n}", (n / 100, True), (0.0, True)) for n in range(20)]


def test_a_check_ends_where_the_answer_stays_and_a_look_where_it_is_sure() -> None:
    one = checked("a", (2.0, False), (0.5, False), (0.1, True), agree=False)
    assert outcome(one, 3.0, 0.9) == (False, 0)
    assert outcome(one, 0.7, 0.9) == (True, 3)  # no look is sure
    assert outcome(one, 0.7, 0.5) == (False, 1)


def test_a_sure_answer_ends_a_look_but_not_a_check() -> None:
    looks = ((2.0, False), (0.5, True), (0.1, True))
    assert outcome(checked("a", *looks, sure=(0.95, 0.95, 0.99)), 0.05, 0.9) == (True, 1)
    assert outcome(checked("a", *looks, sure=(0.95, 0.5, 0.99)), 0.05, 0.9) == (True, 2)
    assert outcome(checked("a", *looks, sure=(0.95, 0.5, 0.5), changed="turn"), 0.05, 0.9) == (False, 0)


def test_an_answer_has_to_be_as_sure_as_nine_of_ten_are() -> None:
    assert sureness([record(str(n), full_sure=n / 20) for n in range(20)]) == 0.1
    assert sureness([record(str(n), full_sure=0.999) for n in range(20)]) == SURE


def test_tau_lets_most_safe_answers_stand_at_once() -> None:
    unsafe = [checked(f"u{n}", (1.9 + n, False), (0.01, True), agree=False) for n in range(5)]
    assert threshold([*SAFE, *unsafe], 0.9) == 0.14  # 15 of 20
    assert threshold(SAFE, 0.9) == 0.14
    assert threshold(unsafe, 0.9) == 0.0  # no safe answer to let stand


def test_tau_keeps_to_the_risk_where_safe_and_unsafe_overlap() -> None:
    blind = checked("blind", (0.055, False), (0.01, False), agree=False)
    assert threshold([*SAFE, blind], 0.9) == 0.05
    assert agreement([*SAFE, blind], 0.05, 0.9) == 1.0  # no look is sure: recomputed
    assert agreement([*SAFE, blind], 0.06, 0.9) == pytest.approx(20 / 21)
    late = checked("late", (3.0, False), (0.055, False), agree=False, sure=(0.5, 0.95))
    assert threshold([*SAFE, late], 0.9) == 0.0
    assert threshold([*SAFE, late], 0.96) == 0.14


def test_no_tau_is_given_that_was_not_tried() -> None:
    """This pair is right at the check and wrong at the look: a tau below is worse than one above."""
    turned = checked("turned", (0.12, True), (0.05, False), sure=(0.5, 0.95))
    tau = threshold([*SAFE, turned], 0.9)
    assert tau == 0.14
    assert agreement([*SAFE, turned], tau, 0.9) == 1.0
    assert agreement([*SAFE, turned], 0.1, 0.9) < 1.0
    assert threshold([checked("same", (0.0, True), (0.0, True))], 0.9) == 0.0


def pairs(turn: list[PairRecord]) -> list[PairRecord]:
    flips = {"alone_flips": (True, False, False, False), "onward_flips": (True, True, False, False)}
    layers = [
        record(
            f"t{n}",
            "text",
            alone=(0.2, 0.1, 0.1, 0.0),
            onward=(0.4, 0.2, 0.1, 0.0),
            **flips,
            fronts={"0.1": 0.0},
        )
        for n in (1, 2)
    ]
    others = [checked(f"p{n}", (0.01 * n, True)) for n in range(30)]
    return [*layers, *others, checked("swapped", (3.0, False), agree=False, changed="neighbours"), *turn]


def test_a_check_decides_where_it_misses_nothing() -> None:
    measured = {"deep": (True, True, False, False), "bands": {"band:1,2,0.15": True}}
    turn = [checked("x", (2.0, True), agree=False, changed="turn", sure=(0.99,), **measured)]
    profile = make_profile("m", LAYERS, pairs(turn), Targets(kl=1.0), 12)
    assert not profile.at_once
    assert profile.band == (1, 2, 0.15)
    assert profile.agreement == 1.0
    assert profile.auto() == Auto(
        Verified(profile.tau, 12, repair=Band(1, 2, 0.15), sure=0.98, calm=False), None, NoRecompute()
    )


def test_the_band_comes_at_once_where_a_check_is_blind() -> None:
    bands = {"band:1,2,0.15": False, "band:1,2,0.3": True}
    measured = {"deep": (True, True, False, False), "bands": bands}
    turn = [checked("x", (0.001, False), agree=False, changed="turn", sure=(0.99,), **measured)]
    profile = make_profile("m", LAYERS, pairs(turn), Targets(kl=1.0), 12)
    assert profile.at_once
    assert profile.band == (1, 2, 0.3)
    assert profile.tau > 0.2
    auto = profile.auto()
    assert auto == Auto(Verified(profile.tau, 12, sure=0.98, calm=False), Band(1, 2, 0.3), NoRecompute())
    assert "turn" not in auto.check.suspects
    assert auto.checkpoints == (1,)


def test_too_few_pairs_are_refused() -> None:
    for some in (pairs([])[:23], [record(str(n)) for n in range(30)], [one for one in pairs([]) if not one.moved] * 20):
        with pytest.raises(ConfigError, match="usable calibration pairs"):
            make_profile("m", LAYERS, some, Targets(kl=1.0), 12)
    with pytest.raises(ConfigError, match="--pairs 23: too few"):
        profiling.check(profiling.Settings(pairs=23))
    with pytest.raises(ConfigError, match="no data"):
        profiling.check(profiling.Settings(dataset="mmmu-pro"))


def test_without_pairs_that_show_a_depth_there_is_no_band() -> None:
    profile = make_profile("m", LAYERS, pairs([]), Targets(kl=1.0), 12)
    assert (profile.band, profile.deep, profile.at_once) == (None, (), False)
    assert profile.auto() == Auto(Verified(profile.tau, 12, sure=0.98, calm=False), None, NoRecompute())
    assert profile.alone_flips == (1.0, 0.0, 0.0, 0.0)


def test_layers_that_cost_nothing_alone_share_what_all_cost() -> None:
    some = [replace(one, alone=(0.0,) * 4, kl=1.0) if one.alone else one for one in pairs([])]
    profile = make_profile("m", LAYERS, some, Targets(kl=0.5), 12)
    assert sum(profile.budgets) > 0
    assert profile.predicted_kl <= 0.5


def test_a_profile_reads_back(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == PROFILE
    assert PROFILE.policy("layered") == Layered(PROFILE.budgets)
    verified = Verified(0.7, 12, repair=Band(1, 2, 0.25), sure=0.9, calm=False)
    assert PROFILE.policy("auto") == Auto(verified, None, Layered(PROFILE.budgets))
    assert PROFILE.policy("none") == NoRecompute()
    assert PROFILE.policy("layered:1,1,1,1") == Layered((1.0,) * 4)


def test_budgets_written_by_hand_that_grow_are_widened_with_a_warning(tmp_path: Path) -> None:
    replace(PROFILE, budgets=(0.1, 0.5, 0.0, 0.2)).write(tmp_path / "p.json")
    with pytest.warns(UserWarning, match="budgets grow with depth"):
        assert read_profile(tmp_path / "p.json").budgets == (0.5, 0.5, 0.2, 0.2)
    PROFILE.write(tmp_path / "q.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_profile(tmp_path / "q.json")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "something"}, "is none"),
        ({"format_version": 3}, "format version 3, this release reads 2"),
        ({"budgets": [1, 0]}, "budgets has 2 numbers for 4 layers"),
        ({"budgets": [2, 1, 0, 0]}, "ratio 2.0 is not between 0 and 1"),
        ({"alone": [1, 2, 3, float("nan")]}, "nan is no number"),
        ({"tau": -1}, "tau -1.0 is not a divergence"),
        ({"tau": None}, "float"),
        ({"probes": 0}, "0 probes"),
        ({"band": [4, 5, 0.1]}, "a band from layer 4 of 4"),
        ({"band": [3, 2, 0.1]}, "layers 3 to 2"),
        ({"band": [1]}, "index"),
    ],
)
def test_a_damaged_profile_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    (tmp_path / "p.json").write_text(json.dumps(PROFILE.to_dict() | change))
    with pytest.raises(ConfigError) as caught:
        read_profile(tmp_path / "p.json")
    assert told in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"format": "vlcache-profile", "format_version": 2}'])
def test_what_is_no_profile_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ConfigError, match="vlcache profile"):
        read_profile(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "q.json")


def test_records_go_on_where_they_were(tmp_path: Path) -> None:
    records = Records(tmp_path / "r.jsonl", "settings")
    one = record(
        "a",
        "turn",
        agree=False,
        moved=(1.5,),
        sure=(0.5,),
        settled=(True,),
        deep=(True, False),
        bands={"band:1,2,0.15": True},
        fronts={"0.1": 0.5},
    )
    records.put(one)
    with (tmp_path / "r.jsonl").open("a") as file:
        file.write('{"name": "cut o')
    again = Records(tmp_path / "r.jsonl", "settings")
    assert again.get("a") == one
    assert again.get("b") is None
    again.put(record("c"))
    third = Records(tmp_path / "r.jsonl", "settings")
    assert (third.get("a"), third.get("c")) == (one, record("c"))
    (tmp_path / "empty.jsonl").write_text("")
    assert Records(tmp_path / "empty.jsonl", "settings").get("a") is None
    with pytest.raises(ConfigError, match="other settings"):
        Records(tmp_path / "r.jsonl", "others")
    again.close()
    assert not (tmp_path / "r.jsonl").exists()


SMALL = profiling.Settings(pairs=30, held_out=1, layer_pairs=2, deep_pairs=2, max_new_tokens=2)


def run(lab: Lab, out: Path, small: profiling.Settings = SMALL) -> Profile:
    return profiling.run(small, lab.model, lab.processor, out, Console(file=io.StringIO()))


def test_a_run_writes_the_same_profile_twice_also_after_an_interruption(
    one_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = run(one_lab, tmp_path / "one.json")
    assert read_profile(tmp_path / "one.json") == profile
    assert (profile.layers, profile.pairs, len(profile.alone)) == (LAYERS, 30, LAYERS)
    # a layer's K/V of layer 0 are what a fresh prefill computes, wherever the picture stands
    assert profile.alone[0] == pytest.approx(0, abs=1e-5)
    assert profile.onward[0] >= profile.onward[-1] >= 0
    assert (profile.held_out, profile.measured_kl is None) == (1, False)
    assert profile.checked > 10
    assert {path.name for path in tmp_path.iterdir()} == {"one.json", "one.png", "one.svg"}

    measure, done = profiling._Measure.pair, []

    def failing(self: Any, trial: Any, before: Any) -> Any:
        if len(done) == 12:
            raise KeyboardInterrupt
        done.append(trial.name)
        return measure(self, trial, before)

    monkeypatch.setattr(profiling._Measure, "pair", failing)
    with pytest.raises(KeyboardInterrupt):
        run(one_lab, tmp_path / "two.json")
    assert (tmp_path / "two.pairs.jsonl").exists()
    with pytest.raises(ConfigError, match="other settings"):
        run(one_lab, tmp_path / "two.json", replace(SMALL, seed=1))
    monkeypatch.setattr(profiling._Measure, "pair", measure)
    run(one_lab, tmp_path / "two.json")
    assert (tmp_path / "two.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_a_profile_is_named_or_lies_in_the_models_directory(
    one_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = one_lab
    own = WeightsWatch(lab.model).profile_fingerprint()
    mine = replace(PROFILE, model=own)
    mine.write(tmp_path / PROFILE_NAME)
    PROFILE.write(tmp_path / "other.json")
    assert lab.cache("auto").policy == Auto()
    assert lab.cache("auto", profile=str(tmp_path / PROFILE_NAME)).policy == mine.auto()
    assert lab.cache("layered", profile=str(tmp_path / PROFILE_NAME)).policy == mine.layered()
    with pytest.raises(ConfigError, match="measured on another model"):
        lab.cache("auto", profile=str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match="needs a ratio per layer"):
        VLCache(lab.model, lab.processor, "layered")
    monkeypatch.setattr(lab.model.config, "_name_or_path", str(tmp_path))
    monkeypatch.setattr(lab.model, "name_or_path", str(tmp_path), raising=False)
    assert lab.cache("auto").policy == mine.auto()
    assert lab.cache("layered").policy == mine.layered()
    PROFILE.write(tmp_path / PROFILE_NAME)
    with pytest.warns(UserWarning, match="measured on another model"):
        assert lab.cache("auto").policy == Auto()
    (tmp_path / PROFILE_NAME).write_text("{")
    with pytest.warns(UserWarning, match="not JSON"):
        assert lab.cache("none").policy == NoRecompute()


def test_auto_takes_a_band_where_the_profile_says_so_and_checks_elsewhere(one_lab: Lab, tmp_path: Path) -> None:
    lab, picture, other = one_lab, make_picture(10), make_picture(11)
    profile = replace(PROFILE, at_once=True, budgets=(0.0,) * 4, tau=1e9, sure=0.0)
    with lab.cache(profile.auto()) as cache:
        cache.prefill(lab.chat("Here.", picture, "q"))
        cache.prefill(lab.chat("There.", picture, "q"))
        n = cache.last.spans[0].tokens
        assert cache.last.verdict.result == "skipped"
        assert cache.last.spans[0].rows == 2 * n + -(-n // 4)
        cache.prefill(lab.chat("Here.", picture, "q", system="S"))
        assert (cache.last.verdict.result, cache.last.spans[0].rows) == ("skipped", 0)
        cache.prefill(lab.chat("Here.", other, picture, "q"))
        assert (cache.last.verdict.result, cache.last.spans[1].rows) == ("safe", 24 * LAYERS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--pairs", "3"], "too few"),
        (["--target-kl", "0.1", "--target-share", "0.1"], "both given"),
        (["--dataset", "mmmu-pro"], "no data"),
        (["--data", "here"], "without --dataset"),
        (["--target-share", "2"], "2"),
    ],
)
def test_the_command_says_what_is_wrong_before_a_model_is_loaded(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--model", "nowhere", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_tileworld_ships_a_profile_that_is_its_own() -> None:
    model, processor = load_checkpoint(find_model("tileworld", print))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = VLCache(model, processor)
    assert cache.profile is not None
    assert cache.profile.pairs >= 100
    assert cache.policy == cache.profile.auto()
