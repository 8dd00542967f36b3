"""The pictures and questions of the trained model: drawn from a seed, answered rightly, as large as promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evalmodel import pictures
from evalmodel.contexts import CHANGES, changes_of, make_pair
from evalmodel.pictures import CELL, COLORS, Board, Drawn, Form, Table
from evalmodel.questions import ASKED_AGAIN, FAMILIES, Item, Size, another, follow_up, generator, make_item
from evalmodel.weights import merge, pack, unpack

SOME = range(20)


def items(family: str, split: str = "test") -> list[Item]:
    return [make_item(family, generator(split, 0, family, number)) for number in SOME]


def tiles(picture: Drawn) -> dict[str, tuple[int, int, str, int]]:
    """Row, column, color and number of each letter's tile."""
    assert isinstance(picture.content, Board)
    rows = enumerate(picture.content.tiles)
    return {t[1]: (r, c, t[0], t[2]) for r, row in rows for c, t in enumerate(row)}


def answer(question: str, pictures: tuple[Drawn, ...], before: str) -> str:
    """The answer by a reading of the question that shares nothing with the code that wrote it."""
    words = question.rstrip("?.").split()
    board = next((p for p in pictures if isinstance(p.content, Board)), None)
    if question.startswith("What color is tile"):
        return tiles(board)[words[-1]][2]
    if question.startswith("What number is on tile"):
        return str(tiles(board)[words[-1]][3])
    if question.startswith("Is tile"):
        return "yes" if all(words[2] in tiles(picture) for picture in pictures) else "no"
    if question.startswith("Which tile is in both"):
        (shared,) = set(tiles(pictures[0])) & set(tiles(pictures[1]))
        return shared
    if question.startswith("Which tile is"):
        row, column, *_ = tiles(board)[words[-1]]
        wanted = (row, column + (1 if words[3] == "right" else -1))
        return next(letter for letter, tile in tiles(board).items() if tile[:2] == wanted)
    if question.startswith("Is any tile"):
        return "yes" if any(tile[2] == words[-1] for tile in tiles(board).values()) else "no"
    if question.startswith("What does tile"):
        color = tiles(board)[words[3]][2]
        forms = [p.content for p in pictures if isinstance(p.content, Form)]
        if forms:
            return next(value for label, value in forms[0].fields if label == color)
        words = before.rstrip(".").replace(",", "").split()
        return words[words.index(color) + 1]
    content = pictures[0].content
    if isinstance(content, Table):
        return str(content.values[content.rows.index(words[-1])][content.columns.index(words[3])])
    assert isinstance(content, Form)
    return next(value for label, value in content.fields if label == words[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_right(family: str) -> None:
    for item in items(family):
        question = item.question or item.before
        assert item.answer == answer(question, item.pictures, item.before)
        more, its_answer = follow_up(item, generator("test", 1, family))
        assert its_answer == answer(more, item.pictures, item.before)


@pytest.mark.parametrize("family", ASKED_AGAIN)
def test_another_question_is_of_the_same_kind_about_the_same_pictures(family: str) -> None:
    for item in items(family):
        more = another(item, generator("test", 2, family))
        assert more.pictures is item.pictures
        assert (more.family, more.before, more.other) == (item.family, item.before, item.other)
        assert more.question != item.question
        assert more.question.split()[:2] == item.question.split()[:2] or family == "lookup"
        assert more.answer == answer(more.question, more.pictures, more.before)
        if family == "legend":
            assert answer(more.question, more.pictures, more.other) != more.answer


def test_one_question_only_where_it_stands_before_the_picture() -> None:
    assert set(FAMILIES) - set(ASKED_AGAIN) == {"compare", "question_first"}
    for family in ("compare", "question_first"):
        with pytest.raises(ValueError, match=family):
            another(items(family)[0], generator("test", 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_as_large_as_promised(family: str) -> None:
    for item in items(family):
        for picture in item.pictures:
            rows, columns = len(picture.words), len(picture.words[0])
            assert picture.image.size == (columns * CELL, rows * CELL)
            assert 64 <= rows * columns <= 256
            assert all(224 <= side <= 448 for side in picture.image.size)


def test_canvases_and_fonts_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    fonts: set[str] = set()
    own = pictures._font
    monkeypatch.setattr(pictures, "_font", lambda name, size: (fonts.add(name), own(name, size))[1])
    drawn = [p for family in FAMILIES for item in items(family) for p in item.pictures]
    assert len({p.image.size for p in drawn}) >= 6
    assert len(fonts) >= 5


def test_a_seed_gives_the_same_picture_and_splits_differ() -> None:
    seen: dict[bytes, str] = {}
    for split in ("train", "calibration", "test"):
        for first, second in zip(items("lookup", split), items("lookup", split), strict=True):
            assert first.pictures[0].image.tobytes() == second.pictures[0].image.tobytes()
            assert (first.question, first.answer) == (second.question, second.answer)
            assert seen.setdefault(first.pictures[0].image.tobytes(), split) == split
    assert len(seen) == 3 * len(SOME)


def test_what_changes_before_the_picture_changes_the_answer_where_it_must() -> None:
    for item in items("legend"):
        other = answer(item.question, item.pictures, item.other)
        assert other != item.answer
        assert set(item.other.rstrip(".").replace(",", "").split()[1::2]) <= set(COLORS)
    for item in items("question_first"):
        assert answer(item.other, item.pictures, "") != item.answer
        assert not item.question


def texts(chat: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for message in chat for part in message["content"] if part["type"] == "text"]


def images(chat: list[dict[str, Any]]) -> list[bytes]:
    return [part["image"].tobytes() for message in chat for part in message["content"] if part["type"] == "image"]


@pytest.mark.parametrize(("family", "change"), [(f, c) for f in FAMILIES for c in changes_of(f)])
def test_contexts_differ_in_what_they_say_they_do(family: str, change: str) -> None:
    item = items(family)[0]
    pair = make_pair(item, change, generator("test", 0, family, change))
    *others, first = pair.captures
    captured = [image for chat in pair.captures for image in images(chat)]
    assert set(images(pair.asked)) <= set(captured)
    assert images(pair.asked)[-len(item.pictures) :] == [p.image.tobytes() for p in item.pictures]
    same_words, same_pictures = texts(first) == texts(pair.asked), images(first) == images(pair.asked)
    assert same_words == (change in ("none", "swapped"))
    assert same_pictures == (change not in ("picture", "swapped"))
    assert len(others) == (change == "picture")
    if change == "swapped":
        assert images(first) == images(pair.asked)[::-1]
    if change in ("question", "legend"):
        assert item.other in texts(first)
        assert item.before in texts(pair.asked)


def test_every_change_means_something_to_a_family() -> None:
    assert {change for family in FAMILIES for change in changes_of(family)} == set(CHANGES)
    with pytest.raises(ValueError, match="upside-down"):
        make_pair(items("lookup")[0], "upside-down", generator("test", 0))


def test_boards_grow_with_their_size_and_tight_ones_save_tokens() -> None:
    def largest(size: Size) -> tuple[int, int]:
        drawn = [make_item("lookup", generator("train", 0, n), size).pictures[0] for n in SOME]
        return max(len(tiles(p)) for p in drawn), max(len(p.words) * len(p.words[0]) for p in drawn)

    assert largest(Size(4, tight=True)) == (4, 21)
    assert largest(Size(9))[0] in (8, 9)
    assert largest(Size(9))[1] > 64


def test_what_ships_is_the_trained_model() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 6)
    model = torch.nn.ModuleDict({"layer": layer, "tower": torch.nn.Linear(8, 8)})
    down, up = torch.randn(2, 8), torch.randn(6, 2)
    tower = torch.randn(8, 8)
    trained = {
        "layer.lora_A.default.weight": down,
        "layer.lora_B.default.weight": up,
        "tower.weight": tower,
        "tower.bias": torch.ones(8),
    }
    packed = pack(trained, scaling=2.0)
    matrices = {name: value.dtype for name, value in packed.items() if not name.endswith(".scale")}
    assert matrices == dict.fromkeys(["layer.down", "layer.up", "tower.weight"], torch.int8) | {
        "tower.bias": torch.bfloat16
    }
    back = unpack(packed, scaling=2.0)
    assert set(back) == set(trained)
    for name, value in trained.items():
        torch.testing.assert_close(back[name], value, atol=0.02, rtol=0.01)
    expected = layer.weight.detach() + 2 * up @ down
    merge(model, packed)
    torch.testing.assert_close(layer.weight.detach(), expected, atol=0.1, rtol=0.02)
    torch.testing.assert_close(model["tower"].weight.detach(), tower, atol=0.02, rtol=0.01)
    assert bool((model["tower"].bias == 1).all())
