"""Plain transformers, which the benchmarks and the demo compare with."""

from __future__ import annotations

from typing import Any

__all__ = ["plain_inputs"]


def plain_inputs(processor: Any, chat: list[dict[str, Any]]) -> Any:
    """What a processor makes of a chat for `model.generate`."""
    return processor.apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
