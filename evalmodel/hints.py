"""What a cell of a picture should make the decoder think of: training's help for questions of more than one step.

A legend before a board makes each color mean an animal; a number in a table belongs to its row; a color has been seen
so often. Predicted at the cells themselves, as if it were the next word, this gives every cell a lesson where an answer
gives one to a whole prompt.
"""

from __future__ import annotations

from collections import Counter

from evalmodel.pictures import COLORS, Board, Drawn, Form, Table
from evalmodel.questions import Item, meanings

__all__ = ["hints"]


def hints(item: Item) -> list[dict[int, str]]:
    """For each of an item's pictures, words by cell (row by row)."""
    known = meanings(item.before)
    found = []
    for picture in item.pictures:
        if isinstance(picture.content, Board):
            found.append(_board(picture, known))
        else:
            found.append(_table(picture) if isinstance(picture.content, Table) else {})
        if item.family == "two_hop" and isinstance(picture.content, Form):
            known = dict(picture.content.fields)
    return found


def _board(picture: Drawn, known: dict[str, str]) -> dict[int, str]:
    words = [word.strip() for row in picture.words for word in row]
    seen: Counter[str] = Counter()
    found = {}
    for cell, word in enumerate(words):
        if word in COLORS:
            seen[word] += 1
            found[cell] = f" {known[word]}" if known else str(seen[word])
    return found


def _table(picture: Drawn) -> dict[int, str]:
    found = {}
    width = len(picture.words[0])
    for r, row in enumerate(picture.words):
        digits = [c for c, word in enumerate(row) if word.isdigit()]
        for c in digits:
            # The row's name stands in front of its first column
            found[r * width + c] = row[digits[0] - 3]
    return found
