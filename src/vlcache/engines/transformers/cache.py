"""`VLCache`: picture reuse on a transformers model.

request -> spans -> lookup -> plan -> selective prefill -> (decode by `generate`) -> store
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlcache.config import Config, load_config
from vlcache.engines.transformers.corridor import Corridor
from vlcache.engines.transformers.handoff import FirstCall, generate_inputs
from vlcache.engines.transformers.pictures import Reader, processor_fingerprint, smallest_picture
from vlcache.engines.transformers.profile import find_profile
from vlcache.engines.transformers.prompt import (
    check_alike,
    check_continuation,
    longer,
)
from vlcache.engines.transformers.request import prompt_ids, read_request
from vlcache.engines.transformers.run import Scored
from vlcache.engines.transformers.support import describe
from vlcache.engines.transformers.weights import WeightsWatch
from vlcache.errors import ConfigError, InputError
from vlcache.plan import make_plan
from vlcache.policies import Evidence, Policy, parse_policy
from vlcache.report import Clock, Counters, Report
from vlcache.store import Store
from vlcache.store.open import check_bounds, open_store
from vlcache.types import Span
from vlcache.worth import Worth

__all__ = ["VLCache"]


class VLCache:
    """Reuse recurring pictures' encoder output and K/V on a transformers vision-language model.

    Parameters
    ----------
    model : Qwen2VL, Qwen2_5_VL or Qwen3VL ForConditionalGeneration
    processor : its processor
    policy : str or Policy, optional
        What is recomputed of a known picture; `auto` unless configured otherwise.
    store : Store, optional
        Where entries live; unless given, memory and what else the configuration names. A store that is given is not
        closed here.
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
    profile : Profile or None
        The model's, where there is one.

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
        geometry, self._weights = describe(model), WeightsWatch(model)
        self._layers = geometry.layers
        self._given = self.config.policy if policy is None else policy
        self.profile = find_profile(self.config.profile, model, geometry.layers, self._weights)
        self.policy: Policy = self._policy(self._given)
        kept = {*self.config.checkpoint_layers, *self.policy.checkpoints}
        beyond = sorted(layer for layer in kept if layer >= geometry.layers)
        if beyond:
            raise ConfigError(f"checkpoint_layers: {beyond} are beyond the model's {geometry.layers} layers")
        if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
            raise InputError(f"a {type(processor).__name__} is no processor for pictures; give AutoProcessor's")
        self._model = model
        self._processor = processor
        self._own_store = store is None
        if store is None:
            check_bounds(self.config, geometry, smallest_picture(processor.image_processor), model.dtype)
        self._closed = False
        self.counters = Counters()
        self.last: Report | None = None
        self._reader = Reader(self.config.max_image_pixels, self.counters)
        self._lock = threading.Lock()
        self._first_call: FirstCall | None = None
        worth = Worth(self.config.always_reuse)
        self.store: Store = open_store(self.config, worth) if store is None else store
        try:
            self._corridor = Corridor(
                model, processor, self._weights, self.config, self.store, worth, self.counters, kept
            )
            self._corridor.check_weights()
        except BaseException:
            if store is None:
                self.store.close()
            raise

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
            self._corridor.prefixes.clear()
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
            return self._prefill(request, self.policy if policy is None else self._policy(policy), template)

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
        chosen = self.policy if policy is None else policy
        return self.score_each([request], [continuation], [chosen], **template)[0][0].logits

    @torch.no_grad()
    def score_each(
        self,
        requests: Sequence[Sequence[Mapping[str, Any]] | Mapping[str, Any]],
        continuations: Sequence[Sequence[int]],
        policies: Sequence[str | Policy],
        **template: Any,
    ) -> list[list[Scored]]:
        """`score` of several questions about the same pictures under several policies, side by side.

        Holds K/V of every request under every policy at once. `counters` count each of them.

        Parameters
        ----------
        requests : sequence
            At least one. Several are equal up to the end of their last picture and have text behind it.
        continuations : sequence of sequence of int
            By request.
        policies : sequence of str or Policy
            At least one.

        Returns
        -------
        list of list of Scored
            By request and policy. `last` is the last one's report.

        Raises
        ------
        MediaError, InputError, ConfigError
            As for `score`; requests that differ earlier.
        """
        if not policies:
            raise ConfigError("no policy to score under; give at least one")
        if not requests or len(requests) != len(continuations):
            raise InputError(f"{len(requests)} requests and {len(continuations)} continuations; give one for each")
        for continuation in continuations:
            check_continuation(self._model, continuation)
        rules = [self._policy(policy) for policy in policies]
        with self._lock:
            self._check_open()
            self._check_weights()
            clock = Clock()
            reads = [
                read_request(request, template, self._model, self._processor, self._reader, clock)
                for request in requests
            ]
            prompts = []
            for read, continuation in zip(reads, continuations, strict=True):
                if read.prompt is None:
                    raise InputError("the prompt has no picture; call the model itself")
                prompts.append(longer(read.prompt, continuation[:-1]))
            check_alike(prompts)
            _, scored = self._corridor.run(prompts, reads[0], rules, clock, [len(some) for some in continuations])
            self.last = scored[-1][-1].report
            return scored

    def _prefill(self, request: Any, policy: Policy, template: dict[str, Any]) -> dict[str, Any]:
        clock = Clock()
        read = read_request(request, template, self._model, self._processor, self._reader, clock)
        if read.prompt is None:
            return self._text_only(read.inputs, policy)
        work, ((scored,),) = self._corridor.run([read.prompt], read, [policy], clock, [1])
        self.last = scored.report
        return generate_inputs(self._model, read.prompt, work, scored.logits)

    @torch.no_grad()
    def capture(self, pictures: Sequence[Any]) -> int:
        """Capture pictures before anybody asks about them, each behind nothing but the chat template's opening.

        Parameters
        ----------
        pictures : sequence
            Files, bytes, PIL images or data: URLs.

        Returns
        -------
        int
            How many were computed; those that have been captured so before are not again.

        Raises
        ------
        MediaError, InputError
            A picture that cannot be used; those before it are captured.
        """
        computed = 0
        with self._lock:
            self._check_open()
            self._check_weights()
            settings = processor_fingerprint(self._processor.image_processor)
            for picture in pictures:
                (media,) = self._reader.read([picture], self._processor.image_processor, settings)
                computed += self._corridor.capture(media, settings)
        return computed

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this cache is closed; make a new VLCache")

    def _text_only(self, inputs: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
        """Inputs without pictures, as they are: any number of prompts, padded or not."""
        ids = prompt_ids(inputs)
        if bool((ids == self._model.config.image_token_id).any()):
            raise InputError("the prompt has vision tokens but no pixel_values; pass the processor's output as it is")
        self.last = Report((), policy.name, int(ids.shape[-1]))
        return {k: v.to(self._corridor.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    def _policy(self, given: str | Policy) -> Policy:
        """A rule as it is written, with the numbers of the model's profile where it has one.

        Raises
        ------
        ConfigError
            Also for one that does not fit this model; now, and not at the first hit.
        """
        rule = given
        if isinstance(rule, str):
            rule = parse_policy(rule) if self.profile is None else self.profile.policy(rule)
        beyond = [layer for layer in rule.checkpoints if layer >= self._layers]
        if beyond:
            raise ConfigError(f"policy {rule.name}: layers {beyond} are beyond the model's {self._layers}")
        make_plan(rule, [Span("", 0, 1, (1, 1, 1))], [Evidence(self._layers)], 0, 2, self._layers)
        return rule

    def _check_weights(self) -> None:
        """Other weights have other entries, and another profile or none."""
        if self._corridor.check_weights() and self.profile is not None:
            try:
                self.profile.check_model(self._weights.profile_fingerprint(), self._layers, "of this cache")
            except ConfigError as error:
                warnings.warn(f"{error}; without it policies are cautious", stacklevel=3)
                self.profile = None
                self.policy = self._policy("auto" if self._given == "layered" else self._given)
