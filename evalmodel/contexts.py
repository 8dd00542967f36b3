"""What may stand before an item in a prompt, and the pairs of prompts that differ in one thing.

A message's pictures are PIL images in the form that chat templates take.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evalmodel.pictures import Board, Drawn, Form, Table, draw
from evalmodel.questions import Item, ask, board, form, table

__all__ = [
    "CHANGES",
    "DEFAULT_SYSTEM",
    "SYSTEMS",
    "TALK",
    "Pair",
    "assistant",
    "changes_of",
    "distraction",
    "make_pair",
    "prompt",
    "talk",
    "user",
]

DEFAULT_SYSTEM = "You are a helpful assistant."
SYSTEMS = (
    DEFAULT_SYSTEM,
    "Answer with one word.",
    "You read pictures.",
    "You are a careful observer who never guesses.",
    "You work in an office and read pages all day.",
    "Be brief, be right.",
    "You help people who cannot see the picture. Say only what is asked for.",
    "You are Mia, a friendly guide.",
)
TALK = (
    ("Hello!", "Hello, how can I help?"),
    ("Are you ready?", "Yes, go on."),
    ("I have a question about a picture.", "Please show it."),
    ("Thank you for your help yesterday.", "You are welcome."),
    ("What can you do?", "I can read boards, tables and forms."),
    ("Please be quick today, I have a train to catch.", "Of course."),
)
CHANGES = ("none", "system", "turn", "picture", "swapped", "question", "legend")
"""What differs between the prompt in which a picture is captured and the one in which it is reused."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """An item in two contexts.

    Attributes
    ----------
    item : Item
    change : str
    captures : tuple of list of dict
        Chats that are prefilled first, so that every picture of `asked` is known.
    asked : list of dict
        The chat with the question, in the other context.
    """

    item: Item
    change: str
    captures: tuple[list[Message], ...]
    asked: list[Message]


def changes_of(family: str) -> tuple[str, ...]:
    """The changes that mean something to a family."""
    more = {"compare": ("swapped",), "two_hop": ("swapped",), "question_first": ("question",), "legend": ("legend",)}
    return ("none", "system", "turn", "picture", *more.get(family, ()))


def user(text_before: str, pictures: Sequence[Drawn], text: str) -> Message:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text_before}] if text_before else []
    parts += [{"type": "image", "image": picture.image} for picture in pictures]
    parts += [{"type": "text", "text": text}] if text else []
    return {"role": "user", "content": parts}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def prompt(item: Item, system: str, turns: Sequence[Message] = ()) -> list[Message]:
    """An item's question behind a system prompt and earlier turns."""
    return [_system(system), *turns, user(item.before, item.pictures, item.question)]


def _system(text: str) -> Message:
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def talk(rng: random.Random) -> list[Message]:
    said, answered = rng.choice(TALK)
    return [user("", (), said), assistant(answered)]


def distraction(item: Item, rng: random.Random, tight: bool = False) -> tuple[Drawn, str, str]:
    """A picture of another kind than the item's, a question about it, and the answer."""
    kinds = {type(p.content) for p in item.pictures}
    makers = [m for kind, m in _MAKERS.items() if kind not in kinds]
    content = rng.choice(makers)(rng)
    question, answer = ask(content, rng)
    return draw(content, rng, tight), question, answer


_Make = Callable[[random.Random], Board | Table | Form]
_MAKERS: dict[type, _Make] = {Board: lambda rng: board(rng, 6), Table: table, Form: form}


def make_pair(item: Item, change: str, rng: random.Random) -> Pair:
    """An item's prompts before and after one change."""
    if change not in CHANGES:
        raise ValueError(f"change {change!r} is none of {', '.join(CHANGES)}")
    system, other = rng.sample(SYSTEMS, 2)
    first = asked = prompt(item, system)
    if change == "system":
        first = prompt(item, other)
    elif change == "turn":
        asked = prompt(item, system, talk(rng))
    elif change == "picture":
        picture, question, answer = distraction(item, rng)
        shown = user("", (picture,), question)
        asked = prompt(item, system, [shown, assistant(answer)])
        return Pair(item, change, ([_system(DEFAULT_SYSTEM), shown], first), asked)
    elif change == "swapped":
        first = prompt(replace(item, pictures=item.pictures[::-1]), system)
    elif change in ("question", "legend"):
        first = prompt(replace(item, before=item.other), system)
    return Pair(item, change, (first,), asked)
