"""What rows should make the decoder think of: training's help for questions of more than one step.

A legend before a board makes each color mean an animal; a number in a table belongs to its row; a question before the
picture asks for this cell. Read off the cells themselves, two thirds through the layers, this gives every cell a lesson
where an answer gives one to a whole prompt, and early enough for the rows behind it. And who is asked what a tile means
should look at the tile: the row that answers thinks of its color first, and of what the tile's cell stands for.
"""

from __future__ import annotations

from typing import NamedTuple

from evalmodel.pictures import COLORS, Board, Drawn, Form, Table
from evalmodel.questions import ANIMALS, ROWS, Item, meanings

__all__ = ["KINDS", "WORDS", "Hint", "cell_hints", "tile_color"]

KINDS = ("means", "asked", "tile", "answer")
"""What a cell stands for; whether the question before the picture asks for it. Of a row that answers what a tile means:
the tile's color, and its meaning."""
WORDS = tuple(f" {word}" for word in (*ANIMALS, *ROWS, *COLORS, "yes", "no"))
"""All that hints are made of."""


class Hint(NamedTuple):
    """A cell (row by row), one of `KINDS` by place, and the word to think of."""

    cell: int
    kind: int
    word: str


def cell_hints(item: Item) -> list[list[Hint]]:
    """For each of an item's pictures."""
    known = meanings(item.before)
    found = []
    for picture in item.pictures:
        words = [word.strip() for row in picture.words for word in row]
        if isinstance(picture.content, Board):
            about = {cell: f" {known[word]}" for cell, word in enumerate(words) if word in known}
        else:
            about = _table(words, len(picture.words[0])) if isinstance(picture.content, Table) else {}
        found.append([Hint(cell, KINDS.index("means"), word) for cell, word in about.items()])
        if item.family == "question_first":
            asked = _asked(item.before, picture, words)
            found[-1] += [Hint(cell, KINDS.index("asked"), f" {'yes' if yes else 'no'}") for cell, yes in asked.items()]
        if item.family == "two_hop" and isinstance(picture.content, Form):
            known = dict(picture.content.fields)
    return found


def tile_color(item: Item, question: str) -> str:
    """The color of the tile whose meaning a question asks for; empty for other questions."""
    if not question.startswith("What does tile"):
        return ""
    (tiled,) = (p.content for p in item.pictures if isinstance(p.content, Board))
    letter = question.split()[3]
    return next(tile[0] for row in tiled.tiles for tile in row if tile[1] == letter)


def _table(words: list[str], width: int) -> dict[int, str]:
    found = {}
    for start in range(0, len(words), width):
        digits = [c for c in range(start, start + width) if words[c].isdigit()]
        for c in digits:
            # The row's name stands in front of its first column
            found[c] = f" {words[digits[0] - 3]}"
    return found


def _asked(question: str, picture: Drawn, words: list[str]) -> dict[int, bool]:
    """The cells that might be the answer, and which are. Questions are those of `questions.ask`."""
    named = question.rstrip("?").split()
    if isinstance(picture.content, Form):
        labels = [label for label, _ in picture.content.fields]
        # A value fills two cells
        values = {words.index(label) + step: label for label in labels for step in (1, 2)}
        return {cell: label == named[-1] for cell, label in values.items()}
    if isinstance(picture.content, Board):
        step = {"color": 2, "number": 1, "right": 3, "left": -3}
        cell = words.index(named[-1]) + next(step[word] for word in named if word in step)
    else:
        cell = words.index(named[-3], words.index(named[-1])) + 1
    return {c: c == cell for c, word in enumerate(words) if word and _kind(word) == _kind(words[cell])}


def _kind(word: str) -> str:
    return "digit" if word.isdigit() else "color" if word in COLORS else "letter" if len(word) == 1 else "word"
