"""From chat messages or a processor's output to token ids, picture spans and rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlcache.context import TurnMarks, find_marks
from vlcache.errors import InputError
from vlcache.types import Span

__all__ = [
    "Prompt",
    "build_prompt",
    "check_alike",
    "check_continuation",
    "expand_text",
    "longer",
    "picture_sources",
    "render",
    "turn_marks",
    "vision_tokens",
]

Messages = Sequence[Mapping[str, Any]]

_SOURCES = ("image", "image_url", "url", "bytes", "path", "base64")
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt.

    Attributes
    ----------
    ids : Tensor, int64, `[T]`
    spans : tuple of Span
        Its pictures, in order.
    positions : Tensor, int64, `[3, T]`
        Rotary positions (t, h, w).
    rope_delta : Tensor, int64, `[1, 1]`
        Next rotary position minus T.
    """

    ids: Tensor
    spans: tuple[Span, ...]
    positions: Tensor
    rope_delta: Tensor


def picture_sources(messages: Messages) -> tuple[list[Any], list[dict[str, Any]]]:
    """The pictures of a chat, in order, and the chat with bare `{"type": "image"}` in their places.

    Raises
    ------
    InputError
        A part that is neither text nor picture.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InputError(f"a {type(messages).__name__} is not a chat; give a list of messages or a processor's output")
    if not messages:
        raise InputError("the chat is empty; give at least one message")
    if isinstance(messages[0], Sequence):
        raise InputError("a list of chats; prefill one at a time")
    sources: list[Any] = []
    plain: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(f"message {number}: has no role; write {{'role': 'user', 'content': ...}}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            plain.append(dict(message))
            continue
        parts: list[dict[str, Any]] = []
        for part in content:
            source = _picture_of(part, number)
            if source is None:
                parts.append(dict(part))
            else:
                sources.append(source)
                parts.append({"type": "image"})
        plain.append(dict(message, content=parts))
    return sources, plain


def _picture_of(part: Any, message: int) -> Any:
    if not isinstance(part, Mapping):
        raise InputError(f"message {message}: a content part is a {type(part).__name__}; write {{'type': 'text', ...}}")
    kind = part.get("type")
    if kind == "text":
        return None
    if kind in ("image", "image_url"):
        sizes = [name for name in _SIZES if name in part]
        if sizes:
            raise InputError(f"message {message}: {', '.join(sizes)} of one picture; set sizes on the image processor")
        for name in _SOURCES:
            value = part.get(name)
            if isinstance(value, Mapping):  # {"url": ...} as in OpenAI's API, {"bytes": ...} as in datasets
                value = next((value[n] for n in _SOURCES if value.get(n) is not None), None)
            if value is not None:
                return f"data:;base64,{value}" if name == "base64" else value
        raise InputError(f"message {message}: an image part without a picture; write {{'type': 'image', 'image': ...}}")
    raise InputError(f"message {message}: a part of type {kind!r} is not supported; give text and images")


def render(processor: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """The chat template's text, with one placeholder per picture."""
    reserved = sorted({"tokenize", "return_dict", "return_tensors"} & set(options))
    if reserved:
        raise InputError(f"{', '.join(reserved)} cannot be set here; prefill tokenises and returns tensors itself")
    options = {"add_generation_prompt": True} | options
    return str(processor.apply_chat_template(messages, tokenize=False, **options))


def expand_text(text: str, placeholder: str, tokens: Sequence[int]) -> str:
    """Repeat each picture's placeholder as often as it has vision tokens.

    Raises
    ------
    InputError
        More or fewer placeholders than pictures: text that spells one would shift every picture after it.
    """
    parts = text.split(placeholder)
    if len(parts) - 1 != len(tokens):
        raise InputError(
            f"the prompt has {len(parts) - 1} picture placeholders for {len(tokens)} pictures; "
            f"remove {placeholder} from its text"
        )
    return "".join(part + placeholder * n for part, n in zip(parts, [*tokens, 0], strict=True))


def vision_tokens(model: Any, grid: tuple[int, int, int]) -> int:
    """N of a picture with that patch grid."""
    t, h, w = grid
    return int(t * h * w // model.config.vision_config.spatial_merge_size**2)


def build_prompt(model: Any, ids: Tensor, contents: Sequence[str], grids: Sequence[tuple[int, int, int]]) -> Prompt:
    """Find the pictures' spans among the tokens and compute rotary positions.

    Parameters
    ----------
    ids : Tensor, int64, `[T]`
    contents, grids
        Digest and patch grid of each picture, in order.

    Raises
    ------
    InputError
        Vision tokens that do not fit the pictures.
    """
    vision = ids == model.config.image_token_id
    if model.config.video_token_id is not None and bool((ids == model.config.video_token_id).any()):
        raise InputError("the prompt holds video tokens, which are not supported yet; give pictures")
    where = vision.nonzero().flatten().tolist()
    spans: list[Span] = []
    at = 0
    for number, (content, grid) in enumerate(zip(contents, grids, strict=True), 1):
        n = vision_tokens(model, grid)
        mine = where[at : at + n]
        if len(mine) != n or mine[-1] - mine[0] != n - 1:
            raise InputError(f"picture {number} needs {n} consecutive vision tokens, the prompt has {len(mine)} for it")
        if spans and spans[-1].stop == mine[0]:
            raise InputError(f"pictures {number - 1} and {number} touch; put <|vision_end|><|vision_start|> between")
        spans.append(Span(content, mine[0], n, grid))
        at += n
    if at != len(where):
        raise InputError(f"the prompt has {len(where)} vision tokens, its {len(spans)} pictures fill {at}")
    positions, delta = model.model.get_rope_index(
        ids[None], mm_token_type_ids=vision[None].int(), image_grid_thw=torch.tensor(grids)
    )
    return Prompt(ids, tuple(spans), positions[:, 0], delta)


def turn_marks(model: Any, processor: Any) -> TurnMarks:
    """How the chat template separates messages: of the tokens that may end a text, those that it writes itself."""
    stops = getattr(model.generation_config, "eos_token_id", None)
    named = [
        getattr(processor.tokenizer, "eos_token_id", None),
        *(stops if isinstance(stops, list | tuple) else [stops]),
    ]
    return find_marks(
        {int(token) for token in named if token is not None},
        lambda chat: render(processor, chat, add_generation_prompt=False),
        lambda text: processor.tokenizer(text)["input_ids"],
    )


def check_continuation(model: Any, ids: Sequence[int]) -> None:
    """Raise InputError unless `ids` are tokens of text that may stand behind a prompt."""
    if not len(ids):
        raise InputError("the continuation is empty; give at least one token id")
    if {model.config.image_token_id, model.config.video_token_id} & set(ids):
        raise InputError("the continuation holds tokens of a picture or video; give text")
    known = model.get_input_embeddings().num_embeddings
    beyond = [i for i in ids if not 0 <= i < known]
    if beyond:
        raise InputError(f"the continuation holds token {beyond[0]}, the vocabulary has {known}")


def check_alike(prompts: Sequence[Prompt]) -> None:
    """Raise InputError unless prompts are equal up to the end of their last picture, and go on behind it."""
    first, *others = prompts
    stop = first.spans[-1].stop
    for number, prompt in enumerate(prompts if others else (), 1):
        if len(prompt.ids) == prompt.spans[-1].stop:
            raise InputError(f"prompt {number} ends with its picture; score it alone")
    for number, other in enumerate(others, 2):
        if other.spans != first.spans or not torch.equal(other.ids[:stop], first.ids[:stop]):
            raise InputError(f"prompts 1 and {number} differ before the end of their pictures; score them apart")


def longer(prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """A prompt with more tokens of text behind it."""
    more = torch.tensor(ids, dtype=prompt.ids.dtype)
    ends = len(prompt.ids) + prompt.rope_delta.reshape(1, 1)
    positions = (ends + torch.arange(len(more))).expand(len(prompt.positions), -1)
    return Prompt(
        torch.cat((prompt.ids, more)),
        prompt.spans,
        torch.cat((prompt.positions, positions), dim=1),
        prompt.rope_delta,
    )
