"""Two published benchmarks, read from local files, as trials.

- MMMU-Pro (arXiv:2409.02813): multiple choice about up to seven pictures that stand in the text.
- MMLongBench-Doc (arXiv:2407.01523): questions about a PDF of many pages.

Rows are read in order, and every change of a row but "question" is captured in the same prompt, the row's own:

    system A | pictures and question                                            none, system, turn, picture
    system A | an earlier row's question | pictures                             question

A change that needs another picture or another question takes it from the last earlier row that has one: the pages of
one document, asked about again, are no other picture. The first row has no earlier one and goes without these changes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from vlcache.bench.grading import FORMATS, choice_of, is_answer, python_list
from vlcache.bench.rows import Library, Row, Skipped, UnusableRow, find_files, read_rows
from vlcache.bench.trials import Trial, chosen
from vlcache.errors import ConfigError, MediaError

__all__ = ["DATASETS", "REAL_CHANGES", "Dataset", "Skipped", "dataset_trials"]

REAL_CHANGES = ("none", "system", "turn", "picture", "question")
"""What differs between the prompt in which a row's pictures are captured and the one in which they are reused."""

_SYSTEM = "You answer questions about the pictures that you are shown."
_OTHER_SYSTEM = "You are the reading assistant of a small office. Look closely and keep your answers short."
_TALK = ("Good morning. I have something to show you.", "Good morning. Go ahead, I am ready.")
_SHOWN = ("This one is only for later, remember it.", "I will remember it.")
_LETTER_ONLY = "Reply with nothing but the letter of the right option."
_LETTER_OF_PICTURE = "The picture shows a question and its options. " + _LETTER_ONLY
_SHORT = (
    "Reply with the answer alone, as short as you can. Write several items as ['one', 'two']. "
    "If the pages do not tell, write: Not answerable"
)

# Earlier rows' first pictures and questions that are kept, to find one that is not the row's own
_EARLIER = 4
_NO_PICTURE = {"bytes": None, "path": None}

Message = dict[str, Any]
Part = str | Image.Image


@dataclass(frozen=True, slots=True)
class _Item:
    """A row that can be asked.

    Attributes
    ----------
    name, family, answer : str
    parts : list of str or PIL.Image.Image
        The user's turn, with the pictures in their places.
    pictures : list of PIL.Image.Image
        Those of the turn, in order.
    text : str
        The turn without them; it calls them by their number.
    grade : callable
    """

    name: str
    family: str
    answer: str
    parts: list[Part]
    pictures: list[Image.Image]
    text: str
    grade: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Dataset:
    """How one benchmark's rows are read.

    Attributes
    ----------
    family : str
        The column with a row's family.
    families : tuple of str
        All there are; empty where only the rows tell.
    item : callable
        Makes of a row what can be asked.
    """

    family: str
    families: tuple[str, ...]
    item: Callable[[Row, Library], _Item]


def dataset_trials(
    name: str,
    data: Path,
    items: int | None,
    changes: Sequence[str] | None,
    families: Sequence[str] | None,
    *,
    max_pages: int = 120,
    dpi: int = 144,
) -> Iterator[Trial | Skipped]:
    """The trials of a benchmark's rows, in order.

    Parameters
    ----------
    name : str
        Key of `DATASETS`.
    data : Path
        Folder or file, as published.
    items : int, optional
        Most rows that are asked; all without it. Skipped ones do not count.
    changes : sequence of str, optional
        Of `REAL_CHANGES`; all without it.
    families : sequence of str, optional
        Subjects (MMMU-Pro) or answer formats (MMLongBench-Doc); other rows are passed over.
    max_pages : int
        Most pages shown of a document: the first, or a window that ends at the last evidence page.
    dpi : int
        Resolution of pages; the published evaluation draws them at 144.

    Yields
    ------
    Trial or Skipped
        A row that cannot be asked is told, and the next one is read.

    Raises
    ------
    ConfigError
        Unknown names, numbers below 1, or no data there; before anything is read.
    """
    dataset = DATASETS[chosen([name], tuple(DATASETS), "dataset")[0]]
    wanted = chosen(changes, REAL_CHANGES, "change")
    if dataset.families:
        chosen(families, dataset.families, "family")
    for what, number in (("items", items), ("max_pages", max_pages), ("dpi", dpi)):
        if number is not None and number < 1:
            raise ConfigError(f"{what}: {number} is too few; give 1 or more")
    data = Path(data)
    files = find_files(data)
    library = Library(data if data.is_dir() else data.parent, max_pages, dpi)
    return _trials(_items(dataset, files, library, families), items, wanted)


def _items(
    dataset: Dataset, files: Sequence[Path], library: Library, families: Sequence[str] | None
) -> Iterator[_Item | Skipped]:
    names: set[str] = set()
    absent = dict.fromkeys(families or ())
    for row in read_rows(files):
        if isinstance(row, Skipped):
            yield row
            continue
        family = row.text(dataset.family)
        if families and family and family not in families:
            continue
        try:
            item = dataset.item(row, library)
            if item.name in names:
                raise UnusableRow("an earlier row has the same id")
        except (UnusableRow, MediaError) as error:
            called = row.text("id") or row.text("doc_id")
            yield Skipped(f"{row.place} ({called})" if called else row.place, str(error))
            continue
        names.add(item.name)
        absent.pop(item.family, None)
        yield item
    for family in absent:
        yield Skipped(", ".join(file.name for file in files), f"no row of family {family!r} can be asked")


def _trials(rows: Iterable[_Item | Skipped], items: int | None, changes: Sequence[str]) -> Iterator[Trial | Skipped]:
    pictures: deque[Image.Image] = deque(maxlen=_EARLIER)
    questions: deque[str] = deque(maxlen=_EARLIER)
    asked = 0
    for item in rows:
        if isinstance(item, Skipped):
            yield item
            continue
        picture = next((p for p in reversed(pictures) if not _among(p, item.pictures)), None)
        question = next((q for q in reversed(questions) if q != item.text), None)
        for change in changes:
            contexts = _contexts(item, change, picture, question)
            if contexts:
                yield Trial(f"{item.name}/{change}", item.family, change, *contexts, item.answer, item.grade)
        if not _among(item.pictures[0], pictures):
            pictures.append(item.pictures[0])
        questions.append(item.text)
        asked += 1
        if asked == items:  # here, before a document is drawn for nothing
            return


def _among(picture: Image.Image, pictures: Iterable[Image.Image]) -> bool:
    pixels = picture.tobytes()
    return any(p is picture or (p.size == picture.size and p.tobytes() == pixels) for p in pictures)


def _contexts(
    item: _Item, change: str, picture: Image.Image | None, question: str | None
) -> tuple[tuple[list[Message], ...], list[Message]] | None:
    """What is captured and what is asked; None where the row goes without the change."""
    system, turn = _said("system", _SYSTEM), _said("user", *item.parts)
    first = [system, turn]
    if change == "system":
        return (first,), [_said("system", _OTHER_SYSTEM), turn]
    if change == "turn":
        return (first,), [system, _said("user", _TALK[0]), _said("assistant", _TALK[1]), turn]
    if change == "picture":
        if picture is None:
            return None
        shown = _said("user", picture, _SHOWN[0])
        return ([system, shown], first), [system, shown, _said("assistant", _SHOWN[1]), turn]
    if change == "question":
        if question is None:  # also where questions stand in the pictures, so that all texts are the same
            return None
        return ([system, _said("user", question, *item.pictures)],), [system, _said("user", item.text, *item.pictures)]
    return (first,), first


def _said(role: str, *parts: Part) -> Message:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"role": role, "content": content}


_PLACEHOLDER = re.compile(r"<image\s*(\d{1,2})>")
_PICTURE_COLUMNS = {number: f"image_{number}" for number in range(1, 8)}


def _mmmu_pro(row: Row, library: Library) -> _Item:
    """Of the standard configurations, or of the vision one, whose rows have one picture and no question."""
    vision = "image" in row.values and not row.text("question")
    name, listed, answer, family = row.texts("id", "options", "answer", "subject")
    options = [str(option) for option in _literal_list(listed, "options")]
    if not 1 <= len(options) <= 26:
        raise UnusableRow(f"options: {len(options)} of them cannot be lettered")
    answer = answer.upper()
    letters = [chr(ord("A") + number) for number in range(len(options))]
    if answer not in letters:
        raise UnusableRow(f"answer {answer[:20]!r} is none of A to {letters[-1]}")
    columns = {1: "image"} if vision else _PICTURE_COLUMNS
    values = {number: row.values.get(column) for number, column in columns.items()}
    found = {number: value for number, value in values.items() if value not in (None, "", _NO_PICTURE)}
    if not found:
        raise UnusableRow("image: missing or empty" if vision else "image_1 to image_7: no picture in any of them")
    if vision:
        text = _LETTER_OF_PICTURE
    else:
        lettered = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
        text = "\n".join([*row.texts("question"), *lettered, _LETTER_ONLY])
    pictures = {number: library.picture(value, number) for number, value in _in_order(text, found).items()}
    return _Item(
        name,
        family,
        answer,
        _placed(text, pictures),
        list(pictures.values()),
        _PLACEHOLDER.sub(lambda named: _called(int(named[1]), pictures), text),
        lambda words: choice_of(words, options) == answer,
    )


def _in_order(text: str, found: dict[int, Any]) -> dict[int, Any]:
    """Pictures as they are shown: those that the text does not name in front, then by where they are named first.

    Raises
    ------
    UnusableRow
        A picture is named that is not there.
    """
    named = list(dict.fromkeys(map(int, _PLACEHOLDER.findall(text))))
    missing = [f"image_{number}" for number in named if number not in found]
    if missing:
        raise UnusableRow(f"{', '.join(missing)}: named in the text, but missing")
    return {number: found[number] for number in [*(n for n in found if n not in named), *named]}


def _placed(text: str, pictures: dict[int, Image.Image]) -> list[Part]:
    """Text and pictures, each picture once: where it is named first, or in front.

    Named again it is only called by its number. Were it shown again, its second copy would stand elsewhere than the
    captured one even where nothing differs between the prompts.
    """
    texts = _PLACEHOLDER.split(text)
    named = list(map(int, texts[1::2]))
    parts: list[Part] = [picture for number, picture in pictures.items() if number not in named]
    said = texts[0]
    for at, (number, after) in enumerate(zip(named, texts[2::2], strict=True)):
        if number in named[:at]:
            said += _called(number, pictures) + after
        else:
            parts += [said, pictures[number]]
            said = after
    return [part for part in [*parts, said] if not isinstance(part, str) or part.strip()]


def _called(number: int, pictures: dict[int, Image.Image]) -> str:
    return f"[picture {list(pictures).index(number) + 1}]"


def _mmlongbench_doc(row: Row, library: Library) -> _Item:
    document, question, answer, family = row.texts("doc_id", "question", "answer", "answer_format")
    if family not in FORMATS:
        raise UnusableRow(f"answer_format {family[:20]!r} is none of {', '.join(FORMATS)}")
    pages = library.pages(document, _evidence(row))
    text = f"{question}\n{_SHORT}"
    grade = partial(is_answer, answer=answer, answer_format=family)
    return _Item(f"{document}#{row.number}", family, answer, [*pages, text], pages, text, grade)


def _evidence(row: Row) -> list[int]:
    (listed,) = row.texts("evidence_pages")
    pages = _literal_list(listed, "evidence_pages")
    if not all(isinstance(page, int) for page in pages):
        raise UnusableRow(f"evidence_pages: {listed[:80]} are not page numbers")
    return pages


def _literal_list(text: str, column: str) -> list[Any]:
    """A list as Python writes it, which is how both benchmarks publish theirs."""
    found = python_list(text)
    if found is None:
        raise UnusableRow(f"{column}: {text[:80]!r} is not a list")
    return found


DATASETS: dict[str, Dataset] = {
    "mmmu-pro": Dataset("subject", (), _mmmu_pro),
    "mmlongbench-doc": Dataset("answer_format", FORMATS, _mmlongbench_doc),
}
"""The benchmarks that can be read, by name."""
