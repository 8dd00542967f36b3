"""The story of the project on pages, told by its own small model, against plain transformers in the same run.

new            each page for the first time
other context  the same pages behind another system prompt, an earlier turn, another page, a photograph
swapped        two of them, then the same two in the other order
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TextIO

from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from vlcache.bench.plain import plain_inputs
from vlcache.engines.transformers import VLCache

__all__ = ["run"]

_FIRST, _SECOND = "You read pictures.", "You are Mia, a friendly guide."


@dataclass(frozen=True, slots=True)
class _Step:
    title: str
    chat: list[dict[str, Any]]
    answer: str


def _pages() -> dict[str, Image.Image]:
    """Pages of 256 vision tokens."""
    from evalmodel import pictures

    form = (("name", "Anna"), ("city", "Paris"), ("pet", "dog"), ("food", "rice"), ("day", "Friday"))
    prices = ((3, 7), (5, 2), (9, 4))
    tiles = (
        (("red", "K", 7), ("blue", "M", 2), ("red", "P", 5)),
        (("green", "A", 1), ("red", "T", 8), ("blue", "Z", 3)),
    )
    others = (
        (("black", "C", 4), ("purple", "T", 6), ("orange", "G", 9)),
        (("yellow", "R", 2), ("red", "H", 1), ("green", "W", 3)),
    )
    contents: dict[str, Any] = {
        "form": pictures.Form(form),
        "table": pictures.Table(("price", "weight"), ("apple", "milk", "bread"), prices),
        "board": pictures.Board(tiles),
        "other board": pictures.Board(others),
    }
    rng = random.Random(0)
    return {name: pictures.draw(content, rng, canvas=(16, 16)).image for name, content in contents.items()}


def _chat(system: str, pages: list[Image.Image], question: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, *before, _user(pages, question)]


def _user(pages: list[Image.Image], question: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": page} for page in pages]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _story() -> list[_Step]:
    pages = _pages()
    form, table, board, other = pages.values()
    shared = "Which tile is in both pictures?"
    talk = ({"role": "user", "content": "Are you ready?"}, _said("Yes, go on."))
    city = (_user([form], "What is the city?"), _said("Paris"))
    photograph = Image.open(str(files("vlcache.assets") / "coffee.jpg"))
    kept = (_user([photograph], "Please keep this picture."), _said("Of course."))
    return [
        _Step("form, new", _chat(_FIRST, [form], "What is the city?"), "Paris"),
        _Step("table, new", _chat(_FIRST, [table], "What is the price of milk?"), "5"),
        _Step("board, new", _chat(_FIRST, [board], "What color is tile K?"), "red"),
        _Step("form, other system prompt", _chat(_SECOND, [form], "What is the pet?"), "dog"),
        _Step("table, after small talk", _chat(_FIRST, [table], "What is the weight of bread?", *talk), "4"),
        _Step("board, after the form", _chat(_FIRST, [board], "What number is on tile T?", *city), "8"),
        _Step("table, after a photograph (new)", _chat(_FIRST, [table], "What is the weight of bread?", *kept), "4"),
        _Step("board, after the photograph", _chat(_SECOND, [board], "What number is on tile T?", *kept), "8"),
        _Step("board, other board (new)", _chat(_FIRST, [board, other], shared), "T"),
        _Step("the boards, swapped", _chat(_SECOND, [other, board], shared), "T"),
    ]


def run(model: Any, processor: Any, out: TextIO) -> dict[str, Any]:
    """Tell the story on `out`, table included, and return its rows."""
    console = Console(file=out, soft_wrap=True, width=max(125, Console(file=out).width))
    console.print("Questions about drawn pages, answered by tileworld, a small model trained for this project.")
    story = _story()
    _plain(model, processor, _chat("warm up", [Image.new("RGB", (224, 224))], "?"))
    rows: list[dict[str, Any]] = []
    with VLCache(model, processor) as cache:
        for step in story:
            plain_s, plain = _plain(model, processor, step.chat)
            start = time.perf_counter()
            inputs = cache.prefill(step.chat)
            model.generate(**inputs, max_new_tokens=1)
            ours_s = time.perf_counter() - start
            assert cache.last is not None
            report = cache.last
            ours = _words(model, processor, cache.prefill(step.chat))
            rows.append(
                {
                    "step": step.title,
                    "right_answer": step.answer,
                    "answer": ours,
                    "plain_answer": plain,
                    "vision_tokens": report.vision_tokens,
                    "computed": report.computed_vision_tokens,
                    "reused": report.reused_vision_tokens,
                    "plain_ttft_s": round(plain_s, 4),
                    "ttft_s": round(ours_s, 4),
                }
            )
            console.print(
                f"  {step.title}: {ours!r} after {ours_s:.3f} s, plain transformers {plain!r} after {plain_s:.3f} s"
            )
        held = cache.store.stats().held_bytes
    console.print("\nTokens of pictures, and seconds to the first token:")
    console.print(_table(rows))
    names = ("vision_tokens", "computed", "reused", "plain_ttft_s", "ttft_s")
    total = {key: sum(row[key] for row in rows) for key in names}
    right = sum(row["answer"] == row["right_answer"] for row in rows)
    console.print(
        f"{total['vision_tokens']} vision tokens asked for, {total['computed']} computed, "
        f"{total['reused']} reused; the store holds {held / 1e6:.1f} MB.\n"
        f"Waiting for first tokens: {total['ttft_s']:.2f} s with vlcache, {total['plain_ttft_s']:.2f} s without. "
        f"{right} of {len(rows)} answers are right."
    )
    return {"rows": rows, "held_bytes": held}


def _plain(model: Any, processor: Any, chat: list[dict[str, Any]]) -> tuple[float, str]:
    """Seconds to plain transformers' first token, preprocessing included, and its answer."""
    full = [m if not isinstance(m["content"], str) else m | {"content": [_text(m["content"])]} for m in chat]
    start = time.perf_counter()
    inputs = plain_inputs(processor, full)
    model.generate(**inputs, max_new_tokens=1)
    seconds = time.perf_counter() - start
    return seconds, _words(model, processor, inputs)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _words(model: Any, processor: Any, inputs: Any) -> str:
    out = model.generate(**inputs, max_new_tokens=8)
    return str(processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "answer", "vision", "computed", "reused", "plain", "vlcache", "sooner"):
        table.add_column(name, justify="left" if name in ("step", "answer") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["step"],
            row["answer"] + ("" if row["answer"] == row["right_answer"] else f" (right: {row['right_answer']})"),
            str(row["vision_tokens"]),
            str(row["computed"]),
            str(row["reused"]),
            f"{row['plain_ttft_s']:.3f} s",
            f"{row['ttft_s']:.3f} s",
            f"{row['plain_ttft_s'] / row['ttft_s']:.1f}x",
        )
    return table
