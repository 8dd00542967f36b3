"""The project's own model, and what is asked of it: `evalmodel` as the command line and the benchmark use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vlcache.bench.trials import Trial, chosen
from vlcache.errors import VLCacheError

__all__ = ["NAME", "find_model", "tileworld_plan", "tileworld_trial"]

NAME = "tileworld"
"""What `--model` calls it."""


def find_model(model: str, say: Callable[[str], object]) -> Path:
    """The directory of a checkpoint that is given by its path, or of tileworld, assembled where it is not yet.

    Raises
    ------
    VLCacheError
        tileworld cannot be assembled: its decoder cannot be fetched, or a package is missing.
    """
    if model != NAME:
        return Path(model)
    try:
        from evalmodel.weights import checkpoint

        return checkpoint(say)
    except (RuntimeError, OSError, ImportError, ValueError) as error:
        raise VLCacheError(f"model {NAME}: {error}; or give --model the directory of a checkpoint") from error


def tileworld_plan(
    items: int, families: Sequence[str] | None = None, changes: Sequence[str] | None = None
) -> Iterator[tuple[str, str, int]]:
    """Family, change and number of `items` questions a family, their pictures dealt evenly to its changes.

    Raises
    ------
    ConfigError
        An unknown family or change.
    """
    from evalmodel.contexts import CHANGES, changes_of
    from evalmodel.questions import FAMILIES

    wanted = chosen(changes, CHANGES, "change")
    for family in chosen(families, tuple(FAMILIES), "family"):
        mine = [change for change in changes_of(family) if change in wanted]
        for number in range(items if mine else 0):
            yield family, mine[_shown(family, number)[0] % len(mine)], number


def tileworld_trial(split: str, seed: int, family: str, change: str, number: int) -> Trial:
    """A question drawn from its split, seed, family and number, under a change."""
    from evalmodel.contexts import make_pair
    from evalmodel.questions import another, generator, make_item

    shown, again = _shown(family, number)
    item = make_item(family, generator(split, seed, family, shown))
    if again:
        item = another(item, generator(split, seed, family, shown, "again"))
    pair = make_pair(item, change, generator(split, seed, family, shown, change))
    right = item.answer.lower()
    return Trial(
        name=f"{family}/{number}/{change}",
        family=family,
        change=change,
        captures=pair.captures,
        asked=pair.asked,
        answer=item.answer,
        grade=lambda words: words.strip().lower() == right,
        group=f"{family}/{shown}/{change}",
    )


def _shown(family: str, number: int) -> tuple[int, int]:
    """Which pictures a question is about, and whether it is their second: most families ask two about the same."""
    from evalmodel.questions import ASKED_AGAIN

    return divmod(number, 2) if family in ASKED_AGAIN else (number, 0)
