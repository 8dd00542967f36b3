"""Several processes at one place, putting and getting at random."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Collection
from typing import Any

from entries import make_entry

from vlcache.store import Store

__all__ = ["hammer"]


def hammer(
    open_one: Callable[[], Store],
    value_of: Callable[[Any, int], float | None],
    seconds: float,
    tolerated: Collection[str] = (),
) -> None:
    """Four processes, each with a store of its own; an entry may be missing, wrong it may not be.

    Parameters
    ----------
    value_of : callable
        What a picture's entry holds throughout, None where there is none.
    tolerated : collection of str
        Faults that may be counted.
    """
    fork = multiprocessing.get_context("fork")
    results: Any = fork.Queue()
    until = time.time() + seconds

    def work(seed: int) -> None:
        try:
            results.put((*_work(open_one(), value_of, seed, until, tolerated), ""))
        except BaseException as error:
            results.put((0, 0, f"{type(error).__name__}: {error}"))
            raise

    workers = [fork.Process(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    outcomes = [results.get(timeout=seconds + 60) for _ in workers]
    for worker in workers:
        worker.join()
    assert [error for _, _, error in outcomes] == [""] * 4
    turns, hits = (sum(outcome[i] for outcome in outcomes) for i in (0, 1))
    print(f"{turns} turns, {hits} hits in {seconds:g} s")


def _work(
    store: Store, value_of: Callable[[Any, int], float | None], seed: int, until: float, tolerated: Collection[str]
) -> tuple[int, int]:
    """Turns and hits."""
    rng, turns = random.Random(seed), 0
    while time.time() < until:
        number = rng.randrange(16)
        if rng.random() < 0.4:
            assert store.put(make_entry(number))
        else:
            assert value_of(store, number) in (number, None)
        turns += 1
    stats = store.stats()
    assert set(stats.faults) <= set(tolerated), stats.faults
    assert stats.hits > 0
    assert stats.held_bytes <= stats.capacity_bytes
    store.close()
    return turns, stats.hits
