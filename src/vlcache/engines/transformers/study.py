"""A prompt with known pictures, run under any rules side by side: what measurements are made of.

Nothing is stored, counted or reported; the passes with all their K/V are handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlcache.context import contexts
from vlcache.engines.transformers.adapter import PromptPass
from vlcache.engines.transformers.cache import VLCache
from vlcache.engines.transformers.corridor import Corridor
from vlcache.engines.transformers.prompt import Prompt, longer
from vlcache.engines.transformers.request import read_request
from vlcache.engines.transformers.run import run_jobs
from vlcache.errors import InputError
from vlcache.lookup import find
from vlcache.plan import make_plan
from vlcache.policies import Evidence, Policy
from vlcache.prefill import Job, Placed, place
from vlcache.report import Clock
from vlcache.types import Entry
from vlcache.verify import Done

__all__ = ["Study", "study"]


@dataclass(frozen=True, slots=True)
class Study:
    """See the module.

    Attributes
    ----------
    corridor : Corridor
        Of the cache.
    prompt : Prompt
        With the continuation but its last token behind it.
    wanted : int
        Its last rows whose logits are computed: one for each token of the continuation.
    placed : tuple of Placed
        Its pictures' entries, moved.
    known : tuple of Evidence
        What rules may know of them.
    """

    corridor: Corridor
    prompt: Prompt
    wanted: int
    placed: tuple[Placed, ...]
    known: tuple[Evidence, ...]

    def run(
        self, policies: Sequence[Policy], stale: Mapping[int, frozenset[int]] | None = None
    ) -> list[tuple[Done, PromptPass]]:
        """Fill the prompt under each rule.

        Parameters
        ----------
        stale : mapping of int to frozenset of int, optional
            By place in `policies`, see `vlcache.prefill.Job`.
        """
        model, geometry, prompt = self.corridor.model, self.corridor.geometry, self.prompt
        encoded = [placed.entry.encoder for placed in self.placed]
        spans, layers, end = [placed.span for placed in self.placed], geometry.layers, len(prompt.ids)
        jobs, passes = [], []
        for number, policy in enumerate(policies):
            work = PromptPass(model, geometry, prompt.ids, prompt.positions, prompt.spans, encoded)
            plan = make_plan(policy, spans, self.known, 0, end, layers, self.wanted)
            jobs.append(Job(work, plan, self.placed, policy, stale=(stale or {}).get(number, frozenset())))
            passes.append(work)
        with torch.no_grad():
            done = run_jobs(model, jobs, passes)
        return list(zip(done, passes, strict=True))


def study(cache: VLCache, request: Any, continuation: Sequence[int]) -> Study:
    """Look a request up in a cache that knows all its pictures.

    Raises
    ------
    InputError
        One of them is not known.
    """
    corridor = cache._corridor
    read = read_request(request, {}, corridor.model, cache._processor, cache._reader, Clock())
    if read.prompt is None:
        raise InputError("the prompt has no picture")
    prompt = longer(read.prompt, continuation[:-1])
    headers = [corridor.header(span, read.settings) for span in prompt.spans]
    entries: Mapping[str, Entry] = find(cache.store, headers).entries
    lacking = [number for number, span in enumerate(prompt.spans, 1) if not _has_kv(entries.get(span.content))]
    if lacking:
        raise InputError(f"picture {lacking[0]} has not been captured")
    where = contexts(prompt.ids, prompt.spans, corridor.marks, headers[0].key.scope)
    device, rope = corridor.device, corridor.geometry.rope
    placed, known = [], []
    for span, here in zip(prompt.spans, where, strict=True):
        entry = entries[span.content]
        placed.append(place(entry, span, prompt.positions[:, span.start : span.stop].to(device), rope))
        known.append(corridor.evidence(entry, here))
    return Study(corridor, prompt, len(continuation), tuple(placed), tuple(known))


def _has_kv(entry: Entry | None) -> bool:
    return entry is not None and entry.has_kv
