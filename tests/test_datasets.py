"""Published benchmarks as trials: small files in their schemas, made here, with one fault at a time."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlcache.bench import rows
from vlcache.bench.datasets import DATASETS, REAL_CHANGES, Skipped, dataset_trials
from vlcache.bench.trials import Trial
from vlcache.errors import ConfigError

Color = tuple[int, int, int]
RED, GREEN, BLUE, WHITE = (250, 0, 0), (0, 250, 0), (0, 0, 250), (255, 255, 255)


# Files


def png(color: Color) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 6), color).save(out, "PNG")
    return out.getvalue()


def standard(name: str, color: Color | None = RED, **changed: Any) -> dict[str, Any]:
    """A row of MMMU-Pro's standard configurations."""
    row: dict[str, Any] = {
        "id": name,
        "question": f"What is in <image 1> of {name}?",
        "options": "['a circle', \"a dog's bowl\", 'a square']",
        "explanation": "?",
        **{f"image_{number}": None for number in range(1, 8)},
        "img_type": "['Diagrams']",
        "answer": "B",
        "topic_difficulty": "Easy",
        "subject": "Art",
    }
    if color:
        row["image_1"] = {"bytes": png(color), "path": f"{name}_1.png"}
    return row | changed


def vision(name: str, color: Color = RED, **changed: Any) -> dict[str, Any]:
    picture = {"bytes": png(color), "path": f"{name}.png"}
    return {"id": name, "image": picture, "options": "['one', 'two']", "answer": "A", "subject": "Math"} | changed


def question(name: str = "a.pdf", **changed: Any) -> dict[str, Any]:
    """A row of MMLongBench-Doc."""
    return {
        "doc_id": name,
        "doc_type": "Guidebook",
        "question": f"How many pages has {name}?",
        "answer": "2",
        "evidence_pages": "[1]",
        "evidence_sources": "['Table']",
        "answer_format": "Int",
    } | changed


def write_parquet(path: Path, given: Sequence[dict[str, Any]]) -> None:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = list(dict.fromkeys(column for row in given for column in row))
    schema = pa.schema([(c, picture if c.startswith("image") else pa.string()) for c in columns])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(given), schema), path)


def as_json(row: Any) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return value | {"bytes": base64.b64encode(value["bytes"]).decode()}
        return value

    return {column: plain(value) for column, value in row.items()} if isinstance(row, dict) else row


def write_jsonl(path: Path, given: Sequence[Any]) -> None:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(as_json(row)) for row in given))


def write_pdf(path: Path, *colors: Color) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pages = [Image.new("RGB", (20, 30), color) for color in colors]
    pages[0].save(path, "PDF", save_all=True, append_images=pages[1:])


def grey(number: int) -> Color:
    return (number * 20,) * 3


# What came of them


def read(
    name: str, data: Path, items: int | None = None, changes: Sequence[str] | None = ("none",), **more: Any
) -> list[Trial | Skipped]:
    return list(dataset_trials(name, data, items, changes, more.pop("families", None), **more))


def trials(found: Sequence[Trial | Skipped]) -> list[Trial]:
    assert all(isinstance(one, Trial) for one in found), found
    return [one for one in found if isinstance(one, Trial)]


def by_change(found: Sequence[Trial | Skipped], name: str) -> dict[str, Trial]:
    return {trial.change: trial for trial in trials(found) if trial.name.startswith(f"{name}/")}


def near(color: Color, shown: Color) -> bool:
    """JPEG pages are not exact."""
    return all(abs(a - b) <= 6 for a, b in zip(color, shown, strict=True))


def told(chat: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A chat as (role, part, part, ...), a picture as the color of its first pixel."""

    def part(one: dict[str, Any]) -> Any:
        if one["type"] == "text":
            assert set(one) == {"type", "text"}
            return one["text"]
        assert set(one) == {"type", "image"}
        assert one["image"].mode == "RGB"
        return one["image"].getpixel((0, 0))

    return [(message["role"], *map(part, message["content"])) for message in chat]


def user_turn(trial: Trial) -> tuple[Any, ...]:
    return tuple(told(trial.asked)[-1][1:])


def shades(trial: Trial) -> list[Color]:
    return [one for one in user_turn(trial) if not isinstance(one, str)]


def only(found: Sequence[Trial | Skipped]) -> Skipped:
    """The one row that was skipped; the good one behind it was asked."""
    skipped = [one for one in found if isinstance(one, Skipped)]
    assert len(skipped) == 1, found
    assert [one.name for one in found if isinstance(one, Trial)] in (["good/none"], ["good.pdf#2/none"])
    return skipped[0]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    write_pdf(tmp_path / "documents" / "a.pdf", RED, GREEN)
    write_pdf(tmp_path / "good.pdf", BLUE)
    return tmp_path


# MMMU-Pro


def test_a_standard_row_of_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "test-00000-of-00001.parquet", [standard("test_Art_1", GREEN)])
    (trial,) = trials(read("mmmu-pro", tmp_path))
    assert (trial.name, trial.family, trial.change, trial.answer) == ("test_Art_1/none", "Art", "none", "B")
    before, picture, after = user_turn(trial)
    assert (before, picture) == ("What is in ", GREEN)
    lines = after.splitlines()
    assert lines[:4] == [" of test_Art_1?", "A. a circle", "B. a dog's bowl", "C. a square"]
    assert len(lines) == 5
    assert "letter" in lines[4]
    assert [trial.grade(words) for words in ("B", "A dog's bowl", "C", "")] == [True, True, False, False]


def test_a_vision_row_of_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "test.parquet", [vision("test_Math_1", BLUE)])
    (trial,) = trials(read("mmmu-pro", tmp_path))
    assert (trial.family, trial.answer) == ("Math", "A")
    picture, text = user_turn(trial)
    assert picture == BLUE
    assert "letter" in text
    assert "one" not in text.split()  # the options stand in the picture
    assert trial.grade("(A)")
    assert not trial.grade("(B)")


def test_jsonl_says_the_same_as_parquet(tmp_path: Path) -> None:
    given = [standard("a", image_2={"bytes": png(BLUE), "path": None}), vision("b", GREEN)]
    write_parquet(tmp_path / "p" / "rows.parquet", given)
    (tmp_path / "j").mkdir()
    write_jsonl(tmp_path / "j" / "rows.jsonl", [*given[:1], "", *given[1:]])
    parquet, jsonl = (trials(read("mmmu-pro", tmp_path / folder)) for folder in "pj")
    assert [told(one.asked) for one in jsonl] == [told(one.asked) for one in parquet]
    assert [one.name for one in jsonl] == ["a/none", "b/none"]


@pytest.mark.parametrize(
    "value", ["pictures/x.png", {"path": "pictures/x.png"}, {"bytes": None, "path": "pictures/x.png"}]
)
def test_a_picture_may_be_a_file_of_the_folder(tmp_path: Path, value: Any) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "x.png").write_bytes(png(BLUE))
    write_jsonl(tmp_path / "rows.jsonl", [standard("a", image_1=value)])
    assert BLUE in user_turn(trials(read("mmmu-pro", tmp_path))[0])
    assert BLUE in user_turn(trials(read("mmmu-pro", tmp_path / "rows.jsonl"))[0])


def test_pictures_stand_where_they_are_named(tmp_path: Path) -> None:
    row = standard(
        "a",
        RED,
        question="<image 3> against <image 1>",
        options=["<image 4>", "as <image  1>", "<image 3>, <image 3>"],
        image_2={"bytes": png(WHITE), "path": None},
        image_3={"bytes": png(GREEN), "path": None},
        image_4={"bytes": png(BLUE), "path": None},
    )
    write_jsonl(tmp_path / "rows.jsonl", [standard("first"), row])
    turn = user_turn(trials(read("mmmu-pro", tmp_path))[1])
    assert turn[:6] == (WHITE, GREEN, " against ", RED, "\nA. ", BLUE)
    # named again they are not shown again, and numbers count as they are shown
    assert turn[6].startswith("\nB. as [picture 3]\nC. [picture 2], [picture 2]\n")
    assert len(turn) == 7
    question_first = by_change(read("mmmu-pro", tmp_path, changes=["question"]), "a")["question"]
    text, *pictures = user_turn(question_first)
    assert text.startswith("[picture 2] against [picture 3]\nA. [picture 4]\nB. as [picture 3]\nC. [picture 2],")
    assert pictures == [WHITE, GREEN, RED, BLUE]


def test_an_absent_picture_may_be_an_empty_struct(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", [standard("a", image_2={"bytes": None, "path": None})])
    assert shades(trials(read("mmmu-pro", tmp_path))[0]) == [RED]


def test_many_rows_are_read_in_order_and_across_files(tmp_path: Path) -> None:
    names = [f"row{number:02}" for number in range(20)]
    write_parquet(tmp_path / "b.parquet", [standard(name) for name in names[12:]])
    write_parquet(tmp_path / "a.parquet", [standard(name) for name in names[:12]])
    assert [trial.name for trial in trials(read("mmmu-pro", tmp_path))] == [f"{name}/none" for name in names]


def test_only_the_subjects_asked_for(tmp_path: Path) -> None:
    given = [standard("a"), standard("b", subject="Music"), standard("broken", None), vision("c")]
    write_jsonl(tmp_path / "rows.jsonl", given)
    found = read("mmmu-pro", tmp_path, families=["Math", "Music", "Alchemy"])
    assert [trial.name for trial in trials(found[:-1])] == ["b/none", "c/none"]
    assert found[-1] == Skipped("rows.jsonl", "no row of family 'Alchemy' can be asked")


def test_a_row_without_a_subject_is_told_whatever_is_asked_for(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [standard("bad", subject=None), standard("good")])
    assert only(read("mmmu-pro", tmp_path, families=["Art"])).reason == "subject: missing or empty"


def test_an_answer_may_be_a_small_letter(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [standard("a", answer=" b ")])
    (trial,) = trials(read("mmmu-pro", tmp_path))
    assert trial.answer == "B"
    assert trial.grade("B")


# Contexts


def test_every_change_of_a_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", [standard("a", GREEN), standard("b", BLUE)])
    found = read("mmmu-pro", tmp_path, changes=None)
    assert [trial.name for trial in trials(found)] == [
        *(f"a/{change}" for change in ("none", "system", "turn")),
        *(f"b/{change}" for change in REAL_CHANGES),
    ]
    mine = by_change(found, "b")
    first = told(mine["none"].asked)
    system, turn = first
    assert [message[0] for message in first] == ["system", "user"]
    assert BLUE in turn
    assert [told(chat) for chat in mine["none"].captures] == [first]

    for change in ("system", "turn"):
        assert [told(chat) for chat in mine[change].captures] == [first]
    other_system, same_turn = told(mine["system"].asked)
    assert (other_system[0], same_turn) == ("system", turn)
    assert other_system != system

    asked = told(mine["turn"].asked)
    assert (asked[0], asked[-1]) == (system, turn)
    assert [message[0] for message in asked] == ["system", "user", "assistant", "user"]
    assert all(isinstance(part, str) for message in asked[:-1] for part in message)

    asked = told(mine["picture"].asked)
    assert (asked[0], asked[-1]) == (system, turn)
    assert [message[0] for message in asked] == ["system", "user", "assistant", "user"]
    assert asked[1][1] == GREEN
    assert [told(chat) for chat in mine["picture"].captures] == [[system, asked[1]], first]

    asked = told(mine["question"].asked)
    ((captured_system, captured),) = (told(chat) for chat in mine["question"].captures)
    assert asked[0] == captured_system == system
    role, text, picture = asked[1]
    assert (role, picture) == ("user", BLUE)
    assert text.startswith("What is in [picture 1] of b?\nA. a circle")
    assert captured == ("user", text.replace("of b?", "of a?"), BLUE)


def test_every_picture_asked_about_is_captured(docs: Path) -> None:
    write_jsonl(docs / "rows.jsonl", [question("a.pdf"), question("good.pdf"), question("a.pdf", question="Else?")])
    found = trials(read("mmlongbench-doc", docs, changes=None))
    assert {trial.change for trial in found} == set(REAL_CHANGES)
    for trial in found:
        captured, asked = (
            {id(part["image"]) for chat in chats for message in chat for part in message["content"] if "image" in part}
            for chats in (trial.captures, [trial.asked])
        )
        assert asked <= captured


def test_another_picture_is_one_that_the_row_does_not_show(docs: Path) -> None:
    given = [question("a.pdf"), question("a.pdf"), question("good.pdf"), question("good.pdf")]
    write_jsonl(docs / "rows.jsonl", given)
    found = trials(read("mmlongbench-doc", docs, changes=["picture"]))
    assert [trial.name for trial in found] == ["good.pdf#3/picture", "good.pdf#4/picture"]
    assert all(near(told(trial.asked)[1][1], RED) for trial in found)  # type: ignore[arg-type]


def test_another_question_is_none_where_questions_stand_in_the_pictures(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [vision("a", RED), vision("b", GREEN)])
    found = trials(read("mmmu-pro", tmp_path, changes=["none", "question", "picture"]))
    assert [trial.name for trial in found] == ["a/none", "b/none", "b/picture"]


def test_a_skipped_row_lends_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [standard("a", GREEN), standard("b", BLUE, answer=""), standard("c", RED)])
    found = read("mmmu-pro", tmp_path, changes=["picture"])
    assert [type(one) for one in found] == [Skipped, Trial]
    assert told(trials(found[1:])[0].asked)[1][1] == GREEN


def test_items_bounds_the_rows_that_are_asked(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "rows.jsonl", [standard("a"), standard("bad", answer=None), standard("b"), "{", standard("c")]
    )
    found = read("mmmu-pro", tmp_path, items=2, changes=["none", "system"])
    assert [one.row if isinstance(one, Skipped) else one.name for one in found] == [
        *("a/none", "a/system"),
        "rows.jsonl:2 (bad)",
        *("b/none", "b/system"),
    ]


def test_no_row_is_read_beyond_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(
        rows.Library, "picture", lambda self, value, number: opened.append(number) or Image.new("RGB", (1, 1))
    )
    write_jsonl(tmp_path / "rows.jsonl", [standard("a"), standard("b")])
    assert len(read("mmmu-pro", tmp_path, items=1)) == 1
    assert len(opened) == 1


# MMLongBench-Doc


@pytest.mark.parametrize("kind", ["rows.parquet", "rows.jsonl", "samples.json", "data/train-00000-of-00001.parquet"])
def test_the_published_layouts_of_documents(docs: Path, kind: str) -> None:
    given = [question("a.pdf"), question("good.pdf", answer_format="Str", answer="Blue", evidence_pages="[]")]
    if kind.endswith("parquet"):
        write_parquet(docs / kind, given)
    elif kind.endswith("jsonl"):
        write_jsonl(docs / kind, given)
    else:
        (docs / kind).write_text(json.dumps(given))
    first, second = trials(read("mmlongbench-doc", docs))
    assert (first.name, first.family, first.answer) == ("a.pdf#1/none", "Int", "2")
    assert (second.name, second.family, second.answer) == ("good.pdf#2/none", "Str", "Blue")
    *pages, text = user_turn(first)
    assert [near(*pair) for pair in zip(pages, (RED, GREEN), strict=True)] == [True, True]
    assert text.startswith("How many pages has a.pdf?\n")
    assert [near(*pair) for pair in zip(shades(second), [BLUE], strict=True)] == [True]
    assert [first.grade(words) for words in ("2", "Three", "3")] == [True, False, False]
    assert [second.grade(words) for words in ("blue.", "2")] == [True, False]


def test_rows_of_several_files_have_names_of_their_own(docs: Path) -> None:
    for name in "ab":
        write_jsonl(docs / f"{name}.jsonl", [question(), "", question()])
    found = trials(read("mmlongbench-doc", docs))
    assert [trial.name for trial in found] == [f"a.pdf#{number}/none" for number in (1, 2, 3, 4)]


def test_json_may_hold_numbers_and_lists(docs: Path) -> None:
    write_jsonl(docs / "rows.jsonl", [question(answer=2, evidence_pages=[1, 2])])
    (trial,) = trials(read("mmlongbench-doc", docs))
    assert trial.grade("2")


@pytest.mark.parametrize(("dpi", "size"), [(144, (40, 60)), (72, (20, 30))])
def test_pages_are_drawn_at_dpi(docs: Path, dpi: int, size: tuple[int, int]) -> None:
    write_jsonl(docs / "rows.jsonl", [question()])
    (trial,) = trials(read("mmlongbench-doc", docs, dpi=dpi))
    assert [part["image"].size for part in trial.asked[-1]["content"] if "image" in part] == [size, size]


def test_at_most_120_pages_at_144_dpi_unless_told_otherwise(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", *[RED] * 121)
    write_jsonl(tmp_path / "rows.jsonl", [question()])
    (trial,) = trials(list(dataset_trials("mmlongbench-doc", tmp_path, None, ["none"], None)))
    assert [part["image"].size for part in trial.asked[-1]["content"] if "image" in part] == [(40, 60)] * 120


@pytest.mark.parametrize(
    ("evidence", "shown"),
    [
        ("[]", [1, 2, 3, 4]),
        ("[4]", [1, 2, 3, 4]),
        ("[5]", [2, 3, 4, 5]),
        ("[7, 4]", [4, 5, 6, 7]),
        ("[10]", [7, 8, 9, 10]),
        ("[2, 99]", [1, 2, 3, 4]),
    ],
)
def test_a_long_document_is_a_window_with_its_evidence(tmp_path: Path, evidence: str, shown: list[int]) -> None:
    write_pdf(tmp_path / "a.pdf", *map(grey, range(1, 11)))
    write_jsonl(tmp_path / "rows.jsonl", [question(evidence_pages=evidence)])
    (trial,) = trials(read("mmlongbench-doc", tmp_path, max_pages=4))
    assert [near(*pair) for pair in zip(shades(trial), map(grey, shown), strict=True)] == [True] * 4


def test_the_pages_of_the_last_document_are_drawn_once(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pdf(docs / "long.pdf", *map(grey, range(1, 7)))
    drawn: list[int] = []
    draw = rows.Library._draw

    def counted(self: rows.Library, page: Any, number: int) -> Image.Image:
        drawn.append(number)
        return draw(self, page, number)

    monkeypatch.setattr(rows.Library, "_draw", counted)
    windows = [question("long.pdf", evidence_pages=pages) for pages in ("[1]", "[4]", "[1]")]
    write_jsonl(docs / "rows.jsonl", [*windows, question("good.pdf"), question("long.pdf")])
    found = trials(read("mmlongbench-doc", docs, max_pages=3))
    # the window moves by one page and back, then another document stands between
    assert drawn == [1, 2, 3, 4, 1, 1, 1, 2, 3]
    assert [near(*pair) for pair in zip(shades(found[1]), map(grey, (2, 3, 4)), strict=True)] == [True] * 3


def test_only_the_answer_formats_asked_for(docs: Path) -> None:
    write_jsonl(docs / "rows.jsonl", [question(), question(answer_format="Str"), question(answer_format="None")])
    found = trials(read("mmlongbench-doc", docs, families=["Str", "None"]))
    assert [trial.family for trial in found] == ["Str", "None"]


# Rows that cannot be asked


def without(row: dict[str, Any], *columns: str) -> dict[str, Any]:
    return {column: value for column, value in row.items() if column not in columns}


PICTURE_FAULTS = {
    "not a picture": {"bytes": b"not a picture", "path": None},
    "zero bytes": {"bytes": b"", "path": None},
    "damaged": {"bytes": png(RED)[:-30], "path": None},
    "no such file": {"bytes": None, "path": "absent.png"},
}

MMMU_FAULTS = [
    *[
        (without(standard("bad"), column), f"{column}: missing")
        for column in ("options", "answer", "subject", "question")
    ],
    (without(standard("bad"), "answer", "subject"), "answer, subject: missing"),
    (without(standard("bad"), "id"), "id: missing"),
    (standard("bad", answer=""), "answer: missing"),
    (standard("bad", answer="  "), "answer: missing"),
    (standard("bad", answer=None), "answer: missing"),
    (standard("bad", answer="D"), "answer 'D' is none of A to C"),
    (standard("bad", options="a, b"), "options: 'a, b' is not a list"),
    (standard("bad", options="['a'"), "options: \"['a'\" is not a list"),
    (standard("bad", options="[]"), "options: 0"),
    (standard("bad", options=str(list(range(27)))), "options: 27"),
    (standard("bad", None), "no picture"),
    (standard("bad", question="See <image 2>"), "image_2: named in the text, but missing"),
    (standard("bad", question="See <image 12>"), "image_12: named in the text, but missing"),
    *[(standard("bad", image_1=value), problem) for problem, value in PICTURE_FAULTS.items()],
    (vision("bad", image=None), "image: missing"),
    (vision("bad", image=PICTURE_FAULTS["damaged"]), "damaged"),
]


@pytest.mark.parametrize(("row", "problem"), MMMU_FAULTS, ids=[problem for _, problem in MMMU_FAULTS])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_row_of_mmmu_pro_with_a_fault_is_told(tmp_path: Path, row: dict[str, Any], problem: str, kind: str) -> None:
    given = [row, standard("good")]
    if kind == "parquet":
        for number, one in enumerate(given, 1):  # a parquet file's rows have the same columns
            write_parquet(tmp_path / f"{number}.parquet", [one])
        place = "1.parquet:1"
    else:
        write_jsonl(tmp_path / "rows.jsonl", given)
        place = "rows.jsonl:1"
    skipped = only(read("mmmu-pro", tmp_path))
    assert skipped.row == (f"{place} ({row['id']})" if "id" in row else place)
    assert problem in skipped.reason


def test_a_second_row_of_the_same_id_is_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [standard("good"), standard("good", BLUE)])
    skipped = only(read("mmmu-pro", tmp_path))
    assert skipped == Skipped("rows.jsonl:2 (good)", "an earlier row has the same id")


JSON_FAULTS = [
    (standard("bad", image_1={"bytes": "%%%", "path": None}), "base64"),
    (standard("bad", image_1={"bytes": 7}), "picture 1: a int is not a picture"),
    (standard("bad", image_1={"path": 7}), "picture 1 has neither bytes nor a path"),
    (standard("bad", image_1=7), "picture 1 has neither bytes nor a path"),
    ('{"id": "bad", ', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("[1, 2]", "a list is not a row"),
    ('"bad"', "a str is not a row"),
    ("null", "a NoneType is not a row"),
]


@pytest.mark.parametrize(("row", "problem"), JSON_FAULTS, ids=[problem for _, problem in JSON_FAULTS])
def test_a_line_with_a_fault_is_told(tmp_path: Path, row: Any, problem: str) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [row, standard("good")])
    skipped = only(read("mmmu-pro", tmp_path))
    assert skipped.row == ("rows.jsonl:1 (bad)" if isinstance(row, dict) else "rows.jsonl:1")
    assert problem in skipped.reason


def test_a_line_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [standard("good")])
    text = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(b'{"id": "\xff"}\n' + text)
    assert only(read("mmmu-pro", tmp_path)) == Skipped("rows.jsonl:1", "not JSON")


def test_a_picture_over_the_limit_is_told(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("1", (8_001, 8_000)).save(out, "PNG")
    write_jsonl(tmp_path / "rows.jsonl", [standard("bad", image_1={"bytes": out.getvalue()}), standard("good")])
    assert "8001x8000 pixels are over the limit" in only(read("mmmu-pro", tmp_path)).reason


DOC_FAULTS = [
    *[
        (without(question(), column), f"{column}: missing")
        for column in ("doc_id", "question", "answer", "evidence_pages", "answer_format")
    ],
    (question(answer=""), "answer: missing"),
    (question(answer_format="Word"), "answer_format 'Word' is none of Str, Int"),
    (question(evidence_pages="1, 2"), "evidence_pages: '1, 2' is not a list"),
    (question(evidence_pages="['one']"), "evidence_pages: ['one'] are not page numbers"),
    (question(evidence_pages="[1, 3]"), "evidence on pages 1 to 3 is further apart than max_pages (2)"),
    (question("absent.pdf"), "no document 'absent.pdf'"),
    (question("x" * 5000), "no document"),
    (question("documents"), "no document"),
    (question("broken.pdf"), "broken.pdf cannot be read as a PDF"),
    (question("empty.pdf"), "empty.pdf cannot be read as a PDF"),
    (question("wide.pdf"), "page 1: 80000x80000 pixels are over the limit"),
]


@pytest.mark.parametrize(("row", "problem"), DOC_FAULTS, ids=[problem for _, problem in DOC_FAULTS])
def test_a_row_of_mmlongbench_doc_with_a_fault_is_told(docs: Path, row: dict[str, Any], problem: str) -> None:
    write_pdf(docs / "documents" / "a.pdf", RED, GREEN, BLUE)
    pdf = (docs / "good.pdf").read_bytes()
    (docs / "broken.pdf").write_bytes(pdf[: len(pdf) // 4])
    (docs / "empty.pdf").write_bytes(b"")
    assert b"/MediaBox [ 0 0 20.0 30.0 ]" in pdf
    (docs / "wide.pdf").write_bytes(pdf.replace(b"20.0 30.0", b"40000 40000"))
    write_jsonl(docs / "rows.jsonl", [row, question("good.pdf")])
    skipped = only(read("mmlongbench-doc", docs, max_pages=2))
    called = row.get("doc_id")
    assert skipped.row == (f"rows.jsonl:1 ({called})" if called else "rows.jsonl:1")
    assert problem in skipped.reason


OUTSIDE = [
    "../secret",
    "a/../../secret",
    "..\\secret",
    "/secret",
    "//host/secret",
    "C:\\secret",
    "c:secret",
    "..",
    ".",
    "a\0b",
]


@pytest.mark.parametrize("name", [*OUTSIDE, "absolute"])
def test_a_row_cannot_name_a_file_outside_the_folder(tmp_path: Path, name: str) -> None:
    """The files that the names lead to exist, so that only the refusal keeps them out."""
    folder = tmp_path / "data"
    (folder / "documents" / "a").mkdir(parents=True)
    (folder / "a").mkdir()
    write_pdf(tmp_path / "secret", RED)
    write_pdf(folder / "secret", RED)  # ../secret from documents/
    write_pdf(folder / "good.pdf", BLUE)
    name = str(tmp_path / "secret") if name == "absolute" else name
    write_jsonl(folder / "docs.jsonl", [question(name), question("good.pdf")])
    assert "is no path inside the data folder" in only(read("mmlongbench-doc", folder)).reason

    (tmp_path / "secret").write_bytes(png(RED))
    (folder / "docs.jsonl").unlink()
    write_jsonl(folder / "rows.jsonl", [standard("bad", image_1={"path": name}), standard("good")])
    assert "is no path inside the data folder" in only(read("mmmu-pro", folder)).reason


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x.png", "file:///etc/hostname", "data:;base64,AAAA"])
def test_a_path_is_no_address(tmp_path: Path, address: str) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [standard("bad", image_1={"path": address}), standard("good")])
    assert "no such file" in only(read("mmmu-pro", tmp_path)).reason


def test_a_damaged_parquet_file_is_told_and_the_next_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", [standard("good")])
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:-100])
    skipped = only(read("mmmu-pro", tmp_path))
    assert skipped == Skipped("a.parquet", "cannot be read as parquet after row 0, it is damaged or cut short", True)


@pytest.mark.parametrize(("text", "problem"), [("[{", "not JSON"), ("{}", "holds no list of rows")])
def test_a_damaged_samples_file_is_told(docs: Path, text: str, problem: str) -> None:
    (docs / "samples.json").write_text(text)
    assert read("mmlongbench-doc", docs) == [Skipped("samples.json", problem, True)]


# What a caller gets wrong


def refusal(*given: Any, **more: Any) -> str:
    """Refused before anything is read."""
    with pytest.raises(ConfigError) as caught:
        dataset_trials(*given, **more)
    return str(caught.value)


def test_unknown_names_are_refused(docs: Path) -> None:
    write_jsonl(docs / "rows.jsonl", [question()])
    assert list(DATASETS) == ["mmmu-pro", "mmlongbench-doc"]
    assert refusal("mmmu", docs, None, None, None) == "unknown dataset 'mmmu'; known are mmmu-pro, mmlongbench-doc"
    assert "unknown change 'legend'; known are none, system," in refusal(
        "mmmu-pro", docs, None, ["none", "legend"], None
    )
    assert "unknown family 'int'" in refusal("mmlongbench-doc", docs, None, None, ["int"])


@pytest.mark.parametrize("name", ["items", "max_pages", "dpi"])
def test_numbers_below_one_are_refused(docs: Path, name: str) -> None:
    write_jsonl(docs / "rows.jsonl", [question()])
    given = {"items": None, "changes": None, "families": None} | {name: 0}
    assert f"{name}: 0 is too few" in refusal("mmlongbench-doc", docs, **given)


def test_a_place_without_data_is_refused(tmp_path: Path) -> None:
    assert f"no such data folder: {tmp_path / 'absent'}" in refusal("mmmu-pro", tmp_path / "absent", None, None, None)
    (tmp_path / "rows.csv").touch()
    assert "rows.csv is no data file" in refusal("mmmu-pro", tmp_path / "rows.csv", None, None, None)
    nothing = refusal("mmmu-pro", tmp_path, None, None, None)
    assert nothing.startswith(f"no *.parquet, *.jsonl, samples.json in {tmp_path}; ")
    write_parquet(tmp_path / "vision" / "test.parquet", [vision("a")])
    assert refusal("mmmu-pro", tmp_path, None, None, None).endswith("give one of its folders: vision")


def test_a_change_given_twice_is_one(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [standard("a")])
    assert len(read("mmmu-pro", tmp_path, changes=["turn", "turn"])) == 1
