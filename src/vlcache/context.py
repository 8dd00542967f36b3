"""What stands before a picture, as far as it decides whether what was read into the picture still holds.

    <system> ... <end> <user> Which tile is red? [picture] ... <end> <assistant> ... <end> <user> The key: [picture] And now? [picture]
                              ----------------                                             ---------------------------
                              turn of the first picture                                    turn of the last picture

Text of the picture's own turn, and pictures in it, say what to see in the picture; a picture keeps what it was read for.
Pictures of earlier turns may. Text of other turns (a system prompt, earlier talk) hardly does. A rule asks first which of
these differ between the prompt in which a picture was captured and the one in which it is reused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vlcache.keys import digest
from vlcache.types import Context, Span

__all__ = ["Changed", "compare", "contexts"]

Changed = Literal["text", "pictures", "turn"]
"""What differs before a picture, the gravest of it: at most text of other turns, pictures of earlier turns, or what stands
before it in its own turn."""


def contexts(ids: Tensor, spans: Sequence[Span], ends: Collection[int], scope: str) -> tuple[Context, ...]:
    """The context of every picture of a prompt.

    Parameters
    ----------
    ids : Tensor, int64, `[T]`
    spans : sequence of Span
        In order.
    ends : collection of int
        Tokens that end a turn. Without them the whole prompt is one turn, which is the cautious reading.
    scope : str
        Goes into the digests, so that those of one tenant say nothing to another.
    """
    tokens: list[int] = ids.tolist()
    found = []
    for number, span in enumerate(spans):
        turn = max((i for i in range(span.start) if tokens[i] in ends), default=-1) + 1
        before = [s for s in spans[:number] if s.start >= turn]
        pictures = [s.content for s in spans[: number - len(before)]]
        found.append(Context(digest("turn", scope, *_fields(tokens, before, turn, span.start)), digest(scope, *pictures)))
    return tuple(found)


def _fields(tokens: list[int], spans: Sequence[Span], start: int, stop: int) -> Iterator[str]:
    """Tokens `start` to `stop`, each picture as its digest."""
    for span in spans:
        yield from (" ".join(map(str, tokens[start : span.start])), span.content)
        start = span.stop
    yield " ".join(map(str, tokens[start:stop]))


def compare(captured: Context | None, here: Context) -> Changed:
    """What differs between two contexts of a picture; what is not known counts as the gravest."""
    if captured is None or captured.turn != here.turn:
        return "turn"
    return "text" if captured.pictures == here.pictures else "pictures"
