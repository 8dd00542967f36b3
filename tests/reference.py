"""A brute-force reference for selective prefill, without any code of the package.

The model's own forward computes every row in every layer with a dense causal mask. Hooks then put what is reused
over what was computed: keys *before* their rotation, so that the model itself rotates them to the new positions;
values; and at a layer where rows enter from a checkpoint, their hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Recording:
    """One forward: keys before rotation, values and layer inputs, each `[layers][T, ...]`."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


@dataclass
class Reused:
    """A picture at prompt tokens `start` on, taken from `recording` at its tokens `source` on.

    computed: per layer the set of the picture's tokens that are not reused but computed.
    """

    start: int
    length: int
    recording: Recording
    source: int
    computed: Sequence[set[int]]


def _layers(model: Any) -> Any:
    return model.model.language_model.layers


def _key_module(layer: Any) -> Any:
    return getattr(layer.self_attn, "k_norm", layer.self_attn.k_proj)


@contextmanager
def _hooks(handles: list[Any]) -> Any:
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@torch.no_grad()
def record(model: Any, inputs: dict[str, Any]) -> Recording:
    out = Recording()
    handles = []
    for layer in _layers(model):
        handles.append(_key_module(layer).register_forward_hook(lambda m, i, o: out.keys.append(o[0].clone())))
        handles.append(layer.self_attn.v_proj.register_forward_hook(lambda m, i, o: out.values.append(o[0].clone())))
        handles.append(
            layer.register_forward_pre_hook(
                lambda m, args, kwargs: out.hidden.append((args[0] if args else kwargs["hidden_states"])[0].clone()),
                with_kwargs=True,
            )
        )
    with _hooks(handles):
        model(**inputs)
    return out


@torch.no_grad()
def replay(model: Any, inputs: dict[str, Any], reused: Sequence[Reused]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits of the last row `[vocabulary]`, and K and V of every layer `[H, T, D]` as attention saw them."""
    handles = []

    def put(number: int, kind: str) -> Any:
        def hook(module: Any, args: Any, out: Tensor) -> Tensor:
            out = out.clone()
            for r in reused:
                source = getattr(r.recording, kind)[number]
                for token in set(range(r.length)) - r.computed[number]:
                    out[0, r.start + token] = source[r.source + token]
            return out

        return hook

    def enter(number: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            hidden = (args[0] if args else kwargs["hidden_states"]).clone()
            for r in reused:
                for token in r.computed[number] - r.computed[number - 1]:
                    hidden[0, r.start + token] = r.recording.hidden[number][r.source + token]
            return ((hidden, *args[1:]), kwargs) if args else (args, dict(kwargs, hidden_states=hidden))

        return hook

    for number, layer in enumerate(_layers(model)):
        handles.append(_key_module(layer).register_forward_hook(put(number, "keys")))
        handles.append(layer.self_attn.v_proj.register_forward_hook(put(number, "values")))
        if number:
            handles.append(layer.register_forward_pre_hook(enter(number), with_kwargs=True))
    with _hooks(handles):
        out = model(**inputs, use_cache=True)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    return out.logits[0, -1], [layer.keys[0] for layer in cache.layers], [layer.values[0] for layer in cache.layers]


def picture_runs(model: Any, inputs: dict[str, Any]) -> list[tuple[int, int]]:
    """Start and length of every picture in a prompt, by its runs of image tokens."""
    runs: list[list[int]] = []
    for index in (inputs["input_ids"][0] == model.config.image_token_id).nonzero().flatten().tolist():
        if runs and sum(runs[-1]) == index:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    return [(start, length) for start, length in runs]
