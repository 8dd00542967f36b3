"""Time to first token of one picture: plain transformers, a miss, a hit, and what a hit could cost at best.

All arms run in one process, one after the other in each round, from JPEG bytes to the first token. Medians are
compared as ratios, so a slow machine shifts all of them alike.
"""

from __future__ import annotations

import gc
import io
import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlcache.bench.checkpoints import SHAPES, build_model, build_processor
from vlcache.bench.machine import describe_run, measure_rates, rounded, seconds_of
from vlcache.bench.plain import plain_inputs
from vlcache.engines.transformers import VLCache
from vlcache.errors import ConfigError
from vlcache.policies import DEFAULT_POLICY, parse_policy

__all__ = ["Settings", "Workbench", "run"]

# How often a round takes each arm that lasts less than a second
_REPEATS = 5

ARMS = ("full_s", "cold_s", "warm_s", "text_only_s", "same_rows_s")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Attributes
    ----------
    shape : str
        Key of `vlcache.bench.checkpoints.SHAPES`.
    image_tokens, text_tokens : int
        Vision tokens, and all others including the chat template's.
    runs, warmups : int
        Rounds measured, and rounds before them.
    policy : str
    dtype : str
        Of the weights: `bfloat16`, `float16` or `float32`.
    device : str
    """

    shape: str = "small"
    image_tokens: int = 1008
    text_tokens: int = 40
    runs: int = 3
    warmups: int = 1
    policy: str = DEFAULT_POLICY
    dtype: str = "bfloat16"
    device: str = "cpu"


class Workbench:
    """A model with random weights, and pictures and prompts of the sizes wanted."""

    def __init__(self, settings: Settings) -> None:
        if settings.shape not in SHAPES:
            raise ConfigError(f"unknown shape {settings.shape!r}; known are " + ", ".join(SHAPES))
        parse_policy(settings.policy)
        self.shape = SHAPES[settings.shape]
        self.settings = settings
        width, height = self._size(settings.image_tokens)
        self.processor = build_processor(self.shape, max_pixels=width * height)
        self._fixed = len(self._ids(self._chat(None, "", ""))) + 2  # and the tokens around a picture
        self._filler = settings.text_tokens - self._fixed
        if self._filler < 8:
            raise ConfigError(f"text_tokens {settings.text_tokens} is too few; the template needs {self._fixed + 8}")
        dtype = getattr(torch, settings.dtype)
        self.model = build_model(self.shape, self.processor.tokenizer, dtype).to(settings.device)

    def _size(self, tokens: int) -> tuple[int, int]:
        """Pixels of a picture with so many vision tokens."""
        height, width = _grid(tokens)
        side = self.shape.patch * 2
        return width * side, height * side

    def picture(self, seed: int, tokens: int | None = None) -> bytes:
        """A JPEG that looks like a photograph to a decoder: smooth structure with some noise.

        Of `image_tokens`, or of fewer.
        """
        rng = np.random.default_rng(seed)
        size = self._size(tokens or self.settings.image_tokens)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16)
        out = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
        return out.getvalue()

    def chat(self, picture: Any, number: int, longer: int = 0) -> list[dict[str, Any]]:
        """A prompt of `text_tokens`; `number` changes its first tokens, so that no prefix is shared.

        `longer` adds tokens before the picture, so that it stands elsewhere.
        """
        system = f"{number:04d}"
        return self._chat(picture, system + "s" * longer, "q" * (self._filler - len(system)))

    def _chat(self, picture: Any, system: str, question: str) -> list[dict[str, Any]]:
        parts = [] if picture is None else [{"type": "image", "image": picture}]
        user = [*parts, {"type": "text", "text": question}]
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    def _ids(self, chat: Any) -> Any:
        text = self.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return self.processor.tokenizer(text)["input_ids"]

    def first_token(self, inputs: Any) -> None:
        self.model.generate(**inputs, max_new_tokens=1, min_new_tokens=1)

    def plain(self, data: bytes, number: int) -> None:
        inputs = plain_inputs(self.processor, self.chat(Image.open(io.BytesIO(data)), number))
        total = self.settings.image_tokens + self.settings.text_tokens
        assert inputs["input_ids"].shape[1] == total, (inputs["input_ids"].shape, total)
        self.first_token(inputs.to(self.settings.device))

    def tokens(self, count: int, number: int) -> None:
        """Plain transformers over `count` tokens of text."""
        ids = torch.full((1, count), 65, device=self.settings.device)
        ids[0, :4] = torch.tensor([48 + int(c) for c in f"{number:04d}"])
        self.first_token({"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def _grid(tokens: int) -> tuple[int, int]:
    """Rows and columns of a picture with that many tokens, as near to a square as it goes."""
    rows = next(r for r in range(int(tokens**0.5), 0, -1) if tokens % r == 0)
    if tokens // rows > 50 * rows:
        raise ConfigError(f"image_tokens {tokens}: no picture has that many; give a number with two near factors")
    return rows, tokens // rows


def _floors(bench: Workbench, rows: int, say: Callable[[str], None]) -> dict[str, float]:
    """The least that the weights and the operations allow for the decoder over some rows."""
    dtype = getattr(torch, bench.settings.dtype)
    bandwidth, gemm = measure_rates(bench.settings.device, dtype)
    decoder = [p for layer in bench.model.model.language_model.layers for p in layer.parameters()]
    head = bench.model.lm_head.weight
    weight_bytes = sum(p.numel() * p.element_size() for p in [*decoder, head])
    operations = 2 * rows * sum(p.numel() for p in decoder if p.ndim == 2) + 2 * head.numel()
    floors = {"weights_s": weight_bytes / bandwidth, "operations_s": operations / gemm}
    say(
        f"floor of a hit ({rows} rows): {weight_bytes / 1e9:.2f} GB of weights at {bandwidth / 1e9:.1f} GB/s = "
        f"{floors['weights_s']:.3f} s, {operations / 1e9:.0f} GFLOP at {gemm / 1e9:.0f} GFLOP/s = "
        f"{floors['operations_s']:.3f} s"
    )
    return floors


def run(settings: Settings, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure, and return what the last line prints.

    Parameters
    ----------
    say : callable
        Takes lines of progress.
    """
    bench = Workbench(settings)
    say(f"{settings.shape} with random weights, {settings.dtype} on {settings.device}")
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    stages: list[dict[str, float]] = []
    with VLCache(bench.model, bench.processor, settings.policy, prefix_cache=False) as cache:
        known, number = bench.picture(0), 1
        cache.prefill(bench.chat(known, 0, longer=13))
        entry_bytes = cache.store.stats().held_bytes
        cache.prefill(bench.chat(known, number))
        assert cache.last is not None
        assert cache.last.hits == 1
        share, rows = cache.last.computed_share, max(cache.last.rows)
        floors = _floors(bench, rows, say)

        def hit(number: int) -> None:
            bench.first_token(cache.prefill(bench.chat(known, number)))
            assert cache.last is not None
            assert cache.last.hits == 1

        def miss(data: bytes, number: int) -> None:
            bench.first_token(cache.prefill(bench.chat(data, number)))
            assert cache.last is not None
            assert cache.last.hits == 0

        for turn in range(settings.warmups + settings.runs):
            number += 100
            fresh = bench.picture(number)
            arms: list[tuple[str, Callable[[], object]]] = [
                ("full_s", partial(bench.plain, fresh, number)),
                ("cold_s", partial(miss, fresh, number + 1)),
            ]
            # The long arms change places every round; the short ones are taken often, side by side
            arms = arms[:: 1 if turn % 2 else -1]
            for n in range(number + 2, number + 2 + 3 * _REPEATS, 3):
                arms.append(("warm_s", partial(hit, n)))
                arms.append(("same_rows_s", partial(bench.tokens, rows, n + 1)))
                arms.append(("text_only_s", partial(bench.tokens, settings.text_tokens, n + 2)))
            gc.collect()
            for arm, work in arms:
                seconds = seconds_of(work)
                if turn >= settings.warmups:
                    times[arm].append(seconds)
                    if arm == "warm_s":
                        stages.append(cache.last.seconds)
            say(f"round {turn + 1} of {settings.warmups + settings.runs} done")

    median = {arm: statistics.median(values) for arm, values in times.items()}
    for arm, value in median.items():
        say(f"{arm:<12} {value:8.3f} s   from {min(times[arm]):.3f} to {max(times[arm]):.3f} in {len(times[arm])} runs")
    result: dict[str, Any] = {
        **asdict(settings),
        **describe_run(settings.device),
        **median,
        "speedup": median["full_s"] / median["warm_s"],
        "overhead": median["warm_s"] / median["same_rows_s"],
        "cold_overhead": median["cold_s"] / median["full_s"],
        "computed_share": share,
        "computed_rows": rows,
        "moved_bytes": cache.last.moved_bytes,
        "entry_bytes": entry_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "floor": floors,
        "range_s": {arm: [min(values), max(values)] for arm, values in times.items()},
        "stages_s": {name: statistics.median(s[name] for s in stages) for name in stages[0]},
    }
    return dict(rounded(result))
