"""`VLCache`: picture reuse on a transformers model.

request -> spans -> lookup -> plan -> selective prefill -> (decode by `generate`) -> store
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlcache.capture import Checkpoints, capture
from vlcache.config import Config, load_config
from vlcache.engines.transformers.adapter import PromptPass
from vlcache.engines.transformers.encoder import encode
from vlcache.engines.transformers.handoff import FirstCall, PrefilledCache, cache_argument
from vlcache.engines.transformers.pictures import Media, Reader, media_from_inputs, processor_fingerprint
from vlcache.engines.transformers.prompt import (
    Prompt,
    build_prompt,
    check_continuation,
    expand_text,
    longer,
    picture_sources,
    render,
    vision_tokens,
)
from vlcache.engines.transformers.support import describe
from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.errors import ConfigError, InputError
from vlcache.exact import ExactPrefix, ExactPrefixes, cut
from vlcache.keys import scope
from vlcache.lookup import Found, find, keep, pinned, reusable
from vlcache.plan import Plan, make_plan, plan_span
from vlcache.policies import Policy, parse_policy
from vlcache.prefill import place, selective_prefill
from vlcache.report import Counters, Report, report_spans, reused_rows
from vlcache.store import MemoryStore, Store
from vlcache.types import EntryKey, Header, Span

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
        What the latest `prefill` or `score` did.
    counters : Counters
        Since the cache was made.

    Raises
    ------
    UnsupportedModelError
        Before any work, naming what rules the model out.
    ConfigError, InputError
        An unknown option or policy; a processor without an image processor.

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
        if config is not None and options:
            raise ConfigError(f"config and {', '.join(options)} are both given; put them into the config")
        self.config = config or load_config(policy=policy if isinstance(policy, str) else None, **options)
        self.policy: Policy = _policy(self.config.policy if policy is None else policy)
        self._geometry = describe(model)
        beyond = [layer for layer in self.config.checkpoint_layers if layer >= self._geometry.layers]
        if beyond:
            raise ConfigError(f"checkpoint_layers: {beyond} are beyond the model's {self._geometry.layers} layers")
        # A rule that does not fit this model says so now and not at the first hit
        plan_span(self.policy, Span("", 0, 1, (1, 1, 1)), self._geometry.layers)
        if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
            raise InputError(f"a {type(processor).__name__} is no processor for pictures; give AutoProcessor's")
        self._model = model
        self._processor = processor
        self._own_store = store is None
        self.store: Store = MemoryStore(int(self.config.memory_gb * 1e9)) if store is None else store
        prefix_gb = self.config.prefix_gb if self.config.prefix_cache else 0
        self._prefixes = ExactPrefixes(int(prefix_gb * 1e9))
        self._weights = WeightsWatch(model)
        self._fingerprint = ""
        self._closed = False
        self._check_weights()
        self.counters = Counters()
        self.last: Report | None = None
        self._reader = Reader(self.config.max_image_pixels, self.counters)
        self._lock = threading.Lock()
        self._first_call: FirstCall | None = None

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._model.get_input_embeddings().weight.device
        return device

    def __enter__(self) -> VLCache:
        self._check_open()
        if self._first_call is not None:
            raise InputError("this cache is in use already; make one VLCache per `with`")
        self._first_call = FirstCall.join(self._model)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._first_call is not None
        self._first_call.leave()
        self._first_call = None
        self.close()

    def close(self) -> None:
        """Drop all K/V held, and the store where it is the cache's own."""
        with self._lock:
            self._closed = True
            self._prefixes.clear()
            if self._own_store:
                self.store.close()

    @torch.no_grad()
    def prefill(
        self,
        request: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        policy: str | Policy | None = None,
        **template: Any,
    ) -> dict[str, Any]:
        """Prefill a prompt, reusing what is known of its pictures.

        Like any cache in transformers, what it returns is good for one `generate`, which has to be called inside the
        cache's `with`.

        Parameters
        ----------
        request : list of chat messages, or a processor's output for one prompt
            Pictures in messages are files, bytes, PIL images or data: URLs.
        policy : str or Policy, optional
            Instead of the cache's, for this prompt.
        **template
            Options for the chat template (`add_generation_prompt`, `tools`, `add_vision_id`, ...).

        Returns
        -------
        dict
            What `model.generate` takes: `input_ids`, `attention_mask`, `position_ids` and the filled cache. Of a
            prompt without pictures the inputs as they are.

        Raises
        ------
        MediaError, InputError, ConfigError
            A picture, a prompt or a policy that cannot be used. Nothing is stored, and the next call works.
        """
        with self._lock:
            self._check_open()
            if self._first_call is None:
                raise InputError(
                    "prefill works inside the cache's `with`; write `with VLCache(model, processor) as cache:`"
                )
            self._check_weights()
            return self._prefill(request, self.policy if policy is None else _policy(policy), template)

    @torch.no_grad()
    def score(
        self,
        request: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        continuation: Sequence[int],
        *,
        policy: str | Policy | None = None,
        **template: Any,
    ) -> Tensor:
        """Logits of a given continuation of a prompt with pictures, in one pass: what evaluations compare.

        Parameters
        ----------
        request, policy, **template
            As for `prefill`.
        continuation : sequence of int
            Token ids, at least one.

        Returns
        -------
        Tensor, `[len(continuation), vocabulary]`
            Row i is what the model says of `continuation[i]` after the prompt and the tokens before it.

        Raises
        ------
        MediaError, InputError, ConfigError
            As for `prefill`; a prompt without pictures; a continuation that is empty or not text.
        """
        check_continuation(self._model, continuation)
        with self._lock:
            self._check_open()
            self._check_weights()
            clock = _Clock()
            read = self._read(request, template, clock)
            if read.prompt is None:
                raise InputError("the prompt has no picture; call the model itself")
            prompt = longer(read.prompt, continuation[:-1])
            chosen = self.policy if policy is None else _policy(policy)
            _, logits = self._run(prompt, read, chosen, clock, len(continuation))
            return logits

    def _prefill(self, request: Any, policy: Policy, template: dict[str, Any]) -> dict[str, Any]:
        clock = _Clock()
        read = self._read(request, template, clock)
        if read.prompt is None:
            return self._text_only(read.inputs, policy)
        work, logits = self._run(read.prompt, read, policy, clock, 1)
        return self._hand_over(read.prompt, work, logits)

    def _read(self, request: Any, template: dict[str, Any], clock: _Clock) -> _Read:
        settings = processor_fingerprint(self._processor.image_processor)
        inputs = request if isinstance(request, Mapping) else None
        with clock.stage("media"):
            if inputs is not None:
                media = media_from_inputs(inputs, settings)
            else:
                sources, messages = picture_sources(request)
                media = self._reader.read(sources, self._processor.image_processor, settings)
        with clock.stage("tokens"):
            if inputs is None:
                text = render(self._processor, messages, **template)
                tokens = [vision_tokens(self._model, m.grid) for m in media]
                text = expand_text(text, self._processor.image_token, tokens)
                if not media:
                    return _Read(settings, (), None, self._processor(text=[text], return_tensors="pt"))
                ids = self._processor.tokenizer([text], return_tensors="pt")["input_ids"][0]
            else:
                if not media:
                    return _Read(settings, (), None, inputs)
                ids = _one_prompt(inputs)
            prompt = build_prompt(self._model, ids.cpu(), [m.content for m in media], [m.grid for m in media])
        return _Read(settings, tuple(media), prompt, {})

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this cache is closed; make a new VLCache")

    def _check_weights(self) -> None:
        """Look at the model again if its weights are no longer those that it had."""
        if self._weights.changed():
            self._geometry = describe(self._model)
            self._fingerprint = self._weights.fingerprint()
            self._prefixes.clear()

    def _text_only(self, inputs: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
        """Inputs without pictures, as they are: any number of prompts, padded or not."""
        ids = _ids(inputs)
        if bool((ids == self._model.config.image_token_id).any()):
            raise InputError("the prompt has vision tokens but no pixel_values; pass the processor's output as it is")
        self.last = Report((), policy.name, int(ids.shape[-1]))
        return {k: v.to(self._device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def _run(
        self, prompt: Prompt, read: _Read, policy: Policy, clock: _Clock, wanted: int
    ) -> tuple[PromptPass, Tensor]:
        """Fill the K/V of a prompt, and the logits of its last `wanted` rows, `[wanted, vocabulary]`."""
        geometry, total = self._geometry, len(prompt.ids)
        headers = [self._header(span, read.settings) for span in prompt.spans]
        with pinned(self.store, headers):
            with clock.stage("lookup"):
                found = find(self.store, headers)
                prefix, begin = self._prefixes.longest(prompt.ids[: total - wanted], prompt.spans)
                reused = reusable(prompt.spans, found.entries, begin)
                checkpoints = {content: tuple(sorted(e.checkpoints)) for content, e in found.entries.items()}
                plan = make_plan(policy, reused, checkpoints, begin, total, geometry.layers, wanted)
            with clock.stage("encode"):
                encoded = self._encode(prompt.spans, read.media, found, begin)
            with clock.stage("prefill"):
                work = PromptPass(self._model, geometry, prompt.ids, prompt.positions, prompt.spans, encoded)
                if prefix is not None:
                    work.fill(prefix.keys, prefix.values, begin)
                positions = prompt.positions.to(self._device)
                placed = [
                    place(found.entries[s.content], s, positions[:, s.start : s.stop], geometry.rope) for s in reused
                ]
                watch = Checkpoints(plan, self.config.checkpoint_layers)
                hidden = selective_prefill(work, plan, placed, watch)
                logits: Tensor = self._model.lm_head(self._model.model.language_model.norm(hidden[None]))[0]
                _synchronize(self._device)
        with clock.stage("store"):
            new = capture(work, plan, prompt.spans, headers, encoded, prompt.positions, found.entries, watch)
            faults = keep(self.store, new)
            self._keep_prefix(prompt, plan, work)
        spans = report_spans(plan, prompt.spans, found.entries)
        self.counters.add(spans, found.rejects + faults)
        token_bytes = 2 * geometry.kv_heads * geometry.head_dim * logits.element_size()
        self.last = Report(
            spans=spans,
            policy=policy.name,
            prompt_tokens=total,
            exact_prefix_tokens=begin,
            rows=plan.rows_per_layer(),
            moved_bytes=reused_rows(plan) * token_bytes,
            seconds=dict(clock.seconds),
        )
        return work, logits

    def _header(self, span: Span, settings: str) -> Header:
        dtype, tenant = str(self._model.dtype), self.config.cache_salt
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

    def _encode(self, spans: Sequence[Span], media: Sequence[Media], found: Found, begin: int) -> list[Tensor | None]:
        """Encoder output of every span; None for those in the exact prefix that nobody has to embed."""
        outputs = {content: entry.encoder for content, entry in found.entries.items()}
        pairs = zip(spans, media, strict=True)
        new = {span.content: m for span, m in pairs if span.content not in outputs and span.start >= begin}
        outputs |= encode(self._model, new)
        self.counters.encoded += len(new)
        return [outputs.get(span.content) for span in spans]

    def _keep_prefix(self, prompt: Prompt, plan: Plan, work: PromptPass) -> None:
        exact = plan.exact_until()
        if exact > plan.begin and self._prefixes.capacity_bytes:
            spans = tuple(s for s in prompt.spans if s.stop <= exact)
            keys, values = ([cut(t, exact) for t in kv] for kv in (work.keys, work.values))
            self._prefixes.put(ExactPrefix(prompt.ids[:exact].clone(), spans, keys, values))

    def _hand_over(self, prompt: Prompt, work: PromptPass, logits: Tensor) -> dict[str, Any]:
        device = self._device
        ids = prompt.ids[None].to(device)
        self._model.model.rope_deltas = prompt.rope_delta.to(device)
        # generate's own layout: the text position stands before t, h and w
        text = torch.arange(len(prompt.ids), device=device)[None, None]
        positions = torch.cat((text, prompt.positions[:, None].to(device)))
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": positions,
            cache_argument(self._model): PrefilledCache(work.keys, work.values, ids.clone(), logits[None]),
        }


@dataclass(frozen=True, slots=True)
class _Read:
    """A request as read: its pictures and its prompt; without pictures no prompt, and the inputs as they are."""

    settings: str
    media: tuple[Media, ...]
    prompt: Prompt | None
    inputs: Mapping[str, Any]


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


def _policy(given: str | Policy) -> Policy:
    return parse_policy(given) if isinstance(given, str) else given


def _ids(inputs: Mapping[str, Any]) -> Tensor:
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        raise InputError("the inputs have no input_ids tensor; call the processor with return_tensors='pt'")
    return ids


def _one_prompt(inputs: Mapping[str, Any]) -> Tensor:
    """The ids of a processor's output, `[T]`.

    Raises
    ------
    InputError
        Several prompts, or padding.
    """
    ids = _ids(inputs)
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise InputError(f"the inputs hold {ids.shape[0]} prompts; prefill one at a time")
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise InputError("the prompt is padded; tokenise it without padding")
    return ids.reshape(-1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
