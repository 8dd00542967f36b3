"""The vLLM adapter: prompts run layer by layer through vLLM's own modules, on its paged K/V.

As in the transformers adapter a layer runs part by part, because rows that are here for the last time need K and V
only. Linear layers, norms, rotary embeddings, tensor parallelism and the attention kernel are vLLM's; only the order
is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vlcache.engines.vllm.paged import PagedKV, Table
from vlcache.measure import Gaze
from vlcache.plan import LayerStep
from vlcache.prefill import Queries, at_vision, take
from vlcache.ranges import Ranges, count, indices, places
from vlcache.types import Geometry, Span

__all__ = ["PagedPass", "run_layer"]


class PagedPass:
    """Fulfils `vlcache.prefill.Adapter` for one request.

    Parameters
    ----------
    decoder : vLLM's decoder, with `embed_tokens` and `layers`
    geometry : Geometry
        Of the whole model; of its heads the paged K/V may hold a part.
    kv : PagedKV
    table : Table
        The request's blocks.
    ids : Tensor, int64, `[T]`
    positions : Tensor, int64, `[A, T]`
        Rotary positions.
    spans : sequence of Span
    encoded : sequence of Tensor or None, `[N, hidden * (1 + deepstack)]`
        Encoder outputs of `spans`; None for spans whose rows are never embedded.
    first_head : int
        Of the K/V heads that this worker holds.
    """

    def __init__(
        self,
        decoder: Any,
        geometry: Geometry,
        kv: PagedKV,
        table: Table,
        ids: Tensor,
        positions: Tensor,
        spans: Sequence[Span],
        encoded: Sequence[Tensor | None],
        first_head: int = 0,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self.table = table
        self._geometry = geometry
        self._spans = tuple(spans)
        device, dtype = kv.device, decoder.layers[0].input_layernorm.weight.dtype
        self._dtype = dtype
        self._ids = ids.to(device)
        self._positions = positions.to(device)
        self._encoded = [e if e is None else e.to(device, dtype) for e in encoded]
        self._heads = slice(first_head, first_head + kv.heads)
        self.gaze: Gaze | None = None

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def embed(self, rows: Ranges) -> Tensor:
        # At vision tokens, whose ids some models keep outside of the vocabulary, the encoder's output takes its place
        text = take(self._ids, rows).clamp(max=self.decoder.config.vocab_size - 1)
        hidden: Tensor = self.decoder.embed_tokens(text).to(self._dtype)
        self.at_vision(hidden, rows, 0, add=False)
        return hidden

    def read_kv(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.kv.read(layer, self.table, start, stop)

    def write_kv(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        mine = keys[:, self._heads], values[:, self._heads]
        self.kv.write(layer, self.slots(((start, start + len(keys)),)), *mine)

    def follow_attention(self, gaze: Gaze | None) -> None:
        self.gaze = gaze

    def slots(self, rows: Ranges) -> Tensor:
        return torch.tensor(self.table.slots(rows), dtype=torch.int64, device=self.kv.device)

    def positions(self, rows: Ranges) -> Tensor:
        """Rotary positions of some rows, `[A, rows]`."""
        return self._positions[:, torch.tensor(indices(rows), dtype=torch.int64, device=self.kv.device)]

    def at_vision(self, hidden: Tensor, rows: Ranges, part: int, add: bool) -> None:
        """Set or add the encoder's `part` (0 the embedding, then DeepStack's features) at vision tokens."""
        at_vision(hidden, rows, self._spans, self._encoded, part, add)


def run_layer(
    passes: Sequence[PagedPass],
    steps: Sequence[LayerStep],
    hidden: Sequence[Tensor],
    look: Callable[[Queries], Sequence[LayerStep]],
) -> list[Tensor]:
    """`vlcache.prefill.RunLayer` of requests on one worker: their rows share each linear layer."""
    kv, number = passes[0].kv, steps[0].layer
    if not any(step.rows for step in steps):
        return [its[:0] for its in hidden]
    module = passes[0].decoder.layers[number]
    attention = module.self_attn
    came = steps
    joined = torch.cat(list(hidden))
    queries, keys, values = _project(passes, came, attention, module.input_layernorm(joined))
    slots = torch.cat([one.slots(step.rows) for one, step in zip(passes, came, strict=True)])
    kv.write(number, slots, keys, values)
    sizes = [count(step.rows) for step in came]

    def queries_of(which: int, rows: Ranges) -> Tensor:
        its = torch.split(queries, sizes)[which]
        return take(its, places(rows, came[which].rows)).transpose(0, 1) * float(attention.scaling)

    steps = look(queries_of)
    if any(step.keep != step.rows for step in steps):
        joined, queries = (
            torch.cat(
                [
                    take(part, places(step.keep, step.rows))
                    for part, step in zip(torch.split(tensor, sizes), steps, strict=True)
                ]
            )
            for tensor in (joined, queries)
        )
    kept = [step.keep for step in steps]
    for one, its, step in zip(passes, torch.split(queries, list(map(count, kept))), steps, strict=True):
        if one.gaze is not None:
            seen, _ = one.read_kv(number, 0, step.keep[-1][1])
            one.gaze.see(number, its.transpose(0, 1) * float(attention.scaling), seen, step.keep)
    if not len(joined):
        return [its[:0] for its in hidden]
    mixed = kv.attend(number, queries, kv.metadata(tuple(one.table for one in passes), tuple(kept)))
    joined = joined + attention.o_proj(mixed)[0]
    joined = joined + module.mlp(module.post_attention_layernorm(joined))
    out = list(torch.split(joined, list(map(count, kept))))
    for one, step, rows in zip(passes, steps, out, strict=True):
        if number < one.geometry.deepstack:
            one.at_vision(rows, step.keep, 1 + number, add=True)
    return out


def _project(
    passes: Sequence[PagedPass], steps: Sequence[LayerStep], attention: Any, normed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of the steps' rows, normed and turned: `[rows, heads, D]` each, of this worker's heads."""
    qkv, _ = attention.qkv_proj(normed)
    dim = attention.head_dim
    queries, keys, values = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    if hasattr(attention, "q_norm"):
        queries = attention.q_norm(queries.reshape(len(qkv), -1, dim)).flatten(1)
        keys = attention.k_norm(keys.reshape(len(qkv), -1, dim)).flatten(1)
    positions = torch.cat([one.positions(step.rows) for one, step in zip(passes, steps, strict=True)], dim=1)
    queries, keys = attention.rotary_emb(positions, queries.contiguous(), keys.contiguous())
    return queries.view(len(qkv), -1, dim), keys.view(len(qkv), -1, dim), values.reshape(len(qkv), -1, dim)
