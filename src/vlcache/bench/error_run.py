"""One run of `vlcache bench error`: pairs in, a plot, what it shows in words, and a JSON row out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console

from vlcache.bench.asking import Asker
from vlcache.bench.error import ORDERS, SHARES, Errors, measure
from vlcache.bench.machine import describe_run
from vlcache.bench.progress import progress
from vlcache.bench.tileworld import tileworld_plan, tileworld_trial
from vlcache.errors import ConfigError

__all__ = ["Settings", "run"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes
    ----------
    items : int
        Pairs for each change.
    changes : tuple of str
        Of tileworld's test split.
    seed, max_new_tokens : int
    """

    items: int = 8
    changes: tuple[str, ...] = ("system", "turn", "question", "legend")
    seed: int = 0
    max_new_tokens: int = 16


def run(settings: Settings, model: Any, processor: Any, out: Path, console: Console) -> dict[str, Any]:
    """Run, write `out` (a plot and the figures), say what they show; the row of JSON."""
    trials = []
    for change in settings.changes:
        drawn = list(tileworld_plan(settings.items, None, (change,)))
        step = max(1, len(drawn) // settings.items)  # over all families that the change means something to
        trials += [tileworld_trial("test", settings.seed, *which) for which in drawn[::step][: settings.items]]
    found: list[Errors] = []
    with Asker(model, processor, settings.max_new_tokens) as asker, progress(console, len(trials), "pairs") as step_on:
        for trial in trials:
            found.append(measure(asker, trial, settings.seed))
            step_on()
    if not found:
        raise ConfigError("no pair was measured; check --changes")
    by_change = {change: _mean([one for one in found if one.change == change]) for change in settings.changes}
    out.mkdir(parents=True, exist_ok=True)
    for path in _plot(by_change, out):
        console.print(f"wrote {path}", markup=False)
    result = {
        "changes": {change: _to_dict(errors) for change, errors in by_change.items()},
        **describe_run(str(model.device)),
    }
    (out / "errors.json").write_text(json.dumps(asdict(settings) | result, indent=1) + "\n")
    for change, errors in by_change.items():
        console.print(_sentence(change, errors), markup=False)
    return result


def _mean(some: Sequence[Errors]) -> Errors:
    def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(tensors)).mean(0)

    return Errors(
        some[0].change,
        mean([one.own for one in some]),
        mean([one.handed_on for one in some]),
        {order: mean([one.total[order] for one in some]) for order in ORDERS},
        {order: mean([one.kl[order] for one in some]) for order in ORDERS},
        mean([one.by_layer for one in some]),
    )


def _area(curve: torch.Tensor) -> float:
    """Under a curve over the computed share, as a share of a curve that stays at its start."""
    start = float(curve[0])
    return float(torch.trapezoid(curve, torch.tensor(SHARES))) / start if start else 0.0


def _sentence(change: str, errors: Errors) -> str:
    handed, own = errors.handed_on, errors.own
    areas = {order: _area(errors.total[order]) for order in ORDERS}
    best = min(areas, key=lambda order: areas[order])
    first = float(handed[0] / handed.sum()) if float(handed.sum()) else 0.0
    return (
        f"{change}: the first eighth of a picture hands on {first:.0%} of what all of it does (evenly: 12 %) and is "
        f"off by {float(own[0] / own.mean()):.1f} times the mean itself; least error is left by repairing "
        f"{'from the ' if best in ('front', 'back') else 'by ' if best == 'deviation' else 'at '}{best} "
        f"(area under the curve: {', '.join(f'{order} {area:.2f}' for order, area in areas.items())})"
    )


def _to_dict(errors: Errors) -> dict[str, Any]:
    def rounded(tensor: torch.Tensor) -> list[float]:
        return [float(f"{value:.4g}") for value in tensor.tolist()]

    return {
        "own": rounded(errors.own),
        "handed_on": rounded(errors.handed_on),
        "by_layer": rounded(errors.by_layer),
        "shares": list(SHARES),
        "total": {order: rounded(errors.total[order]) for order in ORDERS},
        "kl": {order: rounded(errors.kl[order]) for order in ORDERS},
        "area": {order: round(_area(errors.total[order]), 4) for order in ORDERS},
    }


def _plot(by_change: dict[str, Errors], out: Path) -> list[Path]:
    """A row of panels for each change."""
    figure = Figure(figsize=(13, 2.7 * len(by_change)), layout="constrained")
    rows = figure.subplots(len(by_change), 4, squeeze=False)
    percent = [100 * share for share in SHARES]
    for axes, (change, errors) in zip(rows, by_change.items(), strict=True):
        eighths = range(1, len(errors.own) + 1)
        axes[0].bar(eighths, errors.own.tolist())
        axes[0].set(xlabel="eighth of the picture", ylabel=change, title="e_self")
        axes[1].bar(eighths, errors.handed_on.tolist())
        axes[1].set(xlabel="eighth of the picture", title="e_prop: handed on to later tokens")
        for order in ORDERS:
            axes[2].plot(percent, errors.total[order].tolist(), marker=".", label=order)
            axes[3].plot(percent, errors.kl[order].tolist(), marker=".", label=order)
        axes[2].set(xlabel="tokens computed, %", title="e_total: what is left")
        axes[3].set(xlabel="tokens computed, %", title="KL of the answer, nats")
        axes[2].legend(fontsize=7)
        for axis in axes:
            axis.title.set_fontsize(9)
            axis.tick_params(labelsize=7)
    paths = [out / "errors.png", out / "errors.svg"]
    for path in paths:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
