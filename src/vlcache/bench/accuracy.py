"""Accuracy under reuse: every policy against full recompute, on the same prompts, in one run.

Each trial fills the cache in one context and asks in another. The reference is plain transformers. A policy is
scored on the reference's own answer in one pass: it agrees where each of the answer's tokens is its own first choice,
which is when greedy decoding would write the same; only where it would not does it write an answer of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from vlcache.bench.plain import plain_inputs
from vlcache.bench.trials import Trial
from vlcache.config import Config
from vlcache.engines.transformers import VLCache
from vlcache.engines.transformers.run import Scored
from vlcache.engines.transformers.support import describe
from vlcache.errors import InputError, MediaError
from vlcache.plan import plan_span
from vlcache.policies import Evidence, Policy, parse_policy
from vlcache.store import MemoryStore
from vlcache.store.eightbit import rounded
from vlcache.types import Entry, Span

__all__ = ["Outcome", "Runner", "sweep"]


def sweep(layers: int) -> tuple[str, ...]:
    """The policies of a run that names none: every registered rule, over a range of ratios.

    `prefix:1` is `full`, and `none` is `prefix:0`. The ratios come without the least number of tokens that
    `prefix:0.02` has, which of small pictures is more than their share. `layered` wants a measured profile; a straight
    line from 20 % in the first layer to nothing in the last stands in for one.
    """
    line = ",".join(f"{0.2 * (1 - layer / max(1, layers - 1)):.3g}" for layer in range(layers))
    ratios = (f"prefix:{ratio},1" for ratio in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5))
    return ("full", "none", *ratios, "prefix:0.02", f"layered:{line}")


# Of K/V that policies run side by side hold together
_KV_BYTES = 2 << 30
# Bounds nothing: a store is emptied when the next context comes
_STORE_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy on one trial.

    Attributes
    ----------
    trial, family, change, policy : str
    answer, full_prediction, prediction : str
        Right answer; what plain transformers writes; what the policy writes.
    correct, full_correct, agree : bool
        Agreement is of tokens, with plain transformers.
    kl : float
        Mean over the answer's tokens of KL(full || policy), nats.
    computed_share : float
        Of the reused pictures' rows.
    """

    trial: str
    family: str
    change: str
    policy: str
    answer: str
    full_prediction: str
    prediction: str
    correct: bool
    full_correct: bool
    agree: bool
    kl: float
    computed_share: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class _Plain:
    """Plain transformers' greedy answer to a prompt of so many tokens: its tokens, its end included, and their logits,
    `[tokens, vocabulary]`."""

    prompt_tokens: int
    tokens: list[int]
    logits: Tensor


class _Rounding(MemoryStore):
    """Entries as if they had been written to a disk or a server."""

    def __init__(self, stored: str) -> None:
        super().__init__(_STORE_BYTES)
        self._stored = stored

    def put(self, entry: Entry) -> bool:
        return super().put(rounded(entry, self._stored))


class Runner:
    """Runs trials on one model.

    Parameters
    ----------
    model, processor
    policies : sequence of str
        Empty: `sweep`.
    max_new_tokens : int
        Longest answer.
    store_dtype : str
        As a disk or a server would keep K and V: `raw`, `int8`, `fp8`.
    """

    def __init__(
        self, model: Any, processor: Any, policies: Sequence[str], max_new_tokens: int, store_dtype: str = "raw"
    ) -> None:
        self._model = model
        self._processor = processor
        geometry = describe(model)
        self._layers = geometry.layers
        self._token_bytes = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * model.dtype.itemsize
        self.policies = tuple(dict.fromkeys(policies)) or sweep(self._layers)
        self._rules = [(text, parse_policy(text)) for text in self.policies]
        for _, policy in self._rules:
            plan_span(
                policy, Span("", 0, 1, (1, 1, 1)), Evidence(self._layers)
            )  # one that does not fit the model says so now
        self._longest = max_new_tokens
        self._captured: Any = None
        self._store = _Rounding(store_dtype)

    def run(
        self, trials: Iterable[Trial], tell: Callable[[Outcome], object], refuse: Callable[[Trial, str], object]
    ) -> None:
        """Give every outcome to `tell`, trial by trial; a trial whose prompt cannot be used to `refuse`, with why."""
        # No exact prefixes: what one trial leaves behind must not help the next
        kept = {layer for _, policy in self._rules for layer in policy.checkpoints if layer < self._layers}
        config = Config(policy="none", prefix_cache=False, checkpoint_layers=tuple(sorted(kept)))
        cache = VLCache(self._model, self._processor, store=self._store, config=config)
        with cache, _plain_generation(self._model):
            for some in _groups(trials):
                try:
                    self._capture(cache, some[0])
                    outcomes = self._outcomes(cache, some)
                except (InputError, MediaError) as error:
                    for trial in some:
                        refuse(trial, str(error))
                    continue
                for outcome in outcomes:
                    tell(outcome)

    def _capture(self, cache: VLCache, trial: Trial) -> None:
        """Have the store hold what the trial's captures put there, and nothing from another context."""
        if self._captured != trial.captures[-1]:
            self._captured = trial.captures[-1]
            self._store.clear()
        for chat in trial.captures:
            cache.prefill(chat)

    def _outcomes(self, cache: VLCache, trials: Sequence[Trial]) -> list[Outcome]:
        """Of trials of one group."""
        plain = [self._plain(trial.asked) for trial in trials]
        asked, answers = [trial.asked for trial in trials], [one.tokens for one in plain]
        at_once = max(1, _KV_BYTES // (self._token_bytes * sum(one.prompt_tokens + len(one.tokens) for one in plain)))
        scored: list[list[Scored]] = [[] for _ in trials]
        for start in range(0, len(self._rules), at_once):
            rules = [policy for _, policy in self._rules[start : start + at_once]]
            for mine, some in zip(scored, cache.score_each(asked, answers, rules), strict=True):
                mine.extend(some)
        return [
            self._outcome(cache, trial, text, policy, score, its)
            for trial, some, its in zip(trials, scored, plain, strict=True)
            for (text, policy), score in zip(self._rules, some, strict=True)
        ]

    def _outcome(
        self,
        cache: VLCache,
        trial: Trial,
        text: str,
        policy: Policy,
        scored: Scored,
        plain: _Plain,
    ) -> Outcome:
        spans = scored.report.spans
        assert all(span.outcome == "reused" for span in spans), "a picture was not captured"
        logits = scored.logits.float()
        agree = logits.argmax(-1).tolist() == plain.tokens
        full = self._words(plain.tokens)
        prediction = full if agree else self._write(cache, trial.asked, policy)
        return Outcome(
            trial=trial.name,
            family=trial.family,
            change=trial.change,
            policy=text,
            answer=trial.answer,
            full_prediction=full,
            prediction=prediction,
            correct=trial.grade(prediction),
            full_correct=trial.grade(full),
            agree=agree,
            kl=_kl(plain.logits, logits),
            computed_share=scored.report.computed_share,
        )

    def _plain(self, chat: list[dict[str, Any]]) -> _Plain:
        try:
            inputs = plain_inputs(self._processor, chat).to(self._model.device)
        except Exception as error:  # of any kind: it is not our code
            raise InputError(f"the processor cannot read the prompt ({type(error).__name__})") from error
        out = self._model.generate(
            **inputs,
            max_new_tokens=self._longest,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        prompt_tokens = inputs["input_ids"].shape[1]
        return _Plain(prompt_tokens, out.sequences[0, prompt_tokens:].tolist(), torch.cat(out.logits).float())

    def _write(self, cache: VLCache, chat: list[dict[str, Any]], policy: Policy) -> str:
        inputs = cache.prefill(chat, policy=policy)
        out = self._model.generate(**inputs, max_new_tokens=self._longest, do_sample=False)
        return self._words(out[0, inputs["input_ids"].shape[1] :].tolist())

    def _words(self, tokens: list[int]) -> str:
        return str(self._processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _groups(trials: Iterable[Trial]) -> Iterator[list[Trial]]:
    """Trials that are run together."""
    group: list[Trial] = []
    for trial in trials:
        if group and trial.group != group[0].group:
            yield group
            group = []
        if trial.group:
            group.append(trial)
        else:
            yield [trial]
    if group:
        yield group


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """Greedy decoding of the model's own logits: without the penalties that a checkpoint's settings may ask for."""
    own = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    try:
        yield
    finally:
        model.generation_config = own


def _kl(reference: Tensor, logits: Tensor) -> float:
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))
