"""The rows of a data folder's files, and the pictures and document pages that they name.

    parquet | JSONL | samples.json -> row -> pictures of its columns, or pages of its document

A fault of one row is told and the next one is read; a fault of the whole folder raises. A row's file names are taken
for files inside the folder only. Links that lie there are followed, since download caches are made of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from PIL import Image

from vlcache.config import Config
from vlcache.errors import ConfigError, MediaError
from vlcache.media import open_picture

__all__ = ["Library", "Row", "Skipped", "UnusableRow", "find_files", "read_rows"]

_KINDS = ("*.parquet", "*.jsonl", "samples.json")
# Rows held at once; one of MMMU-Pro has up to seven pictures
_BATCH_ROWS = 8
_POINTS_PER_INCH = 72


class UnusableRow(Exception):  # noqa: N818 - it never leaves the benchmark
    """A row that cannot be asked; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row, or a whole file, that is left out.

    Attributes
    ----------
    row : str
        File, number of the row from 1, and its id where it has one.
    reason : str
        What is missing or wrong.
    whole_file : bool
        Not one row, but all that a file would have had, or the rest of it.
    """

    row: str
    reason: str
    whole_file: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """What one line of a file says.

    Attributes
    ----------
    place : str
        File and number of the row in it, from 1.
    number : int
        Number of the row in all files, from 1.
    values : dict
        By column.
    """

    place: str
    number: int
    values: dict[str, Any]

    def text(self, column: str) -> str:
        """What stands in a column, as text; empty where nothing does."""
        value = self.values.get(column)
        return "" if value is None else str(value).strip()

    def texts(self, *columns: str) -> list[str]:
        """What stands in these columns, as text.

        Raises
        ------
        UnusableRow
            Some of them are missing or empty.
        """
        found = [self.text(column) for column in columns]
        missing = [column for column, text in zip(columns, found, strict=True) if not text]
        if missing:
            raise UnusableRow(f"{', '.join(missing)}: missing or empty")
        return found


def find_files(data: Path) -> list[Path]:
    """The files with rows in a folder: parquet, else JSONL, else samples.json; in the folder, else in its `data`.

    Raises
    ------
    ConfigError
        There is none.
    """
    if data.is_file():
        if data.suffix in (".parquet", ".jsonl", ".json"):
            return [data]
        raise ConfigError(f"{data} is no data file; give .parquet, .jsonl or .json, or the folder that holds them")
    if not data.is_dir():
        raise ConfigError(f"no such data folder: {data}; download the data set and give its folder")
    for folder in (data, data / "data"):
        for kind in _KINDS:
            if files := sorted(path for path in folder.glob(kind) if path.is_file()):
                return files
    within = sorted({path.parent.name for path in data.glob("*/*.parquet")})
    remedy = f"give one of its folders: {', '.join(within)}" if within else "give the folder that holds the rows"
    raise ConfigError(f"no {', '.join(_KINDS)} in {data}; {remedy}")


def read_rows(files: Sequence[Path]) -> Iterator[Row | Skipped]:
    """Every row of the files, a few in memory at a time (of a .json file, all)."""
    readers = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _json}
    number = 0
    for file in files:
        try:
            for line, found in readers[file.suffix](file):
                number += 1
                place = f"{file.name}:{line}" if line else file.name
                if isinstance(found, dict):
                    yield Row(place, number, found)
                else:
                    problem = found if isinstance(found, UnusableRow) else f"a {type(found).__name__} is not a row"
                    yield Skipped(place, str(problem), whole_file=not line)
        except OSError as error:
            yield Skipped(file.name, f"cannot be read ({error.strerror or 'damaged'})", whole_file=True)


# Each yields a row's number and its columns, or an UnusableRow for it; number 0 is the whole file


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"{file.name} needs pyarrow; pip install pyarrow, or give JSONL") from None
    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, ValueError, pyarrow.ArrowException):
        yield 0, UnusableRow(f"cannot be read as parquet after row {number}, it is damaged or cut short")


def _jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _loads(line)


def _json(file: Path) -> Iterator[tuple[int, Any]]:
    found = _loads(file.read_bytes())
    if isinstance(found, list):
        yield from enumerate(found, 1)
    else:
        yield 0, found if isinstance(found, UnusableRow) else UnusableRow("holds no list of rows")


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return UnusableRow("not JSON")


class Library:
    """The pictures and documents of one data folder; the pages of the last document are kept.

    Parameters
    ----------
    folder : Path
    max_pages : int
        Most pages of a document.
    dpi : int
        Resolution at which they are drawn.
    """

    def __init__(self, folder: Path, max_pages: int, dpi: int) -> None:
        self._folder = folder
        self._most = max_pages
        self._dpi = dpi
        self._max_pixels = Config().max_image_pixels
        self._document: Path | None = None
        self._pages: dict[int, Image.Image] = {}

    def picture(self, value: Any, number: int) -> Image.Image:
        """A picture column's picture.

        Parameters
        ----------
        value : mapping or str
            `{"bytes": ..., "path": ...}`, bytes going first, as base64 where they are text; or a path.
        number : int
            For messages.

        Returns
        -------
        PIL.Image.Image
            RGB, upright.

        Raises
        ------
        UnusableRow, MediaError
            Nothing there, a path out of the folder, or not a picture.
        """
        if isinstance(value, str):
            value = {"path": value}
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (None, None)
        if isinstance(data, str):
            data = f"data:;base64,{data}"
        if data is None:
            if not isinstance(path, str):
                raise UnusableRow(f"picture {number} has neither bytes nor a path")
            data = _inside(self._folder, path)
        return open_picture(data, number).decode(self._max_pixels)

    def pages(self, name: str, evidence: Sequence[int]) -> list[Image.Image]:
        """A document's pages, drawn.

        Of one that is longer than `max_pages` these are the first, or, where an evidence page lies beyond, those up to
        the last evidence page.

        Parameters
        ----------
        name : str
            A PDF in `documents/` or in the folder itself.
        evidence : sequence of int
            Pages from 1 that must be among them; those that the document does not have are passed over.

        Returns
        -------
        list of PIL.Image.Image
            RGB. They are shared with later calls: treat as read only.

        Raises
        ------
        UnusableRow, MediaError
            No such document, not a PDF, a page over the pixel limit, or evidence further apart than `max_pages`.
        """
        try:
            from pypdfium2 import PdfDocument, PdfiumError
        except ImportError:
            raise ConfigError(f"{name} needs pypdfium2; pip install pypdfium2") from None
        path = self._find(name)
        kept = self._pages if path == self._document else {}
        self._document, self._pages = None, {}
        try:
            with PdfDocument(path) as document:
                window = _window(len(document), evidence, self._most)
                pages = {n: kept[n] if n in kept else self._draw(document[n], n + 1) for n in window}
        except (PdfiumError, ValueError):
            raise UnusableRow(f"{name[:80]} cannot be read as a PDF, it is damaged or locked") from None
        self._document, self._pages = path, pages
        return list(pages.values())

    def _find(self, name: str) -> Path:
        for folder in (self._folder / "documents", self._folder):
            path = _inside(folder, name)
            if os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
                return path
        raise UnusableRow(f"no document {name[:80]!r} in the data folder or its documents/")

    def _draw(self, page: Any, number: int) -> Image.Image:
        scale = self._dpi / _POINTS_PER_INCH
        width, height = (side * scale for side in page.get_size())
        if width * height > self._max_pixels:  # before memory is taken for it
            problem = f"{width:.0f}x{height:.0f} pixels are over the limit of {self._max_pixels}"
            raise MediaError(f"page {number}", problem, "lower dpi")
        drawn = open_picture(page.render(scale=scale).to_pil(), number).decode(self._max_pixels)
        page.close()
        return drawn


def _window(total: int, evidence: Sequence[int], most: int) -> range:
    """Page numbers, from 0: `[0, most)`, or `[last - most, last)` where the last evidence page is beyond."""
    if not total:
        raise UnusableRow("the document has no pages")
    there = [page for page in evidence if 1 <= page <= total]
    first, last = min(there, default=1), max(there, default=1)
    if last - first >= most:
        raise UnusableRow(f"evidence on pages {first} to {last} is further apart than max_pages ({most})")
    stop = max(last, min(total, most))
    return range(max(0, stop - most), stop)


def _inside(folder: Path, name: str) -> Path:
    path = PureWindowsPath(name)  # knows both slashes
    if not path.parts or path.anchor or ".." in path.parts or "\0" in name:
        raise UnusableRow(f"{name[:80]!r} is no path inside the data folder")
    return folder / name
