"""`vlcache cache`: what outlives the process, in a directory or on a server."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlcache.store.contents import Tier

__all__ = ["cache"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


def _tiers(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--redis-url", help="redis://[user:password@]host[:port][/database]"),
        click.option("--disk-path", type=click.Path(file_okay=False), help="Directory of entries."),
    ):
        command = option(command)
    return command


@contextmanager
def _open(
    disk_path: str | None, redis_url: str | None, make: bool = False, **bounds: float | None
) -> Iterator[Mapping[str, Tier]]:
    """The tiers named on the command line, or else those of the configuration."""
    from vlcache.config import load_config
    from vlcache.errors import InputError
    from vlcache.store.contents import lasting_tiers

    if disk_path or redis_url:
        disk_path, redis_url = disk_path or "", redis_url or ""
    config = load_config(disk_path=disk_path, redis_url=redis_url)
    if config.disk_path and not make and not Path(config.disk_path).is_dir():
        raise InputError(f"disk: there is no directory {config.disk_path}; check the name")
    tiers = lasting_tiers(config, {name: size for name, size in bounds.items() if size is not None})
    try:
        yield tiers
    finally:
        for tier in tiers.values():
            tier.close()


def _end(tiers: Mapping[str, Tier], failed: bool = False) -> None:
    """Say what went wrong in closed tiers, and exit with status 1 if anything did."""
    faults = {f"{label}: {reason}": n for label, tier in tiers.items() for reason, n in tier.stats().faults.items()}
    for text, times in faults.items():
        click.echo(f"vlcache: {text} ({times})", err=True)
    if faults or failed:
        sys.exit(1)


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere; on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


@click.group()
def cache() -> None:
    """Entries that outlive the process: list, check, clear, carry elsewhere."""


@cache.command()
@_tiers
@_JSON
def ls(disk_path: str | None, redis_url: str | None, as_json: bool) -> None:
    """List entries, the most recently used first."""
    from rich.console import Console
    from rich.table import Table

    from vlcache.store.contents import items

    with _open(disk_path, redis_url) as tiers:
        found = [item.to_dict() for item in items(tiers)]
    if as_json:
        click.echo(json.dumps(found))
        _end(tiers)
        return
    table = Table(
        "tier", "picture", "tokens", "MB", "K/V", "stored", "model", "tenant", "age", box=None, pad_edge=False
    )
    for item in found:
        hours = (time.time() - item["created_s"]) / 3600
        table.add_row(
            item["tier"],
            item["content"][:12],
            str(item["tokens"]),
            f"{item['bytes'] / 1e6:.1f}",
            "yes" if item["has_kv"] else "no",
            item["stored"],
            item["model"][:8],
            item["tenant"][:8],
            f"{hours / 24:.0f} d" if hours >= 48 else f"{hours:.1f} h",
        )
    Console(soft_wrap=True).print(table)
    _end(tiers)


@cache.command()
@_tiers
@_JSON
def stats(disk_path: str | None, redis_url: str | None, as_json: bool) -> None:
    """Entries and bytes by tier."""
    with _open(disk_path, redis_url) as tiers:
        found: dict[str, dict[str, Any]] = {}
        for name, tier in tiers.items():
            held = tier.stats()
            found[name] = {
                "entries": held.entries,
                "held_bytes": held.held_bytes,
                "faults": dict(held.faults),
            }
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, one in found.items():
            click.echo(f"{name}: {one['entries']} entries, {_gb(one['held_bytes'])} GB")
    _end(tiers)


@cache.command()
@_tiers
@_JSON
def verify(disk_path: str | None, redis_url: str | None, as_json: bool) -> None:
    """Read every checksum; damaged entries go to quarantine. Exit status 1 if there were any."""
    from vlcache.store.contents import listed

    result: dict[str, Any] = {}
    with _open(disk_path, redis_url) as tiers:
        names = {label: listed(label, tier) for label, tier in tiers.items()}
        with _progress("checking", sum(map(len, names.values()))) as advance:
            for label, tier in tiers.items():
                sound = 0
                for name in names[label]:
                    sound += tier.whole(name) is not None
                    advance()
                result[label] = {"sound": sound, "faults": dict(tier.stats().faults)}
    if as_json:
        click.echo(json.dumps(result))
    else:
        for label, one in result.items():
            click.echo(f"{label}: {one['sound']} of {len(names[label])} entries are sound")
    _end(tiers)


@cache.command()
@_tiers
@click.option("--model", default="", help="Only entries of the model whose digest begins so.")
@click.option("--tenant", default="", help="Only entries of the tenant whose digest begins so.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_JSON
def clear(disk_path: str | None, redis_url: str | None, model: str, tenant: str, yes: bool, as_json: bool) -> None:
    """Remove entries."""
    from vlcache.store.contents import items

    with _open(disk_path, redis_url) as tiers:
        chosen = [
            item
            for item in items(tiers)
            if item.head.header.model.startswith(model) and item.head.header.tenant.startswith(tenant)
        ]
        if chosen and not yes:
            click.confirm(f"Remove {len(chosen)} entries from {', '.join(tiers)}?", abort=True, err=True)
        removed = 0
        with _progress("removing", len(chosen)) as advance:
            for item in chosen:
                removed += tiers[item.tier].remove(item.name)
                advance()
        for tier in () if model or tenant else tiers.values():
            tier.clear_quarantine()
    click.echo(json.dumps({"removed": removed}) if as_json else f"{removed} entries removed")
    _end(tiers)


@cache.command("export")
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False))
@_tiers
@_JSON
def export_(archive: Path, disk_path: str | None, redis_url: str | None, as_json: bool) -> None:
    """Write every entry to a tar archive."""
    from vlcache.store.contents import export

    with _open(disk_path, redis_url) as tiers, _progress("exporting", None) as advance:
        written = 0
        for sound in export(tiers, archive):
            written += sound
            advance()
    size = archive.stat().st_size
    click.echo(json.dumps({"entries": written, "bytes": size}) if as_json else f"{written} entries, {_gb(size)} GB")
    _end(tiers)


@cache.command("import")
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@_tiers
@click.option("--disk-gb", type=float, help="Bound of the directory.")
@click.option("--redis-gb", type=float, help="Bound of all entries on the server.")
@_JSON
def import_(
    archive: Path,
    disk_path: str | None,
    redis_url: str | None,
    disk_gb: float | None,
    redis_gb: float | None,
    as_json: bool,
) -> None:
    """Put an archive's entries into the directory and the server. Exit status 1 if one was damaged or refused."""
    from vlcache.store.contents import import_ as take

    counts: Counter[str] = Counter()
    bounds = {"disk_gb": disk_gb, "redis_gb": redis_gb}
    with _open(disk_path, redis_url, make=True, **bounds) as tiers, _progress("importing", None) as advance:
        for _, outcome in take(tiers, archive):
            counts[outcome] += 1
            advance()
    text = ", ".join(f"{times} {outcome}" for outcome, times in counts.items()) or "the archive is empty"
    click.echo(json.dumps(dict(counts)) if as_json else text)
    _end(tiers, failed=bool(set(counts) - {"kept"}))


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g}"
