"""What is asked about the pictures, by family. Every answer is one short word."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from evalmodel.pictures import COLORS, LETTERS, Board, Drawn, Form, Table, draw

__all__ = [
    "ASKED_AGAIN",
    "FAMILIES",
    "Item",
    "Size",
    "another",
    "ask",
    "board",
    "follow_up",
    "form",
    "generator",
    "make_item",
    "meanings",
    "table",
]

ANIMALS = ("cat", "dog", "fish", "bird", "horse", "lion", "wolf")
ROWS = ("apple", "milk", "bread", "rice", "salt", "corn", "soup", "meat")
_COLUMNS = ("price", "size", "count", "year", "rank", "age", "weight")
_FIELDS = {
    "name": ("Anna", "Tom", "Mary", "John", "Sam", "Paul", "Jack"),
    "city": ("Paris", "London", "Rome", "Boston"),
    "color": tuple(color for color in COLORS if color != "black"),  # too like blue in small print
    "pet": ANIMALS,
    "food": ROWS,
    "day": ("Monday", "Friday", "Sunday"),
}


@dataclass(frozen=True, slots=True)
class Item:
    """A question about pictures.

    Attributes
    ----------
    family : str
    before : str
        Text of the same turn that stands before the pictures.
    other : str
        What may stand there instead: another legend, another question. Its answer may be another.
    pictures : tuple of Drawn
    question : str
        Text behind the pictures; may be empty.
    answer : str
    """

    family: str
    before: str
    other: str
    pictures: tuple[Drawn, ...]
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Size:
    """How hard: tiles on a board at most, and whether canvases are tight."""

    largest: int = 6
    tight: bool = False


def generator(split: str, seed: int | str, *which: object) -> random.Random:
    """Random numbers of one item. Splits (`train`, `calibration`, `test`) and seeds share none."""
    return random.Random("/".join(map(str, (split, seed, *which))))


def make_item(family: str, rng: random.Random, size: Size = Size()) -> Item:
    """An item of a family, as large as `size` says."""
    return FAMILIES[family](rng, size)


def board(rng: random.Random, largest: int, letters: str = LETTERS, colors: int = 8, smallest: int = 4) -> Board:
    shapes = [(r, c) for r in range(2, 5) for c in range(2, 5) if smallest <= r * c <= largest]
    rows, columns = rng.choice(shapes)
    names = rng.sample(letters, rows * columns)
    palette = rng.sample(list(COLORS), colors)
    tiles = [(rng.choice(palette), name, rng.randint(1, 9)) for name in names]
    return Board(tuple(tuple(tiles[r * columns : (r + 1) * columns]) for r in range(rows)))


def _tiles(content: Board) -> list[tuple[str, str, int]]:
    return [tile for row in content.tiles for tile in row]


def ask_lookup(content: Board, rng: random.Random) -> tuple[str, str]:
    color, letter, number = rng.choice(_tiles(content))
    if rng.random() < 0.6:
        return f"What color is tile {letter}?", color
    return f"What number is on tile {letter}?", str(number)


def ask_neighbour(content: Board, rng: random.Random) -> tuple[str, str]:
    names = [[tile[1] for tile in row] for row in content.tiles]
    pairs = [("right of", row[c], row[c + 1]) for row in names for c in range(len(row) - 1)]
    pairs += [("left of", row[c + 1], row[c]) for row in names for c in range(len(row) - 1)]
    where, tile, answer = rng.choice(pairs)
    return f"Which tile is {where} {tile}?", answer


def ask_presence(content: Board, rng: random.Random) -> tuple[str, str]:
    present = sorted({tile[0] for tile in _tiles(content)})
    absent = [color for color in COLORS if color not in present]
    answer = rng.choice(("yes", "no"))
    return f"Is any tile {rng.choice(present if answer == 'yes' else absent)}?", answer


def ask_table(content: Table, rng: random.Random) -> tuple[str, str]:
    r, c = rng.randrange(len(content.rows)), rng.randrange(len(content.columns))
    return f"What is the {content.columns[c]} of {content.rows[r]}?", str(content.values[r][c])


def ask_form(content: Form, rng: random.Random) -> tuple[str, str]:
    label, value = rng.choice(content.fields)
    return f"What is the {label}?", value


def ask(content: Board | Table | Form, rng: random.Random) -> tuple[str, str]:
    """Any question about a picture that needs nothing else."""
    if isinstance(content, Board):
        return rng.choice((ask_lookup, ask_lookup, ask_neighbour))(content, rng)
    return ask_table(content, rng) if isinstance(content, Table) else ask_form(content, rng)


def table(rng: random.Random) -> Table:
    columns = rng.sample(_COLUMNS, rng.choice((2, 3)))
    rows = rng.sample(ROWS, rng.choice((2, 3)))
    return Table(tuple(columns), tuple(rows), tuple(tuple(rng.randint(1, 9) for _ in columns) for _ in rows))


def form(rng: random.Random) -> Form:
    labels = rng.sample(list(_FIELDS), rng.choice((3, 4)))
    return Form(tuple((label, rng.choice(_FIELDS[label])) for label in labels))


def _about(
    family: str, content: Board | Table | Form, question: tuple[str, str], rng: random.Random, size: Size
) -> Item:
    return Item(family, "", "", (draw(content, rng, size.tight),), *question)


def _lookup(rng: random.Random, size: Size) -> Item:
    content = board(rng, size.largest)
    return _about("lookup", content, ask_lookup(content, rng), rng, size)


def _neighbour(rng: random.Random, size: Size) -> Item:
    content = board(rng, size.largest)
    return _about("neighbour", content, ask_neighbour(content, rng), rng, size)


def _presence(rng: random.Random, size: Size) -> Item:
    content = board(rng, size.largest, colors=3)
    return _about("presence", content, ask_presence(content, rng), rng, size)


def _table(rng: random.Random, size: Size) -> Item:
    content = table(rng)
    return _about("table", content, ask_table(content, rng), rng, size)


def _form(rng: random.Random, size: Size) -> Item:
    content = form(rng)
    return _about("form", content, ask_form(content, rng), rng, size)


def _question_first(rng: random.Random, size: Size) -> Item:
    content = rng.choice((board, board, lambda r, _: table(r), lambda r, _: form(r)))(rng, size.largest)
    question, answer = ask(content, rng)
    other, its_answer = question, answer
    while its_answer == answer:
        other, its_answer = ask(content, rng)
    return Item("question_first", question, other, (draw(content, rng, size.tight),), "", answer)


def _legend_text(meaning: dict[str, str]) -> str:
    return "Legend: " + ", ".join(f"{color} {animal}" for color, animal in meaning.items()) + "."


def meanings(text: str) -> dict[str, str]:
    """Animals by color, as a legend says; empty for any other text."""
    if not text.startswith("Legend: "):
        return {}
    parts = [part.split() for part in text.removeprefix("Legend: ").rstrip(".").split(", ")]
    return {part[0]: part[1] for part in parts}


def _legend(rng: random.Random, size: Size) -> Item:
    content = board(rng, size.largest, colors=rng.choice((2, 3)))
    color, letter, _ = rng.choice(_tiles(content))
    colors = sorted({tile[0] for tile in _tiles(content)})
    rng.shuffle(colors)
    first, second = (dict(zip(colors, rng.sample(ANIMALS, len(colors)), strict=True)) for _ in range(2))
    while any(second[c] == first[c] for c in colors):
        second = dict(zip(colors, rng.sample(ANIMALS, len(colors)), strict=True))
    picture = (draw(content, rng, size.tight),)
    question = f"What does tile {letter} mean?"
    return Item("legend", _legend_text(first), _legend_text(second), picture, question, first[color])


def _compare(rng: random.Random, size: Size) -> Item:
    letters = "".join(rng.sample(LETTERS, len(LETTERS)))
    first = board(rng, size.largest, letters[:12])
    shared = rng.choice(_tiles(first))[1]
    second = board(rng, size.largest, letters[12:])
    tiles = [list(row) for row in second.tiles]
    row = rng.choice(tiles)
    at = rng.randrange(len(row))
    row[at] = (row[at][0], shared, row[at][2])
    second = Board(tuple(map(tuple, tiles)))
    return Item(
        "compare",
        "",
        "",
        (draw(first, rng, size.tight), draw(second, rng, size.tight)),
        "Which tile is in both pictures?",
        shared,
    )


def _two_hop(rng: random.Random, size: Size) -> Item:
    content = board(rng, size.largest, colors=rng.choice((2, 3)))
    color, letter, _ = rng.choice(_tiles(content))
    colors = sorted({tile[0] for tile in _tiles(content)})
    rng.shuffle(colors)
    key = Form(tuple(zip(colors, rng.sample(ANIMALS, len(colors)), strict=True)))
    pictures = (draw(key, rng, size.tight), draw(content, rng, size.tight))
    return Item("two_hop", "", "", pictures, f"What does tile {letter} mean?", dict(key.fields)[color])


FAMILIES: dict[str, Callable[[random.Random, Size], Item]] = {
    "lookup": _lookup,
    "neighbour": _neighbour,
    "presence": _presence,
    "table": _table,
    "form": _form,
    "compare": _compare,
    "legend": _legend,
    "question_first": _question_first,
    "two_hop": _two_hop,
}


_ASK: dict[str, Callable[[Any, random.Random], tuple[str, str]]] = {
    "lookup": ask_lookup,
    "neighbour": ask_neighbour,
    "presence": ask_presence,
    "table": ask_table,
    "form": ask_form,
}
ASKED_AGAIN = (*_ASK, "legend", "two_hop")
"""Families of which `another` asks one more question about the same pictures."""


def another(item: Item, rng: random.Random) -> Item:
    """Another question of the item's own family about its pictures, in the same place."""
    if item.family not in ASKED_AGAIN:
        raise ValueError(f"{item.family}: its pictures have one question only")
    while True:
        asks = _ASK.get(item.family)
        question, answer = asks(item.pictures[0].content, rng) if asks else follow_up(item, rng)
        if question != item.question:
            return replace(item, question=question, answer=answer)


def follow_up(item: Item, rng: random.Random) -> tuple[str, str]:
    """Another question about an item's pictures, and its answer."""
    if item.family in ("legend", "two_hop"):
        contents = [p.content for p in item.pictures]
        (tiled,) = (c for c in contents if isinstance(c, Board))
        meaning = dict(next((c.fields for c in contents if isinstance(c, Form)), ())) or meanings(item.before)
        color, letter, _ = rng.choice(_tiles(tiled))
        return f"What does tile {letter} mean?", meaning[color]
    if item.family == "compare":
        first, second = ([tile[1] for tile in _tiles(p.content)] for p in item.pictures if isinstance(p.content, Board))
        letter = item.answer if rng.random() < 0.5 else rng.choice([*first, *second])
        return f"Is tile {letter} in both pictures?", "yes" if letter == item.answer else "no"
    content = item.pictures[0].content
    if item.family == "presence" and isinstance(content, Board):
        return ask_presence(content, rng)
    return ask(content, rng)
