"""What a check costs: a hit with one against the same hit without, in steps of decoding.

All arms run in one process, in turn. No answer is taken for moved, so a check is one pass.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from vlcache.bench.machine import describe_run, rounded, seconds_of
from vlcache.bench.ttft import Settings as TtftSettings
from vlcache.bench.ttft import Workbench
from vlcache.engines.transformers import VLCache
from vlcache.policies import NoRecompute, Verified

__all__ = ["Settings", "run"]

ARMS = ("unchecked_s", "checked_s", "ungated_s", "gated_s")
_STEPS = 8
_ALL_STAND = 1e9


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured; see `vlcache.bench.ttft.Settings`.

    Attributes
    ----------
    probes : int
        Of the check.
    """

    shape: str = "qwen2.5-vl-3b"
    image_tokens: int = 1008
    text_tokens: int = 40
    probes: int = 12
    runs: int = 15
    warmups: int = 2
    dtype: str = "bfloat16"
    device: str = "cpu"


def run(settings: Settings, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> dict[str, Any]:
    """Measure, and return what the last line prints."""
    shape = TtftSettings(
        settings.shape, settings.image_tokens, settings.text_tokens, dtype=settings.dtype, device=settings.device
    )
    bench = Workbench(shape)
    say(f"{settings.shape} with random weights, {settings.dtype} on {settings.device}")
    naive, verified = NoRecompute(), Verified(_ALL_STAND, settings.probes, 1)
    times: dict[str, list[float]] = {arm: [] for arm in (*ARMS, "decode_step_s")}
    with VLCache(bench.model, bench.processor, naive, prefix_cache=False) as cache:
        picture = bench.picture(0)

        def chat(number: int, turn: str) -> list[dict[str, Any]]:
            system, user = bench.chat(picture, number)
            return [system, {"role": "user", "content": [{"type": "text", "text": turn}, *user["content"]]}]

        def hit(number: int, turn: str, policy: Any, result: str | None) -> None:
            cache.prefill(chat(number, turn), policy=policy)
            assert cache.last is not None
            assert cache.last.hits == 1
            assert (cache.last.verdict and cache.last.verdict.result) == result

        def answer(number: int, tokens: int) -> None:
            inputs = cache.prefill(chat(number, "here"), policy=naive)
            bench.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens)

        def decode(number: int) -> float:
            first, more = (seconds_of(partial(answer, number, tokens)) for tokens in (1, 1 + _STEPS))
            return (more - first) / _STEPS

        cache.prefill(chat(0, "here"))
        for turn in range(settings.warmups + settings.runs):
            number = 10 * turn + 1
            arms: dict[str, Callable[[], object]] = {
                "unchecked_s": partial(hit, number, "look", naive, None),
                "checked_s": partial(hit, number, "look", verified, "safe"),
                "ungated_s": partial(hit, number, "here", naive, None),
                "gated_s": partial(hit, number, "here", verified, "skipped"),
            }
            found = {arm: seconds_of(work) for arm, work in arms.items()}
            found["decode_step_s"] = decode(number)
            if turn >= settings.warmups:
                for arm, seconds in found.items():
                    times[arm].append(seconds)
        cache.prefill(chat(5, "look"), policy=verified)
        assert cache.last is not None
        check_rows = cache.last.rows[0] - cache.last.prompt_tokens + settings.image_tokens
    median = {arm: statistics.median(values) for arm, values in times.items()}
    for arm, value in median.items():
        say(f"{arm:<14} {value:8.4f} s   from {min(times[arm]):.4f} to {max(times[arm]):.4f} in {len(times[arm])} runs")
    # Pairs of one round, so that a slow moment of the machine is in both
    check_s = statistics.median(b - a for a, b in zip(times["unchecked_s"], times["checked_s"], strict=True))
    gate_s = statistics.median(b - a for a, b in zip(times["ungated_s"], times["gated_s"], strict=True))
    result: dict[str, Any] = {
        **asdict(settings),
        **describe_run(settings.device),
        **median,
        "check_s": check_s,
        "check_rows": check_rows,
        "check_steps": check_s / median["decode_step_s"],
        "gated_check_steps": gate_s / median["decode_step_s"],
    }
    return dict(rounded(result))
