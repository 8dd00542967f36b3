"""Neutral capture: a picture's K/V behind nothing but the chat template's own opening.

    observed    <system> whatever the first request said <user> and asked [picture]
    neutral     <system> the template's default          <user>           [picture]

Neutral entries are reproducible and carry nobody's words. Each costs a prefill of the picture alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlcache.capture import capture
from vlcache.context import TurnMarks, contexts
from vlcache.engines.transformers.prompt import build_prompt, render
from vlcache.engines.transformers.run import run_plans
from vlcache.plan import make_plan
from vlcache.policies import Full
from vlcache.types import Entry, Geometry, Header

__all__ = ["neutral_entry", "opening"]


def opening(processor: Any) -> Tensor:
    """Token ids of the chat template up to the picture of a chat that begins with one, int64 `[T]`."""
    text = render(processor, [{"role": "user", "content": [{"type": "image"}]}], add_generation_prompt=False)
    ids: Tensor = processor.tokenizer([text.partition(processor.image_token)[0]], return_tensors="pt")["input_ids"][0]
    return ids.long()


def neutral_entry(
    model: Any,
    geometry: Geometry,
    before: Tensor,
    header: Header,
    encoded: Tensor,
    checkpoint_layers: Sequence[int],
    marks: TurnMarks,
) -> Entry:
    """Prefill a picture behind the template's opening.

    Parameters
    ----------
    before : Tensor, int64, `[T]`
        See `opening`.
    header : Header
        Of the picture.
    encoded : Tensor, `[N, hidden * (1 + deepstack)]`
        Its encoder output.
    marks : TurnMarks
    """
    start = time.perf_counter()
    vision = before.new_full((header.tokens,), model.config.image_token_id)
    prompt = build_prompt(model, torch.cat((before, vision)), [header.key.content], [header.grid])
    policy = Full()
    plan = make_plan(policy, [], [], 0, len(prompt.ids), geometry.layers)
    ran = run_plans(model, geometry, [prompt], [encoded], [[plan]], [policy], {}, None, checkpoint_layers)
    where = contexts(prompt.ids, prompt.spans, marks, header.key.scope)
    (entry,) = capture(ran.work, plan, prompt.spans, [header], [encoded], prompt.positions, {}, ran.watch, where)
    return replace(entry, capture="neutral", cost_s=time.perf_counter() - start)
