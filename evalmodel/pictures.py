"""Boards, tables and forms, drawn on a grid of 28 pixel cells: one cell is one vision token.

Each picture comes with the word that every cell shows, which is what the vision tower is first taught to read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

__all__ = ["BLANK", "CELL", "COLORS", "LETTERS", "Board", "Drawn", "Form", "Table", "draw"]

CELL = 28
"""Pixels a side of a vision token: patches of 14, merged 2 x 2."""

COLORS = {
    "red": (215, 40, 40),
    "green": (40, 150, 60),
    "blue": (45, 80, 210),
    "yellow": (240, 215, 40),
    "orange": (245, 140, 30),
    "purple": (130, 50, 160),
    "brown": (125, 80, 45),
    "black": (30, 30, 30),
}
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
BLANK = "\n"
"""The word of a cell that shows nothing."""

# Height and width in cells with their weights: 64 to 256 vision tokens, 224 to 448 pixels a side
_CANVASES = {
    (8, 8): 12,
    (8, 10): 3,
    (10, 8): 3,
    (9, 9): 3,
    (8, 12): 2,
    (12, 8): 2,
    (10, 12): 1,
    (16, 8): 1,
    (16, 16): 1,
}
_FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSansMono-Bold.ttf",
)


@dataclass(frozen=True, slots=True)
class Board:
    """Tiles in rows: a colour, a letter and a number each. Letters do not repeat."""

    tiles: tuple[tuple[tuple[str, str, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers under column headers and behind row names."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Labelled fields."""

    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A picture and what its cells show, row by row."""

    content: Board | Table | Form
    image: Image.Image
    words: tuple[tuple[str, ...], ...]


def draw(
    content: Board | Table | Form, rng: random.Random, tight: bool = False, canvas: tuple[int, int] | None = None
) -> Drawn:
    """Draw a content with a font, a place, shades and noise from `rng`.

    Parameters
    ----------
    content : Board, Table or Form
    rng : random.Random
    tight : bool
        On a canvas with a margin of a cell at most: fewer tokens to train on, below what the benchmark asks about.
    canvas : (int, int), optional
        Height and width in cells, instead of one from `rng`.
    """
    if isinstance(content, Board):
        need = (len(content.tiles), 3 * len(content.tiles[0]))
    elif isinstance(content, Table):
        need = (1 + len(content.rows), 2 + 2 * len(content.columns))
    else:
        need = (len(content.fields), 4)
    if canvas is not None:
        height, width = canvas
    elif tight:
        height, width = (n + rng.randint(0, 1) for n in need)
    else:
        fitting = {size: w for size, w in _CANVASES.items() if size[0] >= need[0] and size[1] >= need[1]}
        height, width = rng.choices(list(fitting), list(fitting.values()))[0]
    shade = rng.randint(228, 255)
    image = Image.new("RGB", (width * CELL, height * CELL), (shade, shade, rng.randint(shade - 12, shade)))
    words = [[BLANK] * width for _ in range(height)]
    pen = _Pen(ImageDraw.Draw(image), rng.choice(_FONTS), words, rng)
    # Lines stand close or a line apart
    pitch = rng.choice((1, 2)) if height >= 2 * need[0] - 1 else 1
    top, left = rng.randint(0, height - (need[0] - 1) * pitch - 1), rng.randint(0, width - need[1])
    if isinstance(content, Board):
        _board(pen, content, top, left, pitch)
    elif isinstance(content, Table):
        _table(pen, content, top, left, pitch)
    else:
        _form(pen, content, top, left, pitch)
    return Drawn(content, _noisy(image, rng), tuple(tuple(row) for row in words))


@dataclass(frozen=True, slots=True)
class _Pen:
    draw: ImageDraw.ImageDraw
    font: str
    words: list[list[str]]
    rng: random.Random

    def write(self, text: str, left: int, top: int, size: int, fill: tuple[int, int, int]) -> None:
        """Text from the left edge of a field of two cells, as large as `size` allows and the field holds."""
        while size > 8 and _font(self.font, size).getlength(text) > 2 * CELL - 5:
            size -= 1
        x = left * CELL + 3 + self.rng.randint(-1, 1)
        y = (top + 0.5) * CELL + self.rng.randint(-2, 2)
        self.draw.text((x, y), text, fill=fill, font=_font(self.font, size), anchor="lm")


def _board(pen: _Pen, board: Board, top: int, left: int, pitch: int) -> None:
    """Tiles of three cells: letter, number, and nothing but the color."""
    for r, row in enumerate(board.tiles):
        for c, (color, letter, number) in enumerate(row):
            y, x = top + r * pitch, left + 3 * c
            shade = tuple(max(0, min(255, v + pen.rng.randint(-14, 14))) for v in COLORS[color])
            box = (x * CELL + 1, y * CELL + 1, (x + 3) * CELL - 2, (y + 1) * CELL - 2)
            pen.draw.rectangle(box, fill=shade, outline=(90, 90, 90))
            ink = "black" if color in ("yellow", "orange") else "white"
            for at, text in enumerate((letter, str(number))):
                middle = ((x + at + 0.5) * CELL + pen.rng.randint(-1, 1), (y + 0.5) * CELL + pen.rng.randint(-1, 1))
                font = _font(pen.font, pen.rng.randint(19, 23))
                pen.draw.text(middle, text, fill=ink, font=font, anchor="mm")
            pen.words[y][x : x + 3] = [f" {letter}", str(number), f" {color}"]


def _table(pen: _Pen, table: Table, top: int, left: int, pitch: int) -> None:
    size = pen.rng.randint(13, 16)
    for c, name in enumerate(table.columns, 1):
        pen.write(name, left + 2 * c, top, size, (20, 20, 20))
        pen.words[top][left + 2 * c] = f" {name}"
    lines = pen.rng.random() < 0.6
    for r, name in enumerate(table.rows, 1):
        y = top + r * pitch
        if lines:
            end = left + 2 * (1 + len(table.columns))
            pen.draw.line((left * CELL, y * CELL, end * CELL, y * CELL), fill=(150, 150, 150))
        pen.write(name, left, y, size, (20, 20, 20))
        pen.words[y][left] = f" {name}"
        for c, value in enumerate(table.values[r - 1], 1):
            pen.write(str(value), left + 2 * c + 1, y, size + 3, (20, 20, 20))
            # The cell in front of a value names its column
            pen.words[y][left + 2 * c : left + 2 * c + 2] = [f" {table.columns[c - 1]}", str(value)]


def _form(pen: _Pen, form: Form, top: int, left: int, pitch: int) -> None:
    size = pen.rng.randint(13, 16)
    boxed = pen.rng.random() < 0.5
    for r, (label, value) in enumerate(form.fields):
        y = top + r * pitch
        pen.write(f"{label}:", left, y, size, (60, 60, 60))
        if boxed:
            box = ((left + 2) * CELL + 1, y * CELL + 1, (left + 4) * CELL - 1, (y + 1) * CELL - 2)
            pen.draw.rectangle(box, outline=(150, 150, 150))
        pen.write(value, left + 2, y, size, (10, 10, 80))
        # The cell behind a label names its value
        pen.words[y][left : left + 3] = [f" {label}", f" {value}", f" {value}"]


def _noisy(image: Image.Image, rng: random.Random) -> Image.Image:
    noise = np.random.default_rng(rng.getrandbits(32))
    pixels = np.asarray(image, dtype=np.float32)
    noisy = pixels + noise.normal(0, rng.uniform(0, 8), pixels.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


@lru_cache(maxsize=256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)
