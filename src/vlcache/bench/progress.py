"""How far a long run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress"]

_PLAIN_EVERY = 50


@contextmanager
def progress(console: Console, total: int | None, what: str = "trials") -> Iterator[Callable[[], object]]:
    """A function to call after each step."""
    if console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
        return
    done, start = 0, time.perf_counter()

    def step() -> None:
        nonlocal done
        done += 1
        if done % _PLAIN_EVERY == 0 or done == total:
            console.print(f"{done} of {total or '?'} {what}, {time.perf_counter() - start:.0f} s")

    yield step
