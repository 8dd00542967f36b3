"""What stands before a picture, as far as it decides whether what was read into the picture still holds.

    <system> ... <end> <user> Which is red? [picture] ... <end> <user> The key: [picture] [picture]
                              -------------                            ------------------
                              turn of the first picture                turn of the last one

Text of the picture's own turn, and pictures in it, say what to see in the picture, and a picture keeps what it was
read for. Pictures of earlier turns may say so too. Text of other turns (a system prompt, earlier talk) hardly does. A
rule asks first which of these differ between the prompt in which a picture was captured and the one in which it is
reused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from vlcache.keys import digest
from vlcache.types import Context, Span

__all__ = ["Changed", "TurnMarks", "compare", "contexts", "find_marks"]

Changed = Literal["text", "turn", "pictures", "neighbours"]
"""What differs before a picture, the gravest of it: at most text of other turns; text of its own turn as well; pictures
of earlier turns; pictures of its own turn."""


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """How turns are told apart in a prompt.

    Attributes
    ----------
    ends : frozenset of int
        Tokens that end one. Without them the whole prompt is one turn, which is the cautious reading.
    blanks : frozenset of int
        Tokens of the empty space between turns: whether it is there depends on whether a turn stands before.
    """

    ends: frozenset[int] = frozenset()
    blanks: frozenset[int] = frozenset()


def find_marks(
    may_end: Collection[int], write: Callable[[list[dict[str, Any]]], str], encode: Callable[[str], Sequence[int]]
) -> TurnMarks:
    """How a chat template separates messages.

    Parameters
    ----------
    may_end : collection of int
        Tokens that end a text somewhere; those that the template writes itself are its marks.
    write : callable
        The template's text of a chat.
    encode : callable
        The tokens of a text.
    """
    chat = [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant", "user")]
    try:
        written = encode(write(chat))
    except Exception:  # no template, or one that wants another chat: all is one turn
        return TurnMarks()
    blanks = encode("\n")
    return TurnMarks(frozenset(set(may_end) & set(written)), frozenset(blanks if len(blanks) == 1 else ()))


def contexts(ids: Tensor, spans: Sequence[Span], marks: TurnMarks, scope: str) -> tuple[Context, ...]:
    """The context of every picture of a prompt.

    Parameters
    ----------
    ids : Tensor, int64, `[T]`
    spans : sequence of Span
        In order.
    marks : TurnMarks
    scope : str
        Goes into the digests, so that those of one tenant say nothing to another.
    """
    tokens: list[int] = ids.tolist()
    found = []
    for number, span in enumerate(spans):
        start = max((i for i in range(span.start) if tokens[i] in marks.ends), default=-1) + 1
        while start < span.start and tokens[start] in marks.blanks:
            start += 1
        earlier = [s for s in spans[:number] if s.start < start]
        neighbours = spans[len(earlier) : number]
        vision = {s.start: s.stop for s in neighbours}
        inside = {i for first, stop in vision.items() for i in range(first, stop)}
        text = [
            "picture" if i in vision else str(tokens[i])
            for i in range(start, span.start)
            if i not in inside or i in vision
        ]
        context = Context(
            turn=digest("turn", scope, *text),
            neighbours=digest("neighbours", scope, *(s.content for s in neighbours)),
            pictures=digest("pictures", scope, *(s.content for s in earlier)),
        )
        found.append(context)
    return tuple(found)


def compare(captured: Context | None, here: Context) -> Changed:
    """What differs between two contexts of a picture; what is not known counts as the gravest."""
    if captured is None or captured.neighbours != here.neighbours:
        return "neighbours"
    if captured.pictures != here.pictures:
        return "pictures"
    return "text" if captured.turn == here.turn else "turn"
