"""What the accuracy benchmark asks: prompts in which pictures are captured, and the prompt in which they are reused.

trial -> prefill every prompt of `captures` -> ask `asked` in full, and under each policy -> compare
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlcache.errors import ConfigError

__all__ = ["Trial", "chosen"]

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """One question, asked in a context other than the one its pictures' entries come from.

    Attributes
    ----------
    name : str
        Unique in a run.
    family : str
        Kind of the question.
    change : str
        What differs between the contexts.
    captures : tuple of list of dict
        Chats that are prefilled first; every picture of `asked` is in one of them.
    asked : list of dict
        The chat with the question.
    answer : str
        The right answer, for people.
    grade : callable
        Whether a model's words are a right answer.
    group : str
        Trials that follow each other with the same group are run together, on the captures of the first of them:
        what they capture and ask is the same up to the end of the last picture. Empty for one that is run alone.
    """

    name: str
    family: str
    change: str
    captures: tuple[list[Message], ...]
    asked: list[Message]
    answer: str
    grade: Callable[[str], bool]
    group: str = ""


def chosen(given: Sequence[str] | None, known: Sequence[str], what: str) -> list[str]:
    """`given`, checked against what there is; everything where nothing is given.

    Raises
    ------
    ConfigError
        One of them is unknown.
    """
    for name in given or ():
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; known are {', '.join(known)}")
    return list(dict.fromkeys(given or known))
