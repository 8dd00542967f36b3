"""Whether a model's words are the right answer, by rule: no second model reads them, and nothing is guessed.

The published evaluations do more than this. MMMU-Pro's takes a letter at random where it finds none, and
MMLongBench-Doc's has a large language model shorten the words before its rules see them. What is graded here is only
what was written, so scores are comparable between the arms of one run and not with published tables.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rapidfuzz.distance import Levenshtein

__all__ = ["FORMATS", "choice_of", "is_answer", "python_list"]

FORMATS = ("Str", "Int", "Float", "List", "None")
"""What MMLongBench-Doc says of an answer."""

_BARE = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_LEADING = re.compile(r"[\s*(\[\"]*([A-Z])(?:[.,:;)\]*\"]|\s+[-–—]|\s*\n)")
_ANNOUNCED = re.compile(r"\b(?:answer|option|choice)\b(?:\s+is\b)?\s*:?", re.IGNORECASE)
_BRACKETED = re.compile(r"\(([A-Z])\)")


def choice_of(words: str, options: Sequence[str]) -> str | None:
    """The letter of the option that a model's words choose.

    In this order: a letter alone, an option's text alone, a letter in front ("C. text", "(C) text"), each sought first
    behind "answer is" and its like, from the last to the first; then the one letter in brackets; then the one option
    whose text is quoted exactly.

    Parameters
    ----------
    words : str
    options : sequence of str
        Their letters are A, B, ...

    Returns
    -------
    str or None
        None where the words choose no option, or more than one.
    """
    texts = {chr(ord("A") + number): _normal(option) for number, option in enumerate(options)}
    behind = [words[found.end() :] for found in _ANNOUNCED.finditer(words)]
    for said in (*reversed(behind), words):
        letter = _alone(said, texts)
        if letter in texts:
            return letter
    bracketed = set(_BRACKETED.findall(words)) & set(texts)
    return bracketed.pop() if len(bracketed) == 1 else _quoted(words, texts)


def _alone(said: str, texts: dict[str, str]) -> str | None:
    if bare := _BARE.fullmatch(said):
        return bare[1].upper()
    whole = _normal(said)
    same = [letter for letter, text in texts.items() if text and text == whole]
    if len(same) == 1:
        return same[0]
    leading = _LEADING.match(said)
    return leading[1] if leading else None


def _quoted(words: str, texts: dict[str, str]) -> str | None:
    whole = _normal(words)
    found = {
        letter: text
        for letter, text in texts.items()
        if len(text) > 1 and re.search(rf"(?<![\w.,+−-]){re.escape(text)}(?!\w|[.,]\d)", whole)
    }
    # "low" is not what "low conflict" quotes
    longest = [a for a, text in found.items() if not any(text != other and text in other for other in found.values())]
    return longest[0] if len(longest) == 1 else None


# Shorter ones differ by a letter or two without meaning the same: male, female
_LONG_CHARACTERS = 8
_NEAR = 0.5
_FLOAT_TOLERANCE = 0.01

_MONTH = (
    "(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?)"
)
_TO_THE_LETTER = re.compile(
    rf"""[^a-z]*\d[^a-z]*                               # numbers, telephone numbers, 2015-2016, 10:30
    |\S*[./@]\S*                                        # addresses, file names
    |pages?\s.*
    |.*\d\s*[ap]\.?m\b.*                                # 9 a.m.
    |(?=.*\d)(?:{_MONTH}|\d(?:st|nd|rd|th)?|[\s,./-])+  # May 2016, 3rd May
    """,
    re.VERBOSE,
)
_PREFIX = re.compile(r"^\W*(?:the\s+)?(?:final\s+|correct\s+|right\s+)?answer(?:\s+is\b|\s*:)[\s:*]*", re.IGNORECASE)
_UNANSWERABLE = re.compile(
    r"\b(?:not\s+answerable|unanswerable|no\s+(?:answer|information)"
    r"|(?:can\s?not|can't|could\s+not|couldn't)\s+(?:be\s+)?(?:answer|determin|find|found|tell|say)"
    r"|not\s+(?:mentioned|stated|given|specified|provided|shown|found|available)"
    r"|(?:do|does)(?:\s+not|n't)\s+(?:say|tell|mention|state|show|give|contain|provide|specify))",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?<![\w.,])([-−+]?)\s?[$€£]?\s?"
    r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?!\d|[.,]\d)(\s?(?:%|percent\b))?",
    re.IGNORECASE,
)


def is_answer(words: str, answer: str, answer_format: str) -> bool:
    """Whether a model's words give an answer of MMLongBench-Doc.

    The rules are ours. In the published evaluation a language model extracts a short answer first; here the words are
    taken as written, less an "Answer:" before them.

        Int     the one number in the words equals the answer
        Float   ... within 1 %; 18 % may be written 18 or 0.18, but of two bare numbers 0.18 is not 18
        Str     equal, but for case, spaces, quotes, $, % and a closing full stop; from 8 characters on it is enough
                that half of them agree (1 - edit distance / length) and all digits do, unless the answer looks like a
                number, date, time, address or file name
        List    as many items, each the same as above once both are sorted; written as a Python list, a line each, or
                between semicolons, commas, "and"
        None    the words say that there is no answer

    Parameters
    ----------
    words, answer : str
    answer_format : str
        One of `FORMATS`. A number that cannot be read as one is compared as Str; "Not answerable" is None.
    """
    said = _PREFIX.sub("", words.replace("’", "'")).strip()
    if answer_format == "None" or _normal(answer) == "not answerable":
        return bool(_UNANSWERABLE.search(said))
    if answer_format == "List":
        right = sorted(map(_value, python_list(answer) or [answer]))
        return any(_same_items(items, right) for items in _lists(said))
    number = _number(answer) if answer_format in ("Int", "Float") else None
    if number is None:
        return _same_text(_value(said), _value(answer))
    mine = _number(said)
    if mine is None:
        return False
    return mine.value == number.value if answer_format == "Int" else mine.near(number)


@dataclass(frozen=True, slots=True)
class _Number:
    value: float
    percent: bool

    def near(self, right: _Number) -> bool:
        mine, theirs = self.value, right.value
        if self.percent != right.percent and _within(mine / 100 if self.percent else mine * 100, theirs):
            return True
        return _within(mine, theirs)


def _within(mine: float, right: float) -> bool:
    return abs(mine - right) <= _FLOAT_TOLERANCE * abs(right)


def _number(text: str) -> _Number | None:
    """The only number of a text; None where it has none, or several."""
    found = {
        _Number(float(digits.replace(",", "")) * (-1 if sign in ("-", "−") else 1), bool(percent))
        for sign, digits, percent in _NUMBER.findall(text)
    }
    return found.pop() if len(found) == 1 else None


def _same_text(mine: str, right: str) -> bool:
    if mine == right:
        return True
    if len(right) < _LONG_CHARACTERS or _TO_THE_LETTER.fullmatch(right):
        return False
    same_digits = re.sub(r"\D", "", mine) == re.sub(r"\D", "", right)
    return same_digits and Levenshtein.normalized_similarity(mine, right) >= _NEAR


def _same_items(items: list[Any], right: list[str]) -> bool:
    mine = sorted(map(_value, items))
    return len(mine) == len(right) and all(map(_same_text, mine, right))


def _lists(said: str) -> Iterator[list[Any]]:
    """What the words are as a list, in every way that they may be read."""
    if listed := python_list(said):
        yield listed
    bare = said.removeprefix("[").removesuffix("]")
    for between in (r"\n", r";", r",", r",|\band\b"):
        items = [re.sub(r"^\s*(?:[-*•]|\d+[.)]|and\b)\s", "", item).strip() for item in re.split(between, bare)]
        yield [item for item in items if item]


def python_list(text: str) -> list[Any] | None:
    """The list that a text spells as Python does; None where it spells none."""
    if not text.strip().startswith("["):
        return None
    try:
        return list(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _normal(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    return " ".join(text.split()).strip(" \"'`*").rstrip(" .\"'`*")


def _value(text: object) -> str:
    return _normal(str(text)).strip(" $€£%")
