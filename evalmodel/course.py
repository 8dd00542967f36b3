"""Which lessons come next: harder ones later, families that fail more often."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any

from evalmodel.lessons import Lesson, make_lesson
from evalmodel.questions import FAMILIES, Size, generator

__all__ = ["Course"]


class Course:
    """Chooses lessons by how they went so far.

    Attributes
    ----------
    right, hinted : dict of deque of float
        Shares of a family's answers that were right, and of the hints of a kind and family that were followed, in
        their latest lessons.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.right: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))
        self.hinted: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))

    def lessons(self, step: int, tokenizer: Any, tokens: int) -> list[Lesson]:
        """Lessons of similar length, `tokens` in all with padding."""
        rng = generator("train", self._seed, step)
        most = 4 if step < 150 else 6
        tight = 0.9 if step < 350 else 0.6 if step < 1200 else 0.2
        open_now = [f for f in FAMILIES if step >= (80 if f in ("compare", "legend", "two_hop") else 0)]
        weights = [1.03 - min(1.0, self.mean(family)) for family in open_now]
        pool = []
        for _ in range(12):
            size = Size(most, rng.random() < tight)
            family = rng.choices(open_now, weights)[0]
            asked = 3 if family == "question_first" else rng.randint(5, 9)
            pool.append(make_lesson(family, tokenizer, rng, size, asked))
        pool.sort(key=lambda lesson: len(lesson.ids))
        start = rng.randrange(len(pool))
        chosen = pool[start:] + pool[:start][::-1]
        some: list[Lesson] = []
        for lesson in chosen:
            if some and max(len(lesson.ids), *(len(s.ids) for s in some)) * (len(some) + 1) > tokens:
                break
            some.append(lesson)
        return some

    def mean(self, family: str) -> float:
        return _mean(self.right[family])

    def means(self) -> dict[str, Any]:
        """For the log: what was right, by family, and `hinted`, what was followed, by kind and family."""
        hinted = {about: round(_mean(seen), 3) for about, seen in self.hinted.items()}
        return {"hinted": hinted} | {family: round(self.mean(family), 3) for family in FAMILIES}

    def note(self, families: list[str], right: list[float], hinted: dict[str, list[float]]) -> None:
        """How lessons went, see `learner.Learnt`."""
        for family, share in zip(families, right, strict=True):
            self.right[family].append(share)
        for about, shares in hinted.items():
            self.hinted[about].extend(shares)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "right": {family: list(seen) for family, seen in self.right.items()},
            "hinted": {about: list(seen) for about, seen in self.hinted.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        for mine, its in ((self.right, state["right"]), (self.hinted, state["hinted"])):
            for key, seen in its.items():
                mine[key].extend(seen)


def _mean(shares: Collection[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0
