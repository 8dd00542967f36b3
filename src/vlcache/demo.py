"""The story of the project on three photographs, against plain transformers in the same run.

new          each photograph for the first time
other prompt the same ones behind another system prompt
swapped      two of them, then the same two in the other order
"""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any, TextIO

from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from vlcache.bench.checkpoints import SHAPES, build_model, build_processor
from vlcache.engines.transformers import VLCache

__all__ = ["run"]

_PICTURES = ("rocket.jpg", "coffee.jpg", "cat.jpg")
_FIRST, _SECOND = "You describe photographs.", "You are a curator. Answer in one short sentence."


def _chat(system: str, pictures: list[str], question: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": str(files("vlcache.assets") / name)} for name in pictures]
    user = [*parts, {"type": "text", "text": question}]
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _story() -> list[tuple[str, list[dict[str, Any]]]]:
    rocket, coffee, cat = _PICTURES
    steps = [(f"{name}, new", _chat(_FIRST, [name], "What is shown?")) for name in _PICTURES]
    steps += [(f"{name}, other system prompt", _chat(_SECOND, [name], "Which colours?")) for name in _PICTURES]
    steps.append((f"{rocket} and {cat}", _chat(_FIRST, [rocket, cat], "Which is older?")))
    steps.append((f"{cat} and {rocket}, swapped", _chat(_FIRST, [cat, rocket], "Which is older?")))
    steps.append((f"{coffee}, asked again", _chat(_SECOND, [coffee], "Which colours, and is it hot?")))
    return steps


def run(out: TextIO) -> dict[str, Any]:
    """Tell the story on `out`, table included, and return its rows."""
    console = Console(file=out, soft_wrap=True, width=max(100, Console(file=out).width))
    console.print("Building a small Qwen2.5-VL with random weights: its words are noise, the times are real.")
    processor = build_processor(SHAPES["demo"])
    model = build_model(SHAPES["demo"], processor.tokenizer)
    story = _story()
    _plain(model, processor, _chat("warm up", ["cat.jpg"], "?"))
    rows: list[dict[str, Any]] = []
    with VLCache(model, processor) as cache:
        for title, chat in story:
            plain_s = _plain(model, processor, chat)
            start = time.perf_counter()
            model.generate(**cache.prefill(chat), max_new_tokens=1)
            ours_s = time.perf_counter() - start
            assert cache.last is not None
            rows.append(
                {
                    "step": title,
                    "vision_tokens": cache.last.vision_tokens,
                    "computed": cache.last.computed_vision_tokens,
                    "reused": cache.last.vision_tokens - cache.last.computed_vision_tokens,
                    "plain_ttft_s": round(plain_s, 4),
                    "ttft_s": round(ours_s, 4),
                }
            )
            console.print(f"  {title}: first token after {ours_s:.3f} s, plain transformers {plain_s:.3f} s")
        held = cache.store.stats().held_bytes
    console.print("\nTokens of pictures, and seconds to the first token:")
    console.print(_table(rows))
    total = {key: sum(row[key] for row in rows) for key in ("vision_tokens", "computed", "plain_ttft_s", "ttft_s")}
    console.print(
        f"{total['vision_tokens']} vision tokens asked for, {total['computed']} computed, "
        f"{total['vision_tokens'] - total['computed']} reused; the store holds {held / 1e6:.1f} MB.\n"
        f"Waiting for first tokens: {total['ttft_s']:.2f} s with vlcache, {total['plain_ttft_s']:.2f} s without."
    )
    console.print("Photographs: SpaceX (public domain), Rachel Michetti (CC0), Stefan van der Walt (CC0).", style="dim")
    return {"rows": rows, "held_bytes": held}


def _plain(model: Any, processor: Any, chat: list[dict[str, Any]]) -> float:
    """Seconds to plain transformers' first token, preprocessing included."""
    start = time.perf_counter()
    system, user = chat
    parts = [p | {"image": Image.open(p["image"])} if p["type"] == "image" else p for p in user["content"]]
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    model.generate(**processor.apply_chat_template([system, user | {"content": parts}], **options), max_new_tokens=1)
    return time.perf_counter() - start


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "vision", "computed", "reused", "plain", "vlcache", "sooner"):
        table.add_column(name, justify="left" if name == "step" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["step"],
            str(row["vision_tokens"]),
            str(row["computed"]),
            str(row["reused"]),
            f"{row['plain_ttft_s']:.3f} s",
            f"{row['ttft_s']:.3f} s",
            f"{row['plain_ttft_s'] / row['ttft_s']:.1f}x",
        )
    return table
