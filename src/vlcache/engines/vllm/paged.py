"""vLLM's paged K/V: reading and writing one request's tokens, and attention over runs of its rows.

Every attention backend lays a block out as its kernels like it. Writing goes through the backend's own operation. What
that does with a block is learned once, by writing numbers into a scratch block and seeing where they come to lie, and
reading goes the same way back:

    token 0 .. 15, head, dim   -- the backend's write -->   places in the block   -- gather -->   token, head, dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlcache.ranges import Ranges, count, indices

__all__ = ["PagedKV", "Table", "UnreadableLayoutError"]

# Numbers that every dtype holds exactly
_BASE = 64


class UnreadableLayoutError(Exception):
    """A block cannot be read back as it was written."""


@dataclass(frozen=True, slots=True)
class Table:
    """Where a request's tokens lie: its blocks, in order, and tokens per block."""

    blocks: tuple[int, ...]
    size: int

    def slots(self, rows: Ranges) -> list[int]:
        """Of each row, counted over all blocks."""
        return [self.blocks[row // self.size] * self.size + row % self.size for row in indices(rows)]


class PagedKV:
    """The paged K/V of all layers of one worker.

    Parameters
    ----------
    attentions : sequence
        vLLM's attention layers, first to last.
    caches : sequence of Tensor
        Their K/V tensors.
    builder : AttentionMetadataBuilder
        The backend's.
    block_size : int
        Tokens in a block.

    Raises
    ------
    UnreadableLayoutError
        What is written does not come back.
    """

    def __init__(self, attentions: Sequence[Any], caches: Sequence[Tensor], builder: Any, block_size: int) -> None:
        self._attentions = attentions
        self._caches = caches
        self._builder = builder
        self.block_size = block_size
        self.heads, self.head_dim = attentions[0].num_kv_heads, attentions[0].head_size
        (self._block_axis,) = _block_axes(caches[0], builder, block_size)
        self._latest: tuple[Any, Any] = (None, None)
        self._places = [self._learn(which) for which in (0, 1)]
        self._check()

    @property
    def device(self) -> torch.device:
        return self._caches[0].device

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put K and V, `[n, H, D]`, into slots, int64 `[n]`."""
        attention = self._attentions[layer]
        attention.impl.do_kv_cache_update(attention, keys.contiguous(), values.contiguous(), self._caches[layer], slots)

    def read(self, layer: int, table: Table, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies of K and V of a request's tokens, `[stop - start, H, D]` each."""
        size = self.block_size
        first = start // size
        blocks = torch.tensor(table.blocks[first : -(-stop // size)], device=self.device)
        held = self._caches[layer].movedim(self._block_axis, 0)[blocks].flatten(1)
        shape = (len(blocks) * size, self.heads, self.head_dim)
        a, b = start - first * size, stop - first * size
        keys, values = (held[:, places].view(shape)[a:b] for places in self._places)
        return keys, values

    def attend(self, layer: int, queries: Tensor, metadata: Any) -> Tensor:
        """What rows of several requests see, `[n, heads * D]`; their K/V and all before are in place.

        Parameters
        ----------
        queries : Tensor, `[n, heads, D]`
        metadata
            See `metadata`.
        """
        attention = self._attentions[layer]
        out = queries.new_empty(queries.shape)
        attention.impl.forward(attention, queries, None, None, self._caches[layer], metadata, out)
        return out.flatten(1)

    def metadata(self, tables: tuple[Table, ...], rows: tuple[Ranges, ...]) -> Any:
        """`_metadata`, once for layers that have the same rows."""
        if self._latest[0] != (tables, rows):
            self._latest = ((tables, rows), self._metadata(tables, rows))
        return self._latest[1]

    def _metadata(self, tables: Sequence[Table], rows: Sequence[Ranges]) -> Any:
        """The backend's attention metadata of some rows of several requests.

        Every run of rows stands as a request of its own on its request's blocks: the run is its queries, and all that
        is before the run's end its context. So plain causal attention is exact, on any backend.
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        runs = [(table, run) for table, its in zip(tables, rows, strict=True) for run in its]
        lengths = [stop - start for _, (start, stop) in runs]
        ends = [stop for _, (_, stop) in runs]
        where = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seen = torch.tensor(ends, dtype=torch.int32)
        blocks = torch.zeros(len(runs), max(-(-end // self.block_size) for end in ends), dtype=torch.int32)
        for line, (table, (_, stop)) in zip(blocks, runs, strict=True):
            its = table.blocks[: -(-stop // self.block_size)]
            line[: len(its)] = torch.tensor(its, dtype=torch.int32)
        slots = [slot for table, its in zip(tables, rows, strict=True) for slot in table.slots(its)]
        common = CommonAttentionMetadata(
            query_start_loc=where.to(self.device),
            query_start_loc_cpu=where,
            seq_lens=seen.to(self.device),
            num_reqs=len(runs),
            num_actual_tokens=sum(map(count, rows)),
            max_query_len=max(lengths),
            max_seq_len=max(ends),
            block_table_tensor=blocks.to(self.device),
            slot_mapping=torch.tensor(slots, device=self.device),
            causal=True,
            seq_lens_cpu_upper_bound=seen,
        )
        return self._builder.build(0, common)

    def _learn(self, which: int) -> Tensor:
        """Where the backend puts K (0) or V (1) of a block: for every token, head and dimension the place in the
        flattened block, int64 `[block_size * H * D]`."""
        shape = (self.block_size, self.heads, self.head_dim)
        numbers = torch.arange(shape[0] * shape[1] * shape[2], device=self.device)
        found, place = torch.zeros((), dtype=torch.int64, device=self.device), 1
        scratch = self._scratch()
        while place <= len(numbers):
            digits = (numbers // place % _BASE + 1).view(shape).to(scratch.dtype)
            pair = [torch.zeros_like(digits), torch.zeros_like(digits)]
            pair[which] = digits
            scratch.zero_()
            self._write_scratch(scratch, *pair)
            block = scratch.movedim(self._block_axis, 0).flatten()
            found = found + place * (block.long() - 1)
            written, place = block != 0, place * _BASE
        where = torch.full((len(numbers),), -1, device=self.device)
        at = written.nonzero()[:, 0]
        if len(at) != len(numbers) or int(found[at].min()) < 0 or int(found[at].max()) >= len(numbers):
            raise UnreadableLayoutError(f"a block of {self._caches[0].dtype} does not hold what was written")
        where[found[at]] = at
        return where

    def _check(self) -> None:
        """What is written comes back, bit by bit."""
        scratch = self._scratch()
        shape = (self.block_size, self.heads, self.head_dim)
        generator = torch.Generator().manual_seed(0)
        keys, values = (torch.randn(shape, generator=generator).to(scratch) for _ in range(2))
        self._write_scratch(scratch, keys, values)
        block = scratch.movedim(self._block_axis, 0).flatten()
        for places, wanted in zip(self._places, (keys, values), strict=True):
            if not torch.equal(block[places].view(shape), wanted):
                raise UnreadableLayoutError(f"a block of {scratch.dtype} does not come back as it was written")

    def _scratch(self) -> Tensor:
        shape = list(self._caches[0].shape)
        shape[self._block_axis] = 1
        return self._caches[0].new_zeros(shape)

    def _write_scratch(self, scratch: Tensor, keys: Tensor, values: Tensor) -> None:
        attention = self._attentions[0]
        slots = torch.arange(self.block_size, device=self.device)
        attention.impl.do_kv_cache_update(attention, keys, values, scratch, slots)


def _block_axes(cache: Tensor, builder: Any, block_size: int) -> list[int]:
    """The axis that counts blocks: the one whose index alone reaches block_size tokens' K and V."""
    spec = builder.kv_cache_spec
    one = 2 * block_size * spec.num_kv_heads * spec.head_size
    axes = [axis for axis, size in enumerate(cache.shape) if size * one == cache.numel()]
    if len(axes) != 1:
        raise UnreadableLayoutError(f"no axis of K/V {tuple(cache.shape)} counts blocks")
    return axes
