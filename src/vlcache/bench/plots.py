"""Accuracy lost against computed share, as PNG and SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vlcache.bench.tally import ALL, Row

__all__ = ["plot_pareto"]


def plot_pareto(rows: Sequence[Row], folder: Path) -> list[Path]:
    """One panel per change, pooled over its families: a point per policy, policies of one rule joined.

    Returns
    -------
    list of Path
        `pareto.png` and `pareto.svg`.
    """
    changes = list(dict.fromkeys(row.change for row in rows if row.family == ALL and row.change != ALL))
    columns = min(4, len(changes))
    lines = -(-len(changes) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.9 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for axis in axes.flat[len(changes) :]:
        axis.set_visible(False)
    for axis, change in zip(axes.flat, changes, strict=False):
        mine = [row for row in rows if row.family == ALL and row.change == change]
        _panel(axis, mine)
        axis.set_title(f"{change} ({mine[0].items} items)", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy lost, points", fontsize=8)
    figure.supxlabel("computed share of the reused pictures, %", fontsize=8)
    axes.flat[0].legend(fontsize=7)
    paths = [folder / "pareto.png", folder / "pareto.svg"]
    for path in paths:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _panel(axis: Any, rows: Sequence[Row]) -> None:
    for rule, points in _by_rule(rows).items():
        points.sort(key=lambda row: row.computed_share)
        shares = [100 * row.computed_share for row in points]
        lost = [100 * row.lost for row in points]
        below = [100 * max(0.0, row.lost - row.lost_low) for row in points]
        above = [100 * max(0.0, row.lost_high - row.lost) for row in points]
        axis.errorbar(shares, lost, yerr=(below, above), marker="o", ms=4, lw=1, elinewidth=0.6, label=rule)
    axis.axhline(0, color="grey", lw=0.6)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks([0, 1, 2, 5, 10, 20, 50, 100], ["0", "1", "2", "5", "10", "20", "50", "100"])
    axis.tick_params(labelsize=7)


def _by_rule(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by rule; that of a rule with one row is its own, others run from `none` to `full`."""
    ends = [row for row in rows if row.policy in ("full", "none")]
    rules: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row not in ends:
            name, _, numbers = row.policy.partition(":")
            least = numbers.partition(",")[2] if name == "prefix" else ""
            rules[f"{name}, at least {least}" if least else name].append(row)
    joined = {rule: [*ends, *points] if len(points) > 1 else points for rule, points in rules.items()}
    return joined if any(len(points) > 1 for points in joined.values()) else joined | {"none, full": ends}
