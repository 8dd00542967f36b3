"""`VLCache`: picture reuse on a transformers model.

    request -> spans -> lookup -> plan -> selective prefill -> (decode by `generate`) -> store
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vlcache.config import Config, load_config
from vlcache.engines.transformers.adapter import PromptPass
from vlcache.engines.transformers.handoff import FirstCall, PrefilledCache, cache_argument
from vlcache.engines.transformers.pictures import Media, Reader, media_from_inputs, processor_fingerprint
from vlcache.engines.transformers.prompt import Prompt, build_prompt, expand_text, picture_sources, render
from vlcache.engines.transformers.support import describe
from vlcache.errors import InputError
from vlcache.exact import ExactPrefixes, Prefix, cut
from vlcache.keys import fingerprint_weights, scope
from vlcache.plan import LayerStep, Plan, plan_span
from vlcache.policies import Policy, parse_policy
from vlcache.prefill import Placed, place, selective_prefill, take
from vlcache.ranges import count, intersect, places
from vlcache.report import Counters, Outcome, Report, SpanReport
from vlcache.store import MemoryStore, Store
from vlcache.types import Entry, EntryKey, Header, Span

__all__ = ["VLCache"]


class VLCache:
    """Reuse recurring pictures' encoder output and K/V on a transformers vision-language model.

    Parameters
    ----------
    model : Qwen2VL, Qwen2_5_VL or Qwen3VL ForConditionalGeneration
    processor : its processor
    policy : str or Policy, optional
        What is recomputed of a known picture; `prefix:0.02` unless configured otherwise.
    store : Store, optional
        Where entries live; a memory store of `memory_gb` unless given. A store that is given is not closed here.
    config : Config, optional
        Instead of the configuration of file and environment.
    **options
        Any option of `vlcache.config.Config`.

    Attributes
    ----------
    last : Report or None
        What the latest `prefill` did.
    counters : Counters
        Since the cache was made.

    Raises
    ------
    UnsupportedModelError
        Before any work, naming what rules the model out.
    ConfigError
        An unknown option or policy.

    Examples
    --------
    >>> with VLCache(model, processor) as cache:                                # doctest: +SKIP
    ...     messages = [{"role": "user", "content": [{"type": "image", "image": "page.png"},
    ...                                              {"type": "text", "text": "What is the total?"}]}]
    ...     out = model.generate(**cache.prefill(messages), max_new_tokens=64)
    ...     print(cache.last.hits, cache.last.computed_share)
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        policy: str | Policy | None = None,
        *,
        store: Store | None = None,
        config: Config | None = None,
        **options: Any,
    ) -> None:
        text_policy = policy if isinstance(policy, str) else None
        self.config = config or load_config(policy=text_policy, **options)
        self.policy: Policy = parse_policy(text_policy or self.config.policy) if policy is None or text_policy else policy
        self._geometry = describe(model)
        self._check_policy(self.policy)
        self._model = model
        self._processor = processor
        self._own_store = store is None
        self.store: Store = MemoryStore(int(self.config.memory_gb * 1e9)) if store is None else store
        prefix_gb = self.config.prefix_gb if self.config.prefix_cache else 0
        self._prefixes = ExactPrefixes(int(prefix_gb * 1e9))
        self._fingerprint = fingerprint_weights(model.config.to_json_string(), model.named_parameters())
        self.counters = Counters()
        self.last: Report | None = None
        self._reader = Reader(processor.image_processor, self.config.max_image_pixels, self.counters)
        self._lock = threading.Lock()
        self._first_call: FirstCall | None = None
        self._rope_delta: Any = None

    def __enter__(self) -> VLCache:
        self._rope_delta = self._model.model.rope_deltas
        self._first_call = FirstCall(self._model)
        self._first_call.start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._first_call is not None
        self._first_call.stop()
        self._first_call = None
        self._model.model.rope_deltas = self._rope_delta
        self.close()

    def close(self) -> None:
        """Drop all K/V held, and the store where it is the cache's own."""
        self._prefixes.clear()
        if self._own_store:
            self.store.close()

    @torch.no_grad()
    def prefill(
        self, request: Sequence[Mapping[str, Any]] | Mapping[str, Any], *, policy: str | Policy | None = None, **template: Any
    ) -> dict[str, Any]:
        """Prefill a prompt, reusing what is known of its pictures.

        Parameters
        ----------
        request : list of chat messages, or a processor's output for one prompt
            Pictures in messages are files, bytes, PIL images or data: URLs.
        policy : str or Policy, optional
            Instead of the cache's, for this prompt.
        **template
            Options for the chat template.

        Returns
        -------
        dict
            What `model.generate` takes: `input_ids`, `attention_mask`, `position_ids` and the filled cache. Of a
            prompt without pictures the inputs as they are.

        Raises
        ------
        MediaError, InputError
            Nothing is stored, and the next call works.
        """
        policy = self.policy if policy is None else parse_policy(policy) if isinstance(policy, str) else policy
        with self._lock:
            return self._prefill(request, policy, template)

    def _prefill(self, request: Any, policy: Policy, template: dict[str, Any]) -> dict[str, Any]:
        clock = _Clock()
        settings = processor_fingerprint(self._processor.image_processor)
        inputs = request if isinstance(request, Mapping) else None
        with clock.stage("media"):
            if inputs is not None:
                media = media_from_inputs(inputs, settings)
            else:
                sources, messages = picture_sources(request)
                media = self._reader.read(sources, settings)
        with clock.stage("tokens"):
            if inputs is None:
                text = render(self._processor, messages, **template)
                if not media:
                    return self._text_only(self._processor(text=[text], return_tensors="pt"), policy)
                merge = self._model.config.vision_config.spatial_merge_size**2
                tokens = [m.grid[0] * m.grid[1] * m.grid[2] // merge for m in media]
                text = expand_text(text, self._processor.image_token, tokens)
                ids = self._processor.tokenizer([text], return_tensors="pt")["input_ids"][0]
            else:
                if not media:
                    return self._text_only(inputs, policy)
                ids = _one_prompt(inputs)
            prompt = build_prompt(self._model, ids.cpu(), [m.content for m in media], [m.grid for m in media])
        return self._run(prompt, media, policy, settings, clock)

    def _text_only(self, inputs: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
        self.last = Report((), policy.name, int(inputs["input_ids"].shape[-1]))
        device = self._model.get_input_embeddings().weight.device
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def _run(
        self, prompt: Prompt, media: list[Media], policy: Policy, settings: str, clock: _Clock
    ) -> dict[str, Any]:
        headers = [self._header(span, settings) for span in prompt.spans]
        total = len(prompt.ids)
        with self.store.pin([h.key for h in headers]):
            with clock.stage("lookup"):
                entries = self._lookup(headers)
                prefix, begin = self._prefixes.longest(prompt.ids[: total - 1], prompt.spans)
                reused = self._choose(prompt.spans, entries, begin)
                plan = self._plan(policy, reused, entries, begin, total)
            with clock.stage("encode"):
                encoded = self._encode(prompt.spans, media, entries, plan)
            with clock.stage("prefill"):
                work = PromptPass(self._model, self._geometry, prompt.ids, prompt.positions, prompt.spans, encoded)
                if prefix is not None:
                    for layer in range(self._geometry.layers):
                        work.keys[layer][:, :, :begin] = prefix.keys[layer][:, :, :begin]
                        work.values[layer][:, :, :begin] = prefix.values[layer][:, :, :begin]
                placed = self._place(plan, entries, prompt)
                checkpoints: dict[int, Tensor] = {}
                hidden = selective_prefill(work, plan, placed, self._watch(plan, checkpoints))
                logits = self._model.lm_head(self._model.model.language_model.norm(hidden[None]))
                _synchronize(hidden.device)
        with clock.stage("store"):
            self._keep(prompt, headers, entries, encoded, work, plan, checkpoints)
        self.last = self._report(prompt, plan, entries, policy, clock)
        return self._hand_over(prompt, work, logits)

    def _header(self, span: Span, settings: str) -> Header:
        dtype = str(self._model.dtype)
        tenant = self.config.cache_salt
        return Header(
            key=EntryKey(span.content, scope(self._fingerprint, dtype, tenant)),
            grid=span.grid,
            tokens=span.length,
            dtype=dtype,
            geometry=self._geometry,
            model=self._fingerprint,
            processor=settings,
            tenant=tenant,
        )

    def _lookup(self, headers: Sequence[Header]) -> dict[str, Entry]:
        """Usable entries by picture digest; what does not match is counted and left alone."""
        expected = {h.key: h for h in headers}
        usable = {}
        for key, entry in self.store.get_many(list(expected)).items():
            reason = entry.mismatch(expected[key])
            if reason is None:
                usable[key.content] = entry
            else:
                self.counters.reject(reason)
        return usable

    def _choose(self, spans: Sequence[Span], entries: Mapping[str, Entry], begin: int) -> list[Span]:
        """The spans whose cached K/V are used.

        A picture that so far has been seen only behind repaired K/V has an entry without K/V. It has come back, so
        it is worth capturing: everything before it is computed in full this once.
        """
        after = max((s.stop for s in spans if s.content in entries and not entries[s.content].has_kv), default=begin)
        known = [s for s in spans if s.content in entries and entries[s.content].has_kv]
        return [s for s in known if s.start >= max(begin, after)]

    def _plan(
        self, policy: Policy, reused: Sequence[Span], entries: Mapping[str, Entry], begin: int, total: int
    ) -> Plan:
        layers, want = self._geometry.layers, ((total - 1, total),)
        spans = tuple(
            plan_span(policy, span, layers, tuple(sorted(entries[span.content].checkpoints)), want) for span in reused
        )
        return Plan(begin, total, layers, want, spans)

    def _encode(
        self, spans: Sequence[Span], media: Sequence[Media], entries: Mapping[str, Entry], plan: Plan
    ) -> list[Tensor | None]:
        """Encoder output of every span that needs it; each new picture is encoded once."""
        outputs = {content: entry.encoder for content, entry in entries.items()}
        new = {s.content: m for s, m in zip(spans, media, strict=True) if s.content not in outputs and s.start >= plan.begin}
        if new:
            device = self._model.get_input_embeddings().weight.device
            patches = torch.cat([m.patches() for m in new.values()]).to(device)
            grids = torch.tensor([m.grid for m in new.values()], device=device)
            out = self._model.model.get_image_features(patches, grids, return_dict=True)
            sizes = (grids.prod(-1) // self._model.config.vision_config.spatial_merge_size**2).tolist()
            # Some releases split DeepStack features by picture, as the embeddings always are, some do not
            features = [
                f.split(sizes) if isinstance(f, Tensor) else f
                for f in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
            ]
            for number, content in enumerate(new):
                outputs[content] = torch.cat([f[number] for f in features], dim=-1).to(self._model.dtype)
            self.counters.encoded += len(new)
        return [outputs.get(span.content) for span in spans]

    def _place(self, plan: Plan, entries: Mapping[str, Entry], prompt: Prompt) -> list[Placed]:
        device = self._model.get_input_embeddings().weight.device
        placed = []
        for s in plan.spans:
            positions = prompt.positions[:, s.span.start : s.span.stop].to(device)
            placed.append(place(entries[s.span.content], s.span, positions, self._geometry.rope))
        return placed

    def _watch(self, plan: Plan, checkpoints: dict[int, Tensor]) -> Any:
        """Copies the exact rows' hidden states at the configured layers, `[repaired_from - begin, hidden]`."""
        layers = set(self.config.checkpoint_layers)
        if not layers:
            return None
        exact = ((plan.begin, plan.repaired_from()),)

        def watch(step: LayerStep, hidden: Tensor) -> None:
            if step.layer in layers and exact[0][0] < exact[0][1]:
                checkpoints[step.layer] = take(hidden, places(intersect(exact, step.rows), step.rows)).cpu().clone()

        return watch

    def _keep(
        self,
        prompt: Prompt,
        headers: Sequence[Header],
        entries: Mapping[str, Entry],
        encoded: Sequence[Tensor | None],
        work: PromptPass,
        plan: Plan,
        checkpoints: Mapping[int, Tensor],
    ) -> None:
        """Store what this prompt computed exactly: new pictures, and the prompt's own exact prefix."""
        exact = plan.repaired_from()
        done = set()
        for span, header, output in zip(prompt.spans, headers, encoded, strict=True):
            old = entries.get(span.content)
            captured = plan.begin <= span.start and span.stop <= exact
            if span.content in done or output is None or (old is not None and (old.has_kv or not captured)):
                continue
            done.add(span.content)
            keys = values = None
            if captured:
                kv = [work.read_kv(layer, span.start, span.stop) for layer in range(self._geometry.layers)]
                keys, values = (torch.stack(t).cpu() for t in zip(*kv, strict=True))
            a, b = span.start - plan.begin, span.stop - plan.begin
            entry = Entry(
                header=header,
                encoder=output.cpu(),
                positions=prompt.positions[:, span.start : span.stop].cpu().clone(),
                keys=keys,
                values=values,
                checkpoints={k: h[a:b].clone() for k, h in checkpoints.items()} if captured else {},
                created_s=time.time(),
            )
            self.store.put(entry)
        if exact > plan.begin:
            spans = tuple(s for s in prompt.spans if s.stop <= exact)
            keys, values = ([cut(t, exact) for t in kv] for kv in (work.keys, work.values))
            self._prefixes.put(Prefix(prompt.ids[:exact].clone(), spans, keys, values))

    def _report(
        self, prompt: Prompt, plan: Plan, entries: Mapping[str, Entry], policy: Policy, clock: _Clock
    ) -> Report:
        layers = self._geometry.layers
        computed = {s.span.start: s.computed for s in plan.spans}
        reports = []
        for span in prompt.spans:
            outcome: Outcome
            if span.start < plan.begin:
                outcome, rows = "prefix", 0
                self.counters.prefix_hits += 1
            elif span.start in computed:
                outcome, rows = "reused", computed[span.start]
                self.counters.reused += 1
            elif span.content in entries:
                outcome, rows = "encoder", layers * span.length
                self.counters.encoder_hits += 1
            else:
                outcome, rows = "new", layers * span.length
                self.counters.misses += 1
            reports.append(SpanReport(span.content, span.start, span.length, outcome, rows))
        token_bytes = 2 * self._geometry.kv_heads * self._geometry.head_dim * torch.empty((), dtype=self._model.dtype).element_size()
        reused = sum(count(r) for step in plan.steps() for r in step.reuse)
        return Report(
            spans=tuple(reports),
            policy=policy.name,
            prompt_tokens=len(prompt.ids),
            exact_prefix_tokens=plan.begin,
            rows=plan.rows_per_layer(),
            moved_bytes=reused * token_bytes,
            seconds=dict(clock.seconds),
        )

    def _hand_over(self, prompt: Prompt, work: PromptPass, logits: Tensor) -> dict[str, Any]:
        device = logits.device
        ids = prompt.ids[None].to(device)
        self._model.model.rope_deltas = prompt.rope_delta.to(device)
        # generate's own layout: the text position stands before t, h and w
        text = torch.arange(len(prompt.ids), device=device)[None, None]
        positions = torch.cat((text, prompt.positions[:, None].to(device)))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": positions,
            cache_argument(self._model): PrefilledCache(work.keys, work.values, ids.clone(), logits),
        }

    def _check_policy(self, policy: Policy) -> None:
        """Let a rule that does not fit this model say so now and not at the first hit."""
        plan_span(policy, Span("", 0, 1, (1, 1, 1)), self._geometry.layers)


class _Clock:
    """Wall seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _one_prompt(inputs: Mapping[str, Any]) -> Tensor:
    """The ids of a processor's output, `[T]`.

    Raises
    ------
    InputError
        No ids, several prompts, or padding.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise InputError("the inputs have no input_ids tensor; call the processor with return_tensors='pt'")
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise InputError(f"the inputs hold {ids.shape[0]} prompts; prefill one at a time")
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise InputError("the prompt is padded; tokenise it without padding")
    return ids.reshape(-1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
