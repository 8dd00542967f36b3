"""The transformers adapter: one prompt run layer by layer through a model's own modules.

Layers are run part by part (norms, projections, attention, MLP) instead of through their `forward`, because rows
that are here for the last time need K and V only. Weights, quantised or adapted linear layers and kernels stay the
model's; only the order is ours. The three families differ in the norms on Q and K (Qwen3-VL) and in DeepStack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vlcache.engines.transformers.attention import attend
from vlcache.measure import Gaze
from vlcache.plan import LayerStep
from vlcache.prefill import Queries, at_vision, take
from vlcache.ranges import Ranges, count, pieces, places
from vlcache.types import Geometry, Span

__all__ = ["PromptPass", "run_layer"]


class PromptPass:
    """Fulfils `vlcache.prefill.Adapter` for one prompt.

    Parameters
    ----------
    model : transformers model with `model.language_model`
    geometry : Geometry
    ids : Tensor, int64, `[T]`
    positions : Tensor, int64, `[A, T]`
        Rotary positions.
    spans : sequence of Span
    encoded : sequence of Tensor or None, `[N, hidden * (1 + deepstack)]`
        Encoder outputs of `spans`; None for spans whose rows are never embedded.

    Attributes
    ----------
    keys, values : list of Tensor, `[1, H, T, D]`
        Per layer, allocated here and filled in place.
    """

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        ids: Tensor,
        positions: Tensor,
        spans: Sequence[Span],
        encoded: Sequence[Tensor | None],
    ) -> None:
        self._embeddings = model.get_input_embeddings()
        self._decoder = model.model.language_model
        self._geometry = geometry
        self._spans = tuple(spans)
        weight = self._embeddings.weight
        self._device, self._dtype = weight.device, model.dtype
        self._ids = ids.to(self._device)
        self._encoded = [e if e is None else e.to(self._device, self._dtype) for e in encoded]
        self._cos, self._sin = geometry.rope.cos_sin(positions.to(self._device), self._dtype)
        self._turned: tuple[Ranges, Tensor, Tensor] = ((), self._cos, self._sin)
        self._leader: tuple[PromptPass, int] | None = None
        self._gaze: Gaze | None = None
        shape = (1, geometry.kv_heads, len(ids), geometry.head_dim)
        new = {"device": self._device, "dtype": self._dtype}
        self.keys = [torch.empty(shape, **new) for _ in range(geometry.layers)]
        self.values = [torch.empty(shape, **new) for _ in range(geometry.layers)]

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def fill(self, keys: Sequence[Tensor], values: Sequence[Tensor], stop: int) -> None:
        """Copy the first `stop` tokens of an earlier prompt's K/V, `[1, H, >= stop, D]` per layer."""
        for mine, theirs in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            mine[:, :, :stop] = theirs[:, :, :stop]

    def embed(self, rows: Ranges) -> Tensor:
        hidden: Tensor = self._embeddings(take(self._ids, rows)).to(self._dtype)
        self._at_vision(hidden, rows, 0, add=False)
        return hidden

    def follow(self, leader: PromptPass, stop: int) -> None:
        """Take the first `stop` tokens' K/V from a pass whose prompt begins with the same ones.

        Its layers run with this one's, and it stands before this one in `run_layer`.
        """
        self._leader = (leader, stop)

    def follow_attention(self, gaze: Gaze | None) -> None:
        self._gaze = gaze

    def read_kv(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v = self.keys[layer][0, :, start:stop], self.values[layer][0, :, start:stop]
        return k.transpose(0, 1), v.transpose(0, 1)

    def write_kv(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        stop = start + len(keys)
        self.keys[layer][0, :, start:stop] = keys.transpose(0, 1)
        self.values[layer][0, :, start:stop] = values.transpose(0, 1)

    def _at_vision(self, hidden: Tensor, rows: Ranges, part: int, add: bool) -> None:
        """Set or add the encoder's `part` (0 the embedding, then DeepStack's features) at vision tokens."""
        at_vision(hidden, rows, self._spans, self._encoded, part, add)

    def _write_fresh(self, step: LayerStep, attention: Any, keys: Tensor, values: Tensor) -> None:
        """Norm and turn projected keys `[rows, H * D]`, and write them with their values."""
        keys, values = self._heads(keys), self._heads(values)
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        keys = self._rotated(keys, step.rows)
        for (a, b), (start, _) in zip(pieces(step.rows, step.rows), step.rows, strict=True):
            self.write_kv(step.layer, start, keys[a:b], values[a:b])

    def _copy_from_leader(self, layer: int) -> None:
        if self._leader is not None:
            leader, stop = self._leader
            for mine, its in ((self.keys, leader.keys), (self.values, leader.values)):
                mine[layer][:, :, :stop] = its[layer][:, :, :stop]

    def _attend(self, step: LayerStep, attention: Any, queries: Tensor) -> Tensor:
        """Projected queries `[rows, heads * D]` to what they see, `[rows, heads * D]`."""
        keys, values = self.keys[step.layer][0], self.values[step.layer][0]
        turned = self._queries(attention, queries, step.keep)
        if self._gaze is not None:
            self._gaze.see(step.layer, turned * attention.scaling, keys.transpose(0, 1), step.keep)
        mixed = attend(turned, keys, values, step.keep, attention.scaling)
        return mixed.transpose(0, 1).flatten(1)

    def _queries(self, attention: Any, projected: Tensor, rows: Ranges) -> Tensor:
        """Projected queries of some rows `[rows, heads * D]`, normed and turned: `[heads, rows, D]`."""
        queries = self._heads(projected)
        if hasattr(attention, "q_norm"):
            queries = attention.q_norm(queries)
        return self._rotated(queries, rows).transpose(0, 1)

    def _heads(self, projected: Tensor) -> Tensor:
        """`[rows, heads * D]` to `[rows, heads, D]`."""
        dim = self._geometry.head_dim
        return projected.view(projected.shape[0], projected.shape[1] // dim, dim)

    def _rotated(self, x: Tensor, rows: Ranges) -> Tensor:
        if self._turned[0] != rows:
            self._turned = (rows, take(self._cos, rows)[:, None], take(self._sin, rows)[:, None])
        _, cos, sin = self._turned
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + turned * sin


def run_layer(
    passes: Sequence[PromptPass],
    steps: Sequence[LayerStep],
    hidden: Sequence[Tensor],
    look: Callable[[Queries], Sequence[LayerStep]],
) -> list[Tensor]:
    """`vlcache.prefill.RunLayer` of passes on one model: their rows share each linear layer."""
    module = passes[0]._decoder.layers[steps[0].layer]
    attention = module.self_attn
    sizes = [count(step.rows) for step in steps]
    joined = _joined(hidden)
    normed = module.input_layernorm(joined[None])[0]
    keys, values = (torch.split(project(normed[None])[0], sizes) for project in (attention.k_proj, attention.v_proj))
    for one, step, k, v in zip(passes, steps, keys, values, strict=True):
        one._write_fresh(step, attention, k, v)
    for one in passes:
        one._copy_from_leader(steps[0].layer)
    came = steps

    def queries_of(number: int, rows: Ranges) -> Tensor:
        its = take(torch.split(normed, sizes)[number], places(rows, came[number].rows))
        queries = passes[number]._queries(attention, attention.q_proj(its[None])[0], rows)
        return queries * float(attention.scaling)

    steps = look(queries_of)
    if any(step.keep != step.rows for step in steps):
        stay = [places(step.keep, step.rows) for step in steps]
        joined, normed = (
            _joined([take(part, some) for part, some in zip(torch.split(tensor, sizes), stay, strict=True)])
            for tensor in (joined, normed)
        )
        sizes = [count(step.keep) for step in steps]
    queries = torch.split(attention.q_proj(normed[None])[0], sizes)
    mixed = [one._attend(step, attention, q) for one, step, q in zip(passes, steps, queries, strict=True)]
    joined = joined + attention.o_proj(_joined(mixed)[None])[0]
    joined = joined + module.mlp(module.post_attention_layernorm(joined[None]))[0]
    out = list(torch.split(joined, sizes))
    for one, step, rows in zip(passes, steps, out, strict=True):
        if step.layer < one.geometry.deepstack:
            one._at_vision(rows, step.keep, 1 + step.layer, add=True)
    return out


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
