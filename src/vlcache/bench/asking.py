"""Asking a model the same thing plainly and through a cache that was filled in another context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from vlcache.bench.plain import plain_inputs
from vlcache.bench.trials import Trial
from vlcache.config import Config
from vlcache.engines.transformers import VLCache
from vlcache.errors import InputError
from vlcache.policies import Policy
from vlcache.store import MemoryStore
from vlcache.store.eightbit import rounded
from vlcache.types import Capture, Entry

__all__ = ["Asker", "Plain", "divergence_of", "groups"]

# Bounds nothing: a store is emptied when the next context comes
_STORE_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Plain:
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


class Asker:
    """A model with a cache, for trials one after the other. Used as a context manager.

    Decoding is greedy, of the model's own logits: without the penalties that a checkpoint's settings may ask for.

    Parameters
    ----------
    model, processor
    max_new_tokens : int
        Longest answer.
    checkpoint_layers : iterable of int
    store_dtype : str
        As a disk or a server would keep K and V: `raw`, `int8`, `fp8`.
    capture : {"observed", "neutral"}
        Whether pictures are captured by a trial's own prompts, or behind the chat template's opening.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        max_new_tokens: int,
        checkpoint_layers: Iterable[int] = (),
        store_dtype: str = "raw",
        capture: Capture = "observed",
    ) -> None:
        self.model = model
        self._processor = processor
        self._longest = max_new_tokens
        self._capture = capture
        self._captured: Any = None
        self._store = _Rounding(store_dtype)
        self._own_generation: Any = None
        # No exact prefixes: what one trial leaves behind must not help the next
        layers = tuple(sorted(set(checkpoint_layers)))
        config = Config(policy="none", prefix_cache=False, checkpoint_layers=layers)
        self.cache = VLCache(model, processor, store=self._store, config=config)

    def __enter__(self) -> Asker:
        self.cache.__enter__()
        own = self._own_generation = self.model.generation_config
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.model.generation_config = self._own_generation
        self.cache.__exit__(kind, error, trace)

    def capture(self, trial: Trial) -> None:
        """Have the store hold what the trial's captures put there, and nothing from another context."""
        if self._captured != trial.captures[-1]:
            self._captured = trial.captures[-1]
            self._store.clear()
        for chat in trial.captures:
            if self._capture == "neutral":
                self.cache.capture([part["image"] for message in chat for part in _parts(message) if "image" in part])
            else:
                self.cache.prefill(chat)

    def plain(self, chat: list[dict[str, Any]]) -> Plain:
        """What plain transformers answers.

        Raises
        ------
        InputError
            The processor cannot read the prompt.
        """
        try:
            inputs = plain_inputs(self._processor, chat).to(self.model.device)
        except Exception as error:  # of any kind: it is not our code
            raise InputError(f"the processor cannot read the prompt ({type(error).__name__})") from error
        out = self.model.generate(
            **inputs,
            max_new_tokens=self._longest,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        prompt_tokens = inputs["input_ids"].shape[1]
        return Plain(prompt_tokens, out.sequences[0, prompt_tokens:].tolist(), torch.cat(out.logits).float())

    def write(self, chat: list[dict[str, Any]], policy: Policy) -> str:
        """What the cache answers under a policy."""
        inputs = self.cache.prefill(chat, policy=policy)
        out = self.model.generate(**inputs, max_new_tokens=self._longest, do_sample=False)
        return self.words(out[0, inputs["input_ids"].shape[1] :].tolist())

    def words(self, tokens: list[int]) -> str:
        return str(self._processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _parts(message: dict[str, Any]) -> Sequence[dict[str, Any]]:
    content = message.get("content")
    return [] if content is None or isinstance(content, str) else content


def groups(trials: Iterable[Trial]) -> Iterator[list[Trial]]:
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


def divergence_of(reference: Tensor, logits: Tensor) -> float:
    """KL(reference || logits), mean over the rows of `[tokens, vocabulary]`, nats."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))
