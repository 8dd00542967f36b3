"""What a caller asks, read: chat messages or a processor's output to pictures and a tokenised prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlcache.engines.transformers.pictures import Media, Reader, media_from_inputs, processor_fingerprint
from vlcache.engines.transformers.prompt import (
    Prompt,
    build_prompt,
    expand_text,
    picture_sources,
    render,
    vision_tokens,
)
from vlcache.errors import InputError
from vlcache.report import Clock

__all__ = ["Request", "prompt_ids", "read_request"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as read.

    Attributes
    ----------
    settings : str
        Fingerprint of the processor's settings.
    media : tuple of Media
        Its pictures.
    prompt : Prompt or None
        None without pictures.
    inputs : mapping
        The model's inputs as they are, of a request without pictures.
    """

    settings: str
    media: tuple[Media, ...]
    prompt: Prompt | None
    inputs: Mapping[str, Any]


def read_request(
    request: Any, template: Mapping[str, Any], model: Any, processor: Any, reader: Reader, clock: Clock
) -> Request:
    """Read chat messages or a processor's output.

    Raises
    ------
    MediaError, InputError
        A picture or a prompt that cannot be used.
    """
    settings = processor_fingerprint(processor.image_processor)
    inputs = request if isinstance(request, Mapping) else None
    with clock.stage("media"):
        if inputs is not None:
            media = media_from_inputs(inputs, settings)
        else:
            sources, messages = picture_sources(request)
            media = reader.read(sources, processor.image_processor, settings)
    with clock.stage("tokens"):
        if inputs is None:
            text = render(processor, messages, **template)
            text = expand_text(text, processor.image_token, [vision_tokens(model, m.grid) for m in media])
            if not media:
                return Request(settings, (), None, processor(text=[text], return_tensors="pt"))
            ids = processor.tokenizer([text], return_tensors="pt")["input_ids"][0]
        else:
            if not media:
                return Request(settings, (), None, inputs)
            ids = _one_prompt(inputs)
        prompt = build_prompt(model, ids.cpu(), [m.content for m in media], [m.grid for m in media])
    return Request(settings, tuple(media), prompt, {})


def prompt_ids(inputs: Mapping[str, Any]) -> Tensor:
    """A processor's token ids; InputError where there is no tensor of them."""
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
    ids = prompt_ids(inputs)
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise InputError(f"the inputs hold {ids.shape[0]} prompts; prefill one at a time")
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        raise InputError("the prompt is padded; tokenise it without padding")
    return ids.reshape(-1)
