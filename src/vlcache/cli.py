"""The command line. Exit status: 0 done, 1 failed, 2 usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from vlcache import __version__
from vlcache.errors import ConfigError, UnsupportedModelError, VLCacheError

__all__ = ["main"]


class _DType(click.Choice[str]):
    def __init__(self, *also: str) -> None:
        super().__init__([*also, "float32", "bfloat16", "float16"])


_DEVICE = click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
_POLICY = click.option("--policy", help="What is recomputed of a known picture: full, none, prefix:0.02, layered:1,...")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vlcache")
def cli() -> None:
    """Reuse a recurring picture's encoder output and KV cache wherever it stands in a prompt."""


@cli.command()
@click.argument("pictures", nargs=-1, required=True, metavar="PICTURE...")
@click.option("-q", "--question", "questions", multiple=True, required=True, help="A question; may be repeated.")
@click.option("--model", help="Directory of a checkpoint. Without it: a small random one, whose words are noise.")
@click.option("--system", help="System prompt.")
@click.option("--max-new-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--dtype", default="auto", show_default=True, type=_DType("auto"))
@click.option("--memory-gb", type=float, help="Bound of the store of pictures; 0 turns it off, exact prefixes stay.")
@click.option("--prefix-cache/--no-prefix-cache", default=None, help="Reuse earlier prompts' beginnings, exactly.")
@click.option("--cache-salt", help="Tenant: entries of another salt are invisible.")
@_POLICY
@_DEVICE
@_JSON
def ask(
    pictures: tuple[str, ...],
    questions: tuple[str, ...],
    model: str | None,
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
    """Three photographs: new, behind another system prompt, and swapped, against plain transformers."""
    from vlcache.config import load_config
    from vlcache.demo import run

    load_config()  # a mistake in it shows before the model is built
    result = run(sys.stderr if as_json else sys.stdout)
    if as_json:
        click.echo(json.dumps(result))


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


def _load(model: str | None, dtype: str, device: str, quiet: bool) -> tuple[Any, Any]:
    import torch
    from transformers.utils import logging

    from vlcache.engines.transformers.load import check_device, load_checkpoint

    logging.disable_progress_bar()
    check_device(device)
    if model is not None:
        loaded, processor = load_checkpoint(model, dtype, device)
        random = (Path(model) / "vlcache-random.json").exists()
    else:
        from vlcache.bench.checkpoints import SHAPES, build_model, build_processor

        processor = build_processor(SHAPES["demo"])
        weights = "float32" if dtype == "auto" else dtype
        loaded = build_model(SHAPES["demo"], processor.tokenizer, getattr(torch, weights)).to(device)
        random = True
    if random and not quiet:
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
    except (click.ClickException, VLCacheError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"vlcache: {message}", err=True)
        usage = isinstance(error, click.UsageError | ConfigError | UnsupportedModelError)
        sys.exit(2 if usage else 1)
    sys.exit(status if isinstance(status, int) else 0)
