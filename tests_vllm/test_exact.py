"""With everything recomputed vLLM's answers are those without the plugin; with less they are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import BLOCK, Engine, close, picture, prompt
from reference import Recording, Reused, picture_runs, record, replay

A, B, C = picture(0), picture(1, 480, 320), picture(2, 280, 392)
LONG = "You are a careful assistant. " * 12


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    engine.forget()
    return engine


CASES = {
    "shifted": ([prompt("[]what?", [A], "first")], prompt("[]what is it?", [A], "a much longer other context")),
    "long prefix": ([prompt("[]what?", [A], "first")], prompt("[]what is it?", [A], LONG)),
    "two pictures": (
        [prompt("[]what?", [A], "first"), prompt("[]who?", [B], "second")],
        prompt("[]and[]compare", [A, B]),
    ),
    "new between known": (
        [prompt("[]what?", [A], "first"), prompt("[]who?", [B], "second")],
        prompt("[]and[]and[]compare", [A, C, B]),
    ),
    "swapped": ([prompt("[]and[]compare", [A, B], "first")], prompt("[]and[]compare", [B, A])),
    "the same twice": ([prompt("[]what?", [B], "first")], prompt("[]and[]are they one?", [B, B])),
}


@pytest.mark.parametrize("case", CASES)
def test_everything_recomputed_is_vllm_without_the_plugin(fresh: Engine, case: str) -> None:
    before, asked = CASES[case]
    plain = fresh.plain(asked)
    fresh.ask(*before, tokens=1)
    fresh.forget(store=False)
    ours = fresh.ask(asked)
    assert ours[0].cached > BLOCK
    close(ours, plain)


def test_several_requests_at_once(fresh: Engine) -> None:
    asked = [prompt("[]what is it?", [A], LONG), prompt("[]and[]?", [B, C]), prompt("[]which?", [B], "other")]
    plain = fresh.plain(*asked)
    fresh.ask(prompt("[]what?", [A], "first"), prompt("[]who?", [B], "second"), tokens=1)
    fresh.forget(store=False)
    ours = fresh.ask(*asked)
    assert all(one.cached for one in ours)
    close(ours, plain)


@pytest.mark.parametrize("system", ["x" * 20, "x" * (BLOCK - 27), "x" * (2 * BLOCK)])
def test_a_prefix_hit_that_ends_before_at_or_in_a_picture(fresh: Engine, system: str) -> None:
    """The first request leaves exact blocks; the second one begins alike, and reuses what stands behind."""
    first, second = prompt("[]and[]?", [A, B], system), prompt("[]and[]and one!", [A, C], system)
    plain = fresh.plain(second)
    fresh.ask(prompt("[]what?", [C], "other"), prompt("[]what?", [A], "another"), tokens=1)
    fresh.forget(store=False)
    fresh.ask(first, vlcache=False, tokens=1)
    ours = fresh.ask(second)
    assert ours[0].cached >= ours[0].prompt_tokens - 2 * BLOCK
    close(ours, plain)


@pytest.mark.parametrize("ratio", [0.3, 0.1, 0.05])
def test_less_recomputed_is_the_reference(fresh: Engine, ratio: float) -> None:
    import math

    model, processor = plain_model(fresh)
    before, asked = prompt("[]what?", [A], "first"), prompt("[]what is it?", [A], "a much longer other context")
    fresh.ask(before, tokens=1)
    fresh.forget(store=False)
    (ours,) = fresh.ask(asked, vlcache=f"prefix:{ratio},1", tokens=1)
    recording, ((at, n),) = recorded(model, processor, before)
    inputs = processed(processor, asked)
    ((start, _),) = picture_runs(model, inputs)
    computed = [set(range(math.ceil(ratio * n)))] * 4
    logits, _, _ = replay(model, inputs, [Reused(start, n, recording, at, computed)])
    expected = logits.log_softmax(-1)
    assert ours.tokens == [int(expected.argmax())]
    assert ours.logprobs[0] == pytest.approx(float(expected.max()), abs=1e-4)


_MODELS: dict[str, Any] = {}


def plain_model(engine: Engine) -> tuple[Any, Any]:
    if engine.family not in _MODELS:
        import transformers

        model = transformers.AutoModelForImageTextToText.from_pretrained(engine.folder, dtype=torch.float32)
        _MODELS[engine.family] = model.eval(), transformers.AutoProcessor.from_pretrained(engine.folder)
    return _MODELS[engine.family]


def processed(processor: Any, asked: dict[str, Any]) -> dict[str, Any]:
    return dict(processor(text=[asked["prompt"]], images=asked["multi_modal_data"]["image"], return_tensors="pt"))


def recorded(model: Any, processor: Any, asked: dict[str, Any]) -> tuple[Recording, list[tuple[int, int]]]:
    inputs = processed(processor, asked)
    return record(model, inputs), picture_runs(model, inputs)
