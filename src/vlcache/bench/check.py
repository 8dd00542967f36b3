"""What verifying a hit costs, in steps of decoding: a hit with a check, or with a look, against the same one without.

    check    behind another picture of an earlier turn: `probes` tokens and the answering row
    look     behind other text of its turn: twice the tokens, and the last text rows
    gated    behind what it was captured behind: nothing

All arms run in one process, in turn, and back and forth. No answer is taken for moved, so each is one pass.
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

ARMS = ("unchecked_s", "checked_s", "unlooked_s", "looked_s", "ungated_s", "gated_s")
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
    naive, verified = NoRecompute(), Verified(_ALL_STAND, settings.probes)
    times: dict[str, list[float]] = {arm: [] for arm in (*ARMS, "decode_step_s")}
    with VLCache(bench.model, bench.processor, naive, prefix_cache=False) as cache:
        picture, earlier = bench.picture(0), bench.picture(1, 4)

        def chat(number: int, turn: str, behind: Any = None) -> list[dict[str, Any]]:
            system, user = bench.chat(picture, number)
            asked = {"role": "user", "content": [{"type": "text", "text": turn}, *user["content"]]}
            if behind is None:
                return [system, asked]
            seen = {"role": "user", "content": [{"type": "image", "image": behind}]}
            return [system, seen, {"role": "assistant", "content": "."}, asked]

        def hit(number: int, turn: str, behind: Any, policy: Any, result: str | None) -> None:
            cache.prefill(chat(number, turn, behind), policy=policy)
            assert cache.last is not None
            assert cache.last.hits == len(cache.last.spans)
            assert (cache.last.verdict and cache.last.verdict.result) == result

        def rows(number: int, turn: str, behind: Any) -> int:
            """Computed in one layer to verify."""
            counts = []
            for policy in (verified, naive):
                cache.prefill(chat(number, turn, behind), policy=policy)
                assert cache.last is not None
                counts.append(cache.last.rows[0])
            return counts[0] - counts[1]

        def answer(number: int, tokens: int) -> None:
            inputs = cache.prefill(chat(number, "here"), policy=naive)
            bench.model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens)

        def decode(number: int) -> float:
            first, more = (seconds_of(partial(answer, number, tokens)) for tokens in (1, 1 + _STEPS))
            return (more - first) / _STEPS

        cache.prefill(chat(0, "here"))
        cache.prefill([bench.chat(picture, 1)[0], {"role": "user", "content": [{"type": "image", "image": earlier}]}])
        for turn in range(settings.warmups + settings.runs):
            number = 10 * turn + 1
            arms: dict[str, Callable[[], object]] = {
                "unchecked_s": partial(hit, number, "here", earlier, naive, None),
                "checked_s": partial(hit, number, "here", earlier, verified, "safe"),
                "unlooked_s": partial(hit, number, "look", None, naive, None),
                "looked_s": partial(hit, number, "look", None, verified, "safe"),
                "ungated_s": partial(hit, number, "here", None, naive, None),
                "gated_s": partial(hit, number, "here", None, verified, "skipped"),
            }
            order = list(arms) if turn % 2 else list(reversed(arms))
            found = {arm: seconds_of(arms[arm]) for arm in order}
            found["decode_step_s"] = decode(number)
            if turn >= settings.warmups:
                for arm, seconds in found.items():
                    times[arm].append(seconds)
        check_rows, look_rows = rows(5, "here", earlier), rows(5, "look", None)
    median = {arm: statistics.median(values) for arm, values in times.items()}
    for arm, value in median.items():
        say(f"{arm:<14} {value:8.4f} s   from {min(times[arm]):.4f} to {max(times[arm]):.4f} in {len(times[arm])} runs")
    # Pairs of one round, so that a slow moment of the machine is in both
    check_s, look_s, gate_s = (
        statistics.median(b - a for a, b in zip(times[without], times[with_it], strict=True))
        for without, with_it in zip(ARMS[::2], ARMS[1::2], strict=True)
    )
    result: dict[str, Any] = {
        **asdict(settings),
        **describe_run(settings.device),
        **median,
        "check_s": check_s,
        "check_rows": check_rows,
        "check_steps": check_s / median["decode_step_s"],
        "look_s": look_s,
        "look_rows": look_rows,
        "look_steps": look_s / median["decode_step_s"],
        "gated_check_steps": gate_s / median["decode_step_s"],
    }
    return dict(rounded(result))
