"""The worker's side: filling requests on stored K/V, and making entries of what vLLM has computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vlcache.capture import Checkpoints, capture
from vlcache.context import compare, contexts
from vlcache.engines.vllm.adapter import PagedPass, run_layer
from vlcache.engines.vllm.checkpoint import Checkpoint
from vlcache.engines.vllm.identity import identifier
from vlcache.engines.vllm.messages import Asked, Load, Save
from vlcache.engines.vllm.paged import PagedKV, Table
from vlcache.engines.vllm.shared import Shared
from vlcache.keys import digest_tenant
from vlcache.lookup import Found, find, keep, pinned
from vlcache.plan import make_plan
from vlcache.policies import Evidence, Full, Policy
from vlcache.prefill import Job, place
from vlcache.types import Entry, EntryKey, EntryLostError, Header, Span
from vlcache.verify import Done, checked_prefill

__all__ = ["Worker", "looks_behind"]

# Encoder outputs of pictures that were encoded here, until their entries are made
_MADE = 64


def looks_behind(policy: Policy, layers: int) -> bool:
    """Whether it takes the text behind the pictures to say what is computed of them."""
    look = policy.look(layers)
    return policy.check is not None or (look is not None and look.what == "attention")


class Worker:
    """One worker's model, paged K/V and store.

    Parameters
    ----------
    model : vLLM model
    checkpoint : Checkpoint
    kv : PagedKV
    shared : Shared
    policy_of : callable
        A policy as it is written, empty for the configured one.
    """

    def __init__(
        self, model: Any, checkpoint: Checkpoint, kv: PagedKV, shared: Shared, policy_of: Callable[[str], Policy]
    ) -> None:
        self._model = model
        self._decoder = model.language_model.model
        self._checkpoint = checkpoint
        self._geometry = checkpoint.geometry
        self._kv = kv
        self._shared = shared
        self._policy_of = policy_of
        self._made: OrderedDict[str, Tensor] = OrderedDict()
        self._dtype = self._decoder.layers[0].input_layernorm.weight.dtype

    @torch.inference_mode()
    def load(self, loads: Sequence[Load]) -> tuple[list[Done], list[Load]]:
        """Fill requests side by side; what was done, and those that could not be."""
        headers = [header for one in loads for header in self.headers(one.asked.spans)]
        with pinned(self._shared.store, headers):
            jobs = {number: job for number, one in enumerate(loads) if (job := self._job(one)) is not None}
            try:
                done = self._run(list(jobs.values())) if jobs else []
            except EntryLostError:  # while it was used, by some of them
                return [], list(loads)
        return done, [one for number, one in enumerate(loads) if number not in jobs]

    @torch.inference_mode()
    def save(self, saves: Sequence[Save]) -> tuple[str, ...]:
        """Make entries; the store's faults."""
        faults: tuple[str, ...] = ()
        for one in saves:
            faults += keep(self._shared.store, self._entries(one))
        return faults

    def headers(self, spans: Sequence[Span]) -> list[Header]:
        tenant = digest_tenant(self._shared.config.cache_salt)
        return [
            Header(
                key=EntryKey(span.content, self._shared.scope),
                grid=span.grid,
                tokens=span.length,
                dtype=str(self._dtype),
                geometry=self._geometry,
                model=self._checkpoint.fingerprint,
                processor=self._checkpoint.processor,
                tenant=tenant,
            )
            for span in spans
        ]

    def _job(self, load: Load) -> Job | None:
        """None where a picture that was counted on is not to be had."""
        asked = load.asked
        headers = self.headers(asked.spans)
        found = find(self._shared.store, headers)
        reused = [asked.spans[number] for number in sorted(load.reused)]
        if not all(s.content in found.entries and found.entries[s.content].has_kv for s in reused):
            return None
        positions = self._positions(asked)
        encoded = [self._encoded(number, span, load, found) for number, span in enumerate(asked.spans)]
        where = dict(zip(asked.spans, self._contexts(asked), strict=True))
        known = [self._evidence(found.entries[s.content], where[s]) for s in reused]
        layers, policy = self._geometry.layers, self._policy_of(load.policy)
        wanted = 1 if looks_behind(policy, layers) else 0
        plan = make_plan(policy, reused, known, 0, load.end, layers, wanted).behind(load.begin)
        placed = [
            place(found.entries[s.span.content], s.span, positions[:, s.span.start : s.span.stop], self._geometry.rope)
            for s in plan.spans
        ]
        return Job(self._pass(asked, positions, encoded), plan, placed, policy)

    def _pass(self, asked: Asked, positions: Tensor, encoded: Sequence[Tensor | None]) -> PagedPass:
        table = Table(asked.blocks, self._kv.block_size)
        ids = torch.tensor(asked.ids)
        return PagedPass(self._decoder, self._geometry, self._kv, table, ids, positions, asked.spans, encoded)

    def _run(self, jobs: Sequence[Job]) -> list[Done]:
        passes: list[Any] = [job.adapter for job in jobs]

        def logits(hidden: Sequence[Tensor]) -> Sequence[Tensor]:
            joined = torch.cat(list(hidden))
            if not len(joined):
                return [joined] * len(hidden)
            return torch.split(self._model.compute_logits(self._decoder.norm(joined)), [len(rows) for rows in hidden])

        return checked_prefill(jobs, lambda numbers: partial(run_layer, [passes[n] for n in numbers]), logits)

    def _encoded(self, number: int, span: Span, load: Load, found: Found) -> Tensor | None:
        """None outside of what is filled."""
        if span.stop <= load.begin or span.start >= load.end:
            return None
        if span.content in found.entries:
            return found.entries[span.content].encoder
        held = self._shared.encoder_cache.get(identifier(span.content))
        if held is not None:
            return held
        if span.content in self._made:
            return self._made[span.content]
        item = load.pixels[number]
        (encoded,) = self._model.embed_multimodal(
            pixel_values=item["pixel_values"].data.to(self._kv.device, self._dtype),
            image_grid_thw=item["image_grid_thw"].data[None],
        )
        self._made[span.content] = encoded
        if len(self._made) > _MADE:
            self._made.popitem(last=False)
        return encoded  # type: ignore[no-any-return]

    def _entries(self, save: Save) -> Iterator[Entry]:
        asked = save.asked
        spans = [asked.spans[number] for number in save.numbers]
        held = [
            self._made.pop(span.content, None)
            if span.content in self._made
            else self._shared.encoder_cache.get(identifier(span.content))
            for span in spans
        ]
        positions, where = self._positions(asked), self._contexts(asked)
        plan = make_plan(Full(), [], [], 0, max(span.stop for span in spans), self._geometry.layers)
        yield from capture(
            self._pass(asked, positions, [None] * len(asked.spans)),
            plan,
            spans,
            self.headers(spans),
            held,
            positions,
            {},
            Checkpoints(plan, ()),
            [where[number] for number in save.numbers],
        )

    def _contexts(self, asked: Asked) -> Any:
        ids = torch.tensor(asked.ids)
        return contexts(ids, asked.spans, self._checkpoint.marks, self._shared.scope)

    def _evidence(self, entry: Entry, here: Any) -> Evidence:
        return Evidence(self._geometry.layers, tuple(sorted(entry.checkpoints)), compare(entry.context, here))

    def _positions(self, asked: Asked) -> Tensor:
        """Rotary positions, int64 `[A, T]`."""
        positions, _ = self._model.get_mrope_input_positions(list(asked.ids), _features(asked.spans))
        return positions.to(self._kv.device)  # type: ignore[no-any-return]


def _features(spans: Sequence[Span]) -> list[Any]:
    """vLLM's description of pictures, without the pictures."""
    return [
        SimpleNamespace(
            modality="image",
            data={"image_grid_thw": SimpleNamespace(data=torch.tensor(span.grid))},
            mm_position=SimpleNamespace(offset=span.start, length=span.length),
        )
        for span in spans
    ]
