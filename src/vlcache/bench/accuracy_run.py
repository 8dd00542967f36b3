"""One run of `vlcache bench accuracy`: trials in, a folder, a table and a JSON row out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vlcache.bench.accuracy import PEERS, Outcome, Runner
from vlcache.bench.machine import describe_run
from vlcache.bench.plots import plot_pareto
from vlcache.bench.progress import progress
from vlcache.bench.rows import Skipped
from vlcache.bench.tally import ALL, Row, checks, enough, tally
from vlcache.bench.tileworld import NAME, tileworld_plan, tileworld_trial
from vlcache.bench.trials import Trial
from vlcache.errors import ConfigError
from vlcache.policies import parse_policy
from vlcache.types import Capture

__all__ = ["MOST_SKIPPED", "Settings", "check", "run"]

MOST_SKIPPED = 0.01
"""Share of a data set's rows that may be unusable before a run counts as failed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes
    ----------
    items : int
        Questions of each family, their pictures dealt evenly to its changes; of a data set the rows, each under every
        change.
    policies, families, changes : tuple of str
        Empty: all of them.
    model : str
        `tileworld` or the directory of a checkpoint.
    dataset : str
        `tileworld`, or a key of `vlcache.bench.datasets.DATASETS`, read from `data`.
    data : str
    split : str
        Of tileworld: `test`, `calibration` or `train`.
    seed : int
    dtype, device : str
    max_new_tokens : int
    max_pages, dpi : int
        Of a PDF document, where the data set has them.
    store_dtype : str
        How entries' K and V are kept between capture and use, `raw`, `int8` or `fp8`.
    capture : str
        `observed` or `neutral`, see `vlcache.config.Config`.
    profile : str
        File with the model's profile; empty: the one in its directory, if any.
    """

    items: int = 100
    policies: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    model: str = "tileworld"
    dataset: str = "tileworld"
    data: str = ""
    split: str = "test"
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    max_new_tokens: int = 32
    max_pages: int = 120
    dpi: int = 144
    store_dtype: str = "raw"
    capture: Capture = "observed"
    profile: str = ""


def check(settings: Settings) -> None:
    """Raise ConfigError for a policy, family, change or data set that is not there, before a model is loaded."""
    for policy in settings.policies if settings.policies != (PEERS,) else ():
        if policy != "layered":  # whose ratios may come from the model's profile
            parse_policy(policy)
    if settings.data and settings.dataset == NAME:
        raise ConfigError("--data: given without --dataset; say which data set it is")
    _trials(settings)


def run(settings: Settings, model: Any, processor: Any, out: Path, console: Console) -> dict[str, Any]:
    """Run, write `out` (configuration, predictions, metrics, plots), print tables; the row of JSON.

    Raises
    ------
    ConfigError
        As `check`; nothing to run.
    """
    start = time.perf_counter()
    runner = Runner(
        model,
        processor,
        settings.policies,
        settings.max_new_tokens,
        settings.store_dtype,
        settings.capture,
        settings.profile,
    )
    trials, total = _trials(settings)
    out.mkdir(parents=True, exist_ok=True)
    about = describe_run(settings.device)
    _write(out / "config.json", asdict(settings) | {"policies": list(runner.policies)} | about)
    outcomes: list[Outcome] = []
    skipped: list[Skipped] = []
    with (out / "predictions.jsonl").open("w") as file, progress(console, total) as step:

        def tell(outcome: Outcome) -> None:
            outcomes.append(outcome)
            file.write(outcome.to_json() + "\n")
            if outcome.policy == runner.policies[-1]:
                step()

        def skip(one: Skipped) -> None:
            skipped.append(one)
            console.print(f"skipped {one.row}: {one.reason}", markup=False)

        def usable() -> Iterator[Trial]:
            for one in trials:
                if isinstance(one, Skipped):
                    skip(one)
                else:
                    yield one

        def refuse(trial: Trial, reason: str) -> None:
            skip(Skipped(trial.name, reason))
            step()

        runner.run(usable(), tell, refuse)
    if not outcomes and not skipped:
        raise ConfigError("no trial was run; check --families, --changes and the data")
    rows = tally(outcomes)
    ratios, told = enough(rows), checks(outcomes)
    asked = len({outcome.trial.rpartition("/")[0] for outcome in outcomes})
    result = {
        "rows": [row.to_dict() for row in rows],
        "within_half_a_point": ratios,
        "checks": told,
        "skipped": len(skipped),
        "skipped_share": round(len(skipped) / (len(skipped) + asked), 5),
        "skipped_files": sum(one.whole_file for one in skipped),
        "seconds": round(time.perf_counter() - start, 1),
        **about,
    }
    _write(out / "metrics.json", result | {"skipped_rows": [asdict(one) for one in skipped]})
    for path in plot_pareto(rows, out) if rows else ():
        console.print(f"wrote {path}", markup=False)
    for table in _tables(rows):
        console.print(table)
    for policy, its in told.items():
        console.print(
            f"{policy} checked {its['checked']} of {its['asked']} trials: {its['false_alarms']} alarms where naive "
            f"reuse was right ({its['safe']}), {its['missed']} missed where it was wrong ({its['unsafe']}), "
            f"AUC {its['auc']}; {its['accepted_wrong']} answers that it let stand or repaired are not full recompute's",
            markup=False,
        )
    if ratios:
        written = ", ".join(f"{change} {ratio:.0%}" for change, ratio in ratios.items())
        console.print(f"prefix is within 0.5 points of full recompute from this ratio on: {written}", markup=False)
    return result


def _trials(settings: Settings) -> tuple[Iterable[Any], int | None]:
    """Trials and rows that cannot be used, and how many trials there will be, where that is known."""
    if settings.dataset == NAME:
        drawn = list(tileworld_plan(settings.items, settings.families or None, settings.changes or None))
        return (tileworld_trial(settings.split, settings.seed, *which) for which in drawn), len(drawn)
    from vlcache.bench.datasets import dataset_trials

    if not settings.data:
        raise ConfigError(f"data set {settings.dataset!r}: no data; give --data, the folder that its files are in")
    found = dataset_trials(
        settings.dataset,
        Path(settings.data),
        settings.items,
        settings.changes or None,
        settings.families or None,
        max_pages=settings.max_pages,
        dpi=settings.dpi,
    )
    return found, None


def _tables(rows: list[Row]) -> Iterator[Table]:
    """Pooled over families: one line per policy and change; then the cells that lose most."""
    if rows:
        yield _table("All families, by change", [row for row in rows if row.family == ALL])
    cells = [row for row in rows if row.family != ALL and row.lost > 0]
    worst = sorted(cells, key=lambda row: -row.lost)[:20]
    if worst:
        yield _table("Cells that lose most", worst)


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in ("change", "family", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("items", "computed", "accuracy", "full", "lost", "agreement", "KL"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.change,
            row.family,
            row.policy if len(row.policy) <= 20 else row.policy[:17] + "...",
            str(row.items),
            f"{row.computed_share:.1%}",
            f"{row.accuracy:.1%}",
            f"{row.full_accuracy:.1%}",
            f"{row.lost:.1%} [{row.lost_low:.1%} to {row.lost_high:.1%}]".replace("[", r"\["),
            f"{row.agreement:.1%} [{row.agreement_low:.0%}-{row.agreement_high:.0%}]".replace("[", r"\["),
            f"{row.kl:.4f}",
        )
    return table


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
