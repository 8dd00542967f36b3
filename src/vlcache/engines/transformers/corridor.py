"""The corridor that every request of a cache walks through.

spans -> lookup -> plan -> selective prefill -> store -> report
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vlcache.capture import capture, token_seconds
from vlcache.config import Config
from vlcache.context import compare, contexts
from vlcache.engines.transformers.adapter import PromptPass
from vlcache.engines.transformers.encoder import encode
from vlcache.engines.transformers.neutral import neutral_entry, opening
from vlcache.engines.transformers.pictures import Media
from vlcache.engines.transformers.prompt import Prompt, turn_marks, vision_tokens
from vlcache.engines.transformers.request import Request
from vlcache.engines.transformers.run import Scored, run_plans
from vlcache.engines.transformers.support import describe
from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.exact import ExactPrefix, ExactPrefixes, cut
from vlcache.keys import digest_tenant, scope
from vlcache.lookup import Found, find, keep, pinned, reusable
from vlcache.plan import make_plan
from vlcache.policies import Evidence, Policy
from vlcache.report import Clock, Counters, report_prompt
from vlcache.store import Store
from vlcache.types import Context, Entry, EntryKey, EntryLostError, Header, Span
from vlcache.worth import Worth

__all__ = ["Corridor"]


class Corridor:
    """What a cache knows of its model, and how a prompt is filled with it. Not safe to use from several threads.

    Parameters
    ----------
    checkpoint_layers : collection of int
        Layers whose input hidden states entries keep.

    Raises
    ------
    UnsupportedModelError, ConfigError
        A model that is not supported, or has fewer layers.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        weights: WeightsWatch,
        config: Config,
        store: Store,
        worth: Worth,
        counters: Counters,
        checkpoint_layers: Collection[int],
    ) -> None:
        self.model = model
        self.geometry = describe(model)
        self.checkpoint_layers = tuple(sorted(set(checkpoint_layers)))
        self.marks = turn_marks(model, processor)
        self.store = store
        self.counters = counters
        self.prefixes = ExactPrefixes(int(config.prefix_gb * 1e9) if config.prefix_cache else 0)
        self._processor = processor
        self._weights = weights
        self._config = config
        self._worth = worth
        self._fingerprint = ""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @cached_property
    def _opening(self) -> Tensor:
        return opening(self._processor)

    def check_weights(self) -> bool:
        """Look at the model again if its weights are no longer those that it had; True if so."""
        changed = self._weights.changed()
        if changed:
            self.geometry = describe(self.model)
            self._fingerprint = self._weights.fingerprint()
            self.prefixes.clear()
        return changed

    def evidence(self, entry: Entry, here: Context) -> Evidence:
        """What rules may know of a picture that stands behind `here`."""
        return Evidence(self.geometry.layers, tuple(sorted(entry.checkpoints)), compare(entry.context, here))

    def capture(self, media: Media, settings: str) -> bool:
        """Capture a picture behind the template's opening; False if it has been before."""
        span = Span(media.content, 0, vision_tokens(self.model, media.grid), media.grid)
        header = self.header(span, settings)
        found = find(self.store, [header])
        entry = found.entries.get(span.content)
        lacks = entry is not None and not set(self.checkpoint_layers) <= set(entry.checkpoints)
        if entry is not None and entry.capture == "neutral" and not lacks:
            return False
        (encoded,) = self.encode([span], [media], found, 0)
        assert encoded is not None
        faults = keep(self.store, [self.neutral(header, encoded)])
        self.counters.reject(found.rejects + faults)
        return True

    def run(
        self, prompts: Sequence[Prompt], read: Request, policies: Sequence[Policy], clock: Clock, wanted: Sequence[int]
    ) -> tuple[PromptPass, list[list[Scored]]]:
        """Fill the K/V of prompts, which differ behind their pictures only, under each policy.

        Returns a pass over the first one, and by prompt and policy the logits of its last `wanted` rows.
        """
        lost: set[EntryKey] = set()
        while True:
            try:
                return self._attempt(prompts, read, policies, clock, wanted, lost)
            except EntryLostError as error:  # found damaged while it was used: start again as if it were not there
                lost.add(error.key)
                clock.lose()
                self.counters.reject([error.reason])

    def _attempt(
        self,
        prompts: Sequence[Prompt],
        read: Request,
        policies: Sequence[Policy],
        clock: Clock,
        wanted: Sequence[int],
        lost: Collection[EntryKey],
    ) -> tuple[PromptPass, list[list[Scored]]]:
        first, layers = prompts[0], self.geometry.layers
        headers = [self.header(span, read.settings) for span in first.spans]
        with pinned(self.store, headers):
            with clock.stage("lookup"):
                found = find(self.store, headers, lost)
                prefix, begin = self.prefixes.longest(first.ids[: len(first.ids) - wanted[0]], first.spans)
                if len(prompts) > 1:
                    begin = min(begin, first.spans[-1].stop)
                reused = reusable(first.spans, found.entries, begin)
                where = dict(
                    zip(first.spans, contexts(first.ids, first.spans, self.marks, headers[0].key.scope), strict=True)
                )
                known = [self.evidence(found.entries[s.content], where[s]) for s in reused]
                plans = [
                    [make_plan(policy, reused, known, begin, len(prompt.ids), layers, n) for policy in policies]
                    for prompt, n in zip(prompts, wanted, strict=True)
                ]
            with clock.stage("encode"):
                encoded = self.encode(first.spans, read.media, found, begin)
            with clock.stage("prefill"):
                ran = run_plans(
                    self.model,
                    self.geometry,
                    prompts,
                    encoded,
                    plans,
                    policies,
                    found.entries,
                    prefix,
                    self.checkpoint_layers,
                )
                _synchronize(self.device)
        with clock.stage("store"):
            token_s = 0.0, 0.0
            if len(plans) == len(plans[0]) == 1:  # otherwise the seconds are not this plan's
                new_tokens, token_s = token_seconds(ran.done[0][0].passes, first.spans, found.entries, clock.seconds)
                self._worth.computed(new_tokens, new_tokens * sum(token_s))
            new: Iterable[Entry] = capture(
                ran.work,
                ran.plan,
                first.spans,
                headers,
                encoded,
                first.positions,
                found.entries,
                ran.watch,
                list(where.values()),
                token_s,
            )
            if self._config.capture == "neutral":
                new = (self.neutral(entry.header, entry.encoder) for entry in new)
            faults = keep(self.store, new)
            self._keep_prefix(first, ran.plan.begin, ran.exact_until, ran.work)
        self.counters.reject(found.rejects + faults)
        token_bytes = 2 * self.geometry.kv_heads * self.geometry.head_dim * self.model.dtype.itemsize
        scored = [
            [
                Scored(
                    one.logits,
                    report_prompt(
                        policy.name, one.passes, first.spans, found.entries, clock.seconds, token_bytes, one.verdict
                    ),
                )
                for policy, one in zip(policies, its, strict=True)
            ]
            for its in ran.done
        ]
        for one in (one for some in scored for one in some):
            self.counters.add(one.report)
        return ran.work, scored

    def neutral(self, header: Header, encoded: Tensor) -> Entry:
        layers = self.checkpoint_layers
        return neutral_entry(self.model, self.geometry, self._opening, header, encoded, layers, self.marks)

    def header(self, span: Span, settings: str) -> Header:
        dtype, tenant = str(self.model.dtype), digest_tenant(self._config.cache_salt)
        return Header(
            key=EntryKey(span.content, scope(self._fingerprint, dtype, tenant)),
            grid=span.grid,
            tokens=span.length,
            dtype=dtype,
            geometry=self.geometry,
            model=self._fingerprint,
            processor=settings,
            tenant=tenant,
        )

    def encode(self, spans: Sequence[Span], media: Sequence[Media], found: Found, begin: int) -> list[Tensor | None]:
        """Encoder output of every span; None for those in the exact prefix that nobody has to embed."""
        outputs = {content: entry.encoder for content, entry in found.entries.items()}
        pairs = zip(spans, media, strict=True)
        new = {span.content: m for span, m in pairs if span.content not in outputs and span.start >= begin}
        outputs |= encode(self.model, new)
        self.counters.encoded += len(new)
        return [outputs.get(span.content) for span in spans]

    def _keep_prefix(self, prompt: Prompt, begin: int, exact: int, work: PromptPass) -> None:
        if exact > begin and self.prefixes.capacity_bytes:
            spans = tuple(s for s in prompt.spans if s.stop <= exact)
            keys, values = ([cut(t, exact) for t in kv] for kv in (work.keys, work.values))
            self.prefixes.put(ExactPrefix(prompt.ids[:exact].clone(), spans, keys, values))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
