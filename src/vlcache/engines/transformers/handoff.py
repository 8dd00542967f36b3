"""Handing a filled cache to `model.generate`, with the first token's logits already computed.

`generate` wants a cache that lacks the last prompt token, and computes that token itself: one more pass over the
weights, which on a hit is a third of the time to first token. The prefill has computed that row along with the
others, so the cache carries its logits, and the model's first call is answered with them.

    prefill   K/V of tokens 0 .. T-1, logits of T-1        the layers show T-1 tokens
    generate  model(last token)  -> the stored logits      the layers show T tokens
    generate  model(new token)   -> the model itself

Chunks of a chunked prefill that are in the cache are skipped. Whatever else calls the model first (assisted decoding
with its candidates, a forward that wants attentions) goes to the model itself and finds a cache of T-1 tokens.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from vlcache.engines.transformers.adapter import PromptPass
from vlcache.engines.transformers.prompt import Prompt
from vlcache.errors import InputError

__all__ = ["FirstCall", "PrefilledCache", "cache_argument", "generate_inputs"]


def cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache: `past_key_values`, later `cache`."""
    # The class may be a wrapper of another library, the instance's forward anybody's
    names = {name for f in (type(model).forward, model.forward) for name in inspect.signature(f).parameters}
    return "cache" if "cache" in names else "past_key_values"


def generate_inputs(model: Any, prompt: Prompt, work: PromptPass, logits: Tensor) -> dict[str, Any]:
    """What `generate` takes to go on from a prompt whose K/V are filled.

    Parameters
    ----------
    logits : Tensor, `[1, vocabulary]`
        Of the last prompt token.
    """
    device = model.get_input_embeddings().weight.device
    ids = prompt.ids[None].to(device)
    model.model.rope_deltas = prompt.rope_delta.to(device)
    # generate's own layout: the text position stands before t, h and w
    text = torch.arange(len(prompt.ids), device=device)[None, None]
    positions = torch.cat((text, prompt.positions[:, None].to(device)))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
        cache_argument(model): PrefilledCache(work.keys, work.values, ids.clone(), logits[None]),
    }


class _Layer(DynamicLayer):  # type: ignore[misc]
    """K/V of T tokens that shows the first T-1 until the last one is revealed. Never writes to the tensors.

    `full` holds all T tokens for as long as nobody has changed what the layer shows.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.full: tuple[Tensor, Tensor] | None = (keys, values)
        self.keys, self.values = keys[:, :, :-1], values[:, :, :-1]
        self.is_initialized = True

    def reveal(self, batch: int) -> None:
        assert self.full is not None
        self.keys, self.values = (t.expand(batch, -1, -1, -1) for t in self.full)
        self.full = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.full is not None:
            # Nobody has looked at the first call: assisted decoding would append the whole prompt once more
            raise InputError("a prefill is decoded inside the cache's `with`; call generate there")
        batch = key_states.shape[0]
        if self.keys is not None and self.values is not None and self.keys.shape[0] == 1 and batch > 1:
            self.keys, self.values = (t.expand(batch, -1, -1, -1) for t in (self.keys, self.values))
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self.full = None
        super().crop(*args, **kwargs)

    def reset(self) -> None:
        # The tensors may also serve as an exact prefix: drop them, do not zero them
        self.full = self.keys = self.values = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.full = None
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.full = None
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.full = None
        super().batch_select_indices(indices)


class PrefilledCache(DynamicCache):  # type: ignore[misc]
    """A dynamic cache that a selective prefill has filled. Like any cache it is good for one `generate`.

    Parameters
    ----------
    keys, values : list of Tensor, `[1, H, T, D]`
    ids : Tensor, `[1, T]`
    logits : Tensor, `[1, 1, vocabulary]`
        Of the last prompt token.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], ids: Tensor, logits: Tensor) -> None:
        super().__init__()
        self.layers = [_Layer(k, v) for k, v in zip(keys, values, strict=True)]
        self._ids = ids
        self._logits: Tensor | None = logits
        self._skipped = 0

    @property
    def prompt_length(self) -> int:
        """T."""
        return int(self._ids.shape[1])

    @property
    def fresh(self) -> bool:
        """True until the model has been called on this cache, or somebody changed it."""
        return self._logits is not None and all(layer.full is not None for layer in self.layers)

    def start_of(self, ids: Tensor, positions: Tensor | None) -> int | None:
        """Where in the prompt a call's tokens `[batch, n]` begin; None if they are not the prompt's.

        `generate`'s own position ids say it in their first row. A call without them (or with those of other tokens,
        as some releases pass for chunks) brings the last token, or what follows the chunks skipped so far.
        """
        total, n = self._ids.shape[1], ids.shape[1]
        starts = [total - 1 if n == 1 else self._skipped]
        if (said := _first_position(positions)) is not None:
            starts.insert(0, said)
        for start in starts:
            stop = min(start + n, total)
            if start < stop and bool((ids[:, : stop - start] == self._ids[:, start:stop]).all()):
                return start
        return None

    def first_logits(self, batch: int) -> Tensor:
        """Logits of the last prompt token, `[batch, 1, vocabulary]`. From here on all T tokens are shown."""
        assert self._logits is not None
        logits, self._logits = self._logits.expand(batch, -1, -1), None
        for layer in self.layers:
            layer.reveal(batch)
        return logits

    def skip(self, tokens: int) -> None:
        """Note a chunk of the prompt that is in the cache already."""
        self._skipped += tokens

    def forget_logits(self) -> None:
        """From here on this is an ordinary cache of T-1 tokens."""
        self._logits = None
        for layer in self.layers:
            layer.full = None

    def check_continues(self, positions: Tensor | None) -> None:
        """Raise InputError if a call's tokens do not follow those in the cache."""
        start = _first_position(positions)
        if start is not None and start != self.get_seq_length():
            raise InputError(
                "this prefill has been decoded already; call prefill again (it costs little), or give each generate "
                "a copy.deepcopy of what prefill returned"
            )


def _first_position(positions: Tensor | None) -> int | None:
    """Text position of a call's first token, where `generate`'s four rows of position ids are given."""
    if positions is None or positions.ndim != 3 or positions.shape[0] != 4 or not positions.numel():
        return None
    return int(positions[0, 0, 0])


class FirstCall:
    """Answers a model's first call on a `PrefilledCache` from it, while anybody uses the model so.

    Sets the instance's `forward` once, however many caches use the model, and takes it back with the last of them.
    The class is not touched.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._name = cache_argument(model)
        self._users = 0
        self._instance_forward = model.__dict__.get("forward")
        self._rope_deltas = model.model.rope_deltas
        original = model.forward
        names = tuple(inspect.signature(original).parameters)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
            cache = kwargs.get(self._name)
            if isinstance(cache, PrefilledCache):
                if kwargs.get("use_cache") is False:
                    raise InputError("a prefill cannot be decoded with use_cache=False; leave it out")
                if not cache.fresh:
                    cache.check_continues(kwargs.get("position_ids"))
                    return original(**kwargs)
                answer, kwargs = self._answer(cache, kwargs)
                if answer is not None:
                    return answer
            return original(**kwargs)

        forward.first_call = self  # type: ignore[attr-defined]
        self._forward = forward

    @classmethod
    def join(cls, model: Any) -> FirstCall:
        """The model's `FirstCall`, made and started for its first user."""
        call = getattr(model.__dict__.get("forward"), "first_call", None) or cls(model)
        call._users += 1
        model.forward = call._forward
        return call

    def leave(self) -> None:
        """The last to leave puts the model back as it was."""
        self._users -= 1
        if self._users or self._model.__dict__.get("forward") is not self._forward:
            return
        self._model.model.rope_deltas = self._rope_deltas
        if self._instance_forward is not None:
            self._model.forward = self._instance_forward
        else:
            del self._model.forward

    def _answer(self, cache: PrefilledCache, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The stored answer, or None and the arguments with which the model itself is to be called."""
        ids = kwargs.get("input_ids")
        start = None if ids is None else cache.start_of(ids, kwargs.get("position_ids"))
        if ids is None or start is None:
            cache.forget_logits()
            return None, kwargs
        batch, n = ids.shape
        if start + n < cache.prompt_length:
            # A chunk of a chunked prefill; its caller reads the last chunk's logits only
            cache.skip(n)
            return CausalLMOutputWithPast(**{self._name: cache}), kwargs
        if start + n == cache.prompt_length and self._plain(kwargs):
            return CausalLMOutputWithPast(logits=cache.first_logits(batch), **{self._name: cache}), kwargs
        cache.forget_logits()
        known = cache.prompt_length - 1 - start
        kwargs = dict(kwargs, input_ids=ids[:, known:])
        for name in ("position_ids", "mm_token_type_ids"):
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor) and value.shape[-1] == n:
                kwargs[name] = value[..., known:]
        return None, kwargs

    def _plain(self, kwargs: dict[str, Any]) -> bool:
        """True if the call wants nothing but the next token's logits."""
        config = self._model.config
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name, getattr(config, name, False)):
                return False
        if kwargs.get("labels") is not None or kwargs.get("return_dict") is False:
            return False
        mask = kwargs.get("attention_mask")
        return mask is None or (isinstance(mask, torch.Tensor) and bool(mask.all()))
