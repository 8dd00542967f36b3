"""The command line. Exit status: 0 done, 1 failed, 2 usage."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from vlcache import __version__
from vlcache.cli_cache import cache
from vlcache.errors import ConfigError, UnsupportedModelError, VLCacheError

__all__ = ["main"]


class _DType(click.Choice[str]):
    def __init__(self, *also: str) -> None:
        super().__init__([*also, "float32", "bfloat16", "float16"])


_DEVICE = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
_POLICY = click.option("--policy", help="What is recomputed of a known picture: auto, full, none, prefix:0.02, ...")
_MODEL = click.option(
    "--model",
    default="tileworld",
    show_default=True,
    help="Directory of a checkpoint; tileworld is the project's own small model of drawn boards, tables and forms.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


_STORE_DTYPE = click.option(
    "--store-dtype",
    default="raw",
    show_default=True,
    type=click.Choice(["raw", "int8", "fp8"]),
    help="How a disk or a server keeps K and V.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vlcache")
def cli() -> None:
    """Reuse a recurring picture's encoder output and KV cache wherever it stands in a prompt."""


@cli.command()
@click.argument("pictures", nargs=-1, required=True, metavar="PICTURE...")
@click.option("-q", "--question", "questions", multiple=True, required=True, help="A question; may be repeated.")
@_MODEL
@click.option("--system", help="System prompt.")
@click.option("--max-new-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--dtype", default="auto", show_default=True, type=_DType("auto"))
@click.option("--memory-gb", type=float, help="Bound of the store of pictures; 0 turns it off, exact prefixes stay.")
@click.option("--prefix-cache/--no-prefix-cache", default=None, help="Reuse earlier prompts' beginnings, exactly.")
@click.option("--disk-path", type=click.Path(file_okay=False), help="Directory where entries outlive the process.")
@click.option("--disk-gb", type=float, help="Bound of that directory; 0 turns it off.")
@click.option("--redis-url", help="Server where entries are shared, redis://[user:password@]host[:port][/database].")
@click.option("--store-dtype", help="How both keep K and V: raw, int8 or fp8.")
@click.option("--always-reuse/--no-always-reuse", default=None, help="Load also where computing seems quicker.")
@click.option("--cache-salt", help="Tenant: entries of another salt are invisible.")
@_POLICY
@_DEVICE
@_JSON
def ask(
    pictures: tuple[str, ...],
    questions: tuple[str, ...],
    model: str,
    system: str | None,
    max_new_tokens: int,
    dtype: str,
    device: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer questions about pictures, each from the cache where it can be. With --json: one line per question."""
    from vlcache.ask import answer_all
    from vlcache.config import load_config
    from vlcache.media import open_picture

    config = load_config(**options)
    for number, picture in enumerate(pictures, 1):
        open_picture(picture, number)  # a mistyped name shows before the model is loaded
    loaded, processor = _load(model, dtype, device, quiet=as_json)
    answers = answer_all(loaded, processor, config, list(pictures), list(questions), system, max_new_tokens)
    for answer in answers:
        if as_json:
            for _ in answer.words:
                pass
            click.echo(json.dumps(answer.to_dict()))
            continue
        click.echo(f"> {answer.question}")
        for word in answer.words:
            click.echo(word, nl=False)
        click.echo(f"\n  [{answer.summary()}]\n")


@cli.command()
@_JSON
def demo(as_json: bool) -> None:
    """Drawn pages: new, in other contexts, and swapped, against plain transformers."""
    from vlcache.bench.tileworld import NAME
    from vlcache.config import load_config
    from vlcache.demo import run

    load_config()  # a mistake in it shows before the model is loaded
    result = run(*_load(NAME, "auto", "cpu", quiet=as_json), sys.stderr if as_json else sys.stdout)
    if as_json:
        click.echo(json.dumps(result))


cli.add_command(cache)


@cli.command()
@_JSON
def doctor(as_json: bool) -> None:
    """Print versions, device, the resolved configuration and what is supported."""
    from vlcache.doctor import examine, show

    findings = examine()
    if as_json:
        click.echo(json.dumps(findings))
    else:
        show(findings)


@cli.command()
@_MODEL
@click.option("--dataset", default="tileworld", show_default=True, help="tileworld, mmmu-pro or mmlongbench-doc.")
@click.option("--data", default="", metavar="DIR", help="Where a data set's files are.")
@click.option("--pairs", default=108, show_default=True, type=click.IntRange(1), help="Calibration pairs.")
@click.option("--probes", default=12, show_default=True, type=click.IntRange(1), help="Tokens that a check computes.")
@click.option("--target-kl", type=click.FloatRange(0), help="Largest divergence of the budgets, nats. Default 0.005.")
@click.option("--target-share", type=click.FloatRange(0, 1), help="Instead: their largest computed share.")
@click.option("--seed", default=0, show_default=True)
@click.option("--max-new-tokens", default=16, show_default=True, type=click.IntRange(1))
@click.option("-o", "--out", default="profile.json", show_default=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--dtype", default="auto", show_default=True, type=_DType("auto"))
@_DEVICE
def profile(
    model: str, dtype: str, device: str, out: Path, target_kl: float | None, target_share: float | None, **options: Any
) -> None:
    """Measure what reuse costs a model, layer by layer, and write its profile."""
    from rich.console import Console

    from vlcache.profiling.run import Settings, check, run

    if target_kl is not None and target_share is not None:
        raise click.UsageError("--target-kl and --target-share are both given; budgets are solved for one of them")
    if target_share is None and target_kl is None:
        target_kl = 0.005
    settings = Settings(target_kl=target_kl, target_share=target_share, **options)
    check(settings)
    loaded, processor = _load(model, dtype, device, quiet=False)
    found = run(settings, loaded, processor, out, Console())
    click.echo(json.dumps(found.to_dict()))


@cli.group()
def bench() -> None:
    """Benchmarks; the last line of each is JSON."""


@bench.command()
@click.option(
    "--shape", default="small", show_default=True, help="small, demo, qwen2-vl-2b, qwen2.5-vl-3b, qwen3-vl-2b."
)
@click.option("--image-tokens", default=1008, show_default=True, type=click.IntRange(4))
@click.option("--text-tokens", default=40, show_default=True, type=click.IntRange(1))
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1))
@click.option("--warmups", default=1, show_default=True, type=click.IntRange(0))
@click.option("--dtype", default="bfloat16", show_default=True, type=_DType())
@_POLICY
@_DEVICE
def ttft(policy: str | None, **options: Any) -> None:
    """Time to first token: plain transformers, a miss, a hit, and what a hit could cost at best."""
    from vlcache.bench.ttft import Settings, run
    from vlcache.engines.transformers.load import check_device

    check_device(options["device"])
    if policy is not None:
        options["policy"] = policy
    click.echo(json.dumps(run(Settings(**options))))


@bench.command()
@click.option("--shape", default="qwen2.5-vl-3b", show_default=True, help="As for ttft.")
@click.option("--image-tokens", multiple=True, default=(256, 1008, 4096), show_default=True, type=click.IntRange(4))
@click.option("--runs", default=7, show_default=True, type=click.IntRange(1))
@click.option("--ttft-runs", default=3, show_default=True, type=click.IntRange(0), help="0 leaves them out.")
@click.option("--dtype", default="bfloat16", show_default=True, type=_DType())
@click.option("--disk-path", default="", metavar="DIR", help="Where the disk's tier is made, and removed again.")
@click.option("--redis-url", default="", envvar="VLCACHE_REDIS_URL", help="Without it no server is measured.")
@_STORE_DTYPE
@_POLICY
def store(policy: str | None, **options: Any) -> None:
    """What entries cost to keep and to bring back, from each tier, beside the raw medium and computing again."""
    from vlcache.bench.store import Settings, run

    if policy is not None:
        options["policy"] = policy
    click.echo(json.dumps(run(Settings(**options))))


class _List(click.ParamType):  # type: ignore[type-arg]
    """Names between commas; numbers behind a comma belong to the name before them: `none,layered:1,0.5`."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in re.split(r",(?=\s*[A-Za-z])", value) if part.strip())
        return names or self.fail("is empty; leave it out for all of them", param, ctx)


@bench.command()
@click.option("--items", default=100, show_default=True, type=click.IntRange(1), help="Items a family, or rows.")
@click.option(
    "--policies", type=_List(), help="none,prefix:0.02,..., or peers: every rule at like shares. Default: a sweep."
)
@click.option("--families", type=_List(), help="Kinds of question; default all.")
@click.option("--changes", type=_List(), help="What differs before the picture; default all.")
@_MODEL
@click.option("--dataset", default="tileworld", show_default=True, help="tileworld, mmmu-pro or mmlongbench-doc.")
@click.option("--data", default="", metavar="DIR", help="Where a data set's files are.")
@click.option(
    "--split",
    default="test",
    show_default=True,
    type=click.Choice(["test", "calibration", "train"]),
    help="Of tileworld.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--max-new-tokens", default=32, show_default=True, type=click.IntRange(1))
@click.option("--max-pages", default=120, show_default=True, type=click.IntRange(1), help="Of a PDF document.")
@click.option("--dpi", default=144, show_default=True, type=click.IntRange(1), help="Of a PDF document's pages.")
@_STORE_DTYPE
@click.option(
    "--capture",
    default="observed",
    show_default=True,
    type=click.Choice(["observed", "neutral"]),
    help="Pictures by a trial's own prompts, or behind the chat template's opening.",
)
@click.option("--profile", default="", metavar="FILE", help="The model's profile; default the one in its directory.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for predictions, metrics, plots.")
@click.option("--dtype", default="auto", show_default=True, type=_DType("auto"))
@_DEVICE
def accuracy(out: Path | None, **options: Any) -> None:
    """Accuracy of every policy against full recompute, in contexts other than the captured one."""
    from rich.console import Console

    from vlcache.bench.accuracy_run import MOST_SKIPPED, Settings, check, run

    settings = Settings(**{name: value for name, value in options.items() if value is not None})
    check(settings)
    model, processor = _load(settings.model, settings.dtype, settings.device, quiet=False)
    out = out or Path("bench-accuracy", time.strftime("%Y%m%d-%H%M%S"))
    result = run(settings, model, processor, out, Console(soft_wrap=True, width=max(160, Console().width)))
    click.echo(json.dumps(result))
    if result["skipped_share"] > MOST_SKIPPED or result["skipped_files"]:
        click.echo(f"vlcache: {result['skipped']} rows of the data were skipped, over {MOST_SKIPPED:.0%}", err=True)
        sys.exit(1)


@bench.command()
@click.option("--shape", default="qwen2.5-vl-3b", show_default=True, help="As for ttft.")
@click.option("--image-tokens", default=1008, show_default=True, type=click.IntRange(4))
@click.option("--text-tokens", default=40, show_default=True, type=click.IntRange(1))
@click.option("--probes", default=12, show_default=True, type=click.IntRange(1), help="Tokens that a check computes.")
@click.option("--runs", default=15, show_default=True, type=click.IntRange(1))
@click.option("--warmups", default=2, show_default=True, type=click.IntRange(0))
@click.option("--dtype", default="bfloat16", show_default=True, type=_DType())
@_DEVICE
def check(**options: Any) -> None:
    """What verifying a hit costs, in steps of decoding."""
    from vlcache.bench.check import Settings, run
    from vlcache.engines.transformers.load import check_device

    check_device(options["device"])
    click.echo(json.dumps(run(Settings(**options))))


@bench.command()
@click.option("--items", default=8, show_default=True, type=click.IntRange(1), help="Pairs for each change.")
@click.option("--changes", type=_List(), help="What differs before the picture; default system,turn,question,legend.")
@_MODEL
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for figures and the plot.")
@click.option("--dtype", default="auto", show_default=True, type=_DType("auto"))
@_DEVICE
def error(model: str, dtype: str, device: str, out: Path | None, **options: Any) -> None:
    """What reused tokens are off by, what they hand on to later ones, and what repairing buys."""
    from rich.console import Console

    from vlcache.bench.error_run import Settings, run

    settings = Settings(**{name: value for name, value in options.items() if value is not None})
    loaded, processor = _load(model, dtype, device, quiet=False)
    out = out or Path("bench-error", time.strftime("%Y%m%d-%H%M%S"))
    click.echo(json.dumps(run(settings, loaded, processor, out, Console(soft_wrap=True))))


def _load(model: str, dtype: str, device: str, quiet: bool) -> tuple[Any, Any]:
    from transformers.utils import logging

    from vlcache.bench.tileworld import find_model
    from vlcache.engines.transformers.load import check_device, load_checkpoint

    logging.disable_progress_bar()
    check_device(device)
    folder = find_model(model, lambda text: click.echo(text, err=True))
    loaded, processor = load_checkpoint(folder, dtype, device)
    if (folder / "vlcache-random.json").exists() and not quiet:
        click.echo("note: this model's weights are random, so its words are noise; the times are real\n", err=True)
    return loaded, processor


def main(args: list[str] | None = None) -> None:
    """Entry point: errors of kind become one line and an exit status."""
    try:
        status = cli.main(args, prog_name="vlcache", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except ModuleNotFoundError as error:
        click.echo(f"vlcache: this needs the package {error.name}; pip install 'vlcache[bench]'", err=True)
        sys.exit(1)
    except (click.ClickException, VLCacheError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"vlcache: {message}", err=True)
        usage = isinstance(error, click.UsageError | ConfigError | UnsupportedModelError)
        sys.exit(2 if usage else 1)
    sys.exit(status if isinstance(status, int) else 0)
