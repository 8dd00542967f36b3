"""The training log as a curve: `python -m evalmodel.curve LOG.jsonl CURVE.svg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from evalmodel.questions import FAMILIES

__all__ = ["plot"]


def plot(log: Path, target: Path) -> None:
    """Reading in the first stage, loss and answers by family in the second; runs that went on follow each other."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    tower = [row for row in rows if row["stage"] == "tower"]
    answers = [row for row in rows if row["stage"] == "answers"]
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _line(left, range(len(tower)), [row["read"] for row in tower], "cells read right")
    left.set_xlabel("tower: log rows, 20 steps each")
    _line(middle, [row["step"] for row in answers], [row["loss"] for row in answers], "loss")
    middle.set_xlabel("answers: step")
    for family in FAMILIES:
        seen = [row for row in answers if row.get(family, 0) > 0]
        _line(right, [row["step"] for row in seen], [row[family] for row in seen], family)
    right.set_xlabel("answers: step")
    right.set_title("share of answer tokens right, latest lessons", fontsize=8)
    for axis in (left, middle, right):
        axis.legend(fontsize=6)
        axis.tick_params(labelsize=7)
    figure.savefig(target, metadata={"Date": None})


def _line(axis: Any, x: Any, y: Any, label: str) -> None:
    axis.plot(list(x), list(y), lw=1, label=label)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
