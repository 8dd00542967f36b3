"""Chats to train on: a few questions about one item's pictures, in contexts of every kind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evalmodel.contexts import SYSTEMS, assistant, distraction, prompt, talk, user
from evalmodel.hints import KINDS, cell_hints, tile_color
from evalmodel.pictures import CELL, Board, Drawn
from evalmodel.questions import Item, Size, ask_lookup, follow_up, make_item
from evalmodel.tower import cell_tokens

__all__ = ["IGNORED", "Batch", "Lesson", "collate", "encode_chat", "make_lesson"]

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Lesson:
    """A chat as tokens, the picture pads already as many as the pictures have tokens.

    Attributes
    ----------
    family : str
    ids, labels : list of int
        Labels are `IGNORED` outside of answers.
    pictures : tuple of Drawn
    hints : list of (int, int, int)
        Places in `ids`, each with a kind (`hints.KINDS`, by place) and the token to think of.
    """

    family: str
    ids: list[int]
    labels: list[int]
    pictures: tuple[Drawn, ...]
    hints: list[tuple[int, int, int]]


def make_lesson(family: str, tokenizer: Any, rng: random.Random, size: Size, asked: int) -> Lesson:
    """An item of a family in a random context, and `asked` questions in all.

    The later ones are about the same pictures. Where questions stand before their picture, they are about another.
    """
    item = make_item(family, rng, size)
    items = [item]
    turns: list[dict[str, Any]] = []
    pictures: list[Drawn] = []
    if rng.random() < 0.2:
        turns += talk(rng)
    if rng.random() < 0.15:
        picture, question, answer = distraction(item, rng, size.tight)
        turns += [user("", (picture,), question), assistant(answer)]
        pictures.append(picture)
    chat = [*prompt(item, rng.choice(SYSTEMS), turns), assistant(item.answer)]
    said = [(item.question, item.answer)]
    if family == "question_first":
        items += [make_item(family, rng, size) for _ in range(asked - 1)]
        said += [(other.question, other.answer) for other in items[1:]]
        for other in items[1:]:
            chat += [user(other.before, other.pictures, other.question), assistant(other.answer)]
    else:
        said += _more(item, rng, asked - 1)
        for question, answer in said[1:]:
            chat += [user("", (), question), assistant(answer)]
    ids, labels = encode_chat(tokenizer, chat, learnt_from=1 + len(turns))
    begins = [i + 1 for i, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|vision_start|>")]
    found = (about for one in items for about in cell_hints(one))
    words = [
        (begin + hint.cell, hint.kind, hint.word)
        for begin, about in zip(begins[len(pictures) :], found, strict=True)
        for hint in about
    ]
    answers = [i for i in range(1, len(ids)) if labels[i] != IGNORED and labels[i - 1] == IGNORED]
    for place, (question, answer) in zip(answers, said, strict=True):
        if color := tile_color(item, question):
            words.append((place - 1, KINDS.index("tile"), f" {color}"))
            words.append((place - 1, KINDS.index("answer"), f" {answer}"))
    hinted = [(at, kind, tokenizer(word, add_special_tokens=False).input_ids[0]) for at, kind, word in words]
    pictures += [picture for one in items for picture in one.pictures]
    return Lesson(family, ids, labels, tuple(pictures), hinted)


def _more(item: Item, rng: random.Random, n: int) -> list[tuple[str, str]]:
    more = [follow_up(item, rng) for _ in range(n)]
    content = item.pictures[0].content
    if isinstance(content, Board) and item.family in ("lookup", "neighbour") and rng.random() < 0.15:
        tiles = [f"{t[1]} {t[0]} {t[2]}" for row in content.tiles for t in row]
        more.append(("List the tiles.", ", ".join(tiles)))
    if item.family in ("legend", "two_hop"):
        (tiled,) = (p.content for p in item.pictures if isinstance(p.content, Board))
        more = [ask_lookup(tiled, rng) if rng.random() < 0.3 else one for one in more]
    return more


def encode_chat(tokenizer: Any, chat: Sequence[dict[str, Any]], learnt_from: int = 0) -> tuple[list[int], list[int]]:
    """Tokens of a chat as the model's chat template writes it, and labels at what the assistant says.

    Messages before the one with the number `learnt_from` have no labels.
    """
    ids: list[int] = []
    labels: list[int] = []
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def add(tokens: list[int], learnt: bool = False) -> None:
        ids.extend(tokens)
        labels.extend(tokens if learnt else [IGNORED] * len(tokens))

    def text(written: str) -> list[int]:
        return list(tokenizer(written, add_special_tokens=False).input_ids)

    newline = text("\n")
    for number, message in enumerate(chat):
        learnt = message["role"] == "assistant" and number >= learnt_from
        add(text(f"<|im_start|>{message['role']}\n"))
        for part in message["content"]:
            if part["type"] == "text":
                add(text(part["text"]), learnt)
            else:
                width, height = part["image"].size
                pads = [tokenizer.convert_tokens_to_ids("<|image_pad|>")] * (width * height // CELL**2)
                add([tokenizer.convert_tokens_to_ids("<|vision_start|>"), *pads])
                add([tokenizer.convert_tokens_to_ids("<|vision_end|>")])
        add([end], learnt)
        add(newline)
    return ids, labels


@dataclass(frozen=True, slots=True)
class Batch:
    """Lessons side by side, padded on the right.

    Attributes
    ----------
    inputs : dict
        What the model's forward takes.
    labels : Tensor, int64, `[B, T]`
    cells : Tensor, int64, `[vision tokens]`
        The words that the pictures' cells show, as tokens.
    hints : Tensor, int64, `[hints, 4]`
        Lesson, place, kind and token.
    families : list of str
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    cells: Tensor
    hints: Tensor
    families: list[str]


def collate(lessons: Sequence[Lesson], processor: Any) -> Batch:
    longest = max(len(lesson.ids) for lesson in lessons)
    pad = processor.tokenizer.pad_token_id
    ids = torch.full((len(lessons), longest), pad)
    labels = torch.full((len(lessons), longest), IGNORED)
    mask = torch.zeros(len(lessons), longest, dtype=torch.long)
    for i, lesson in enumerate(lessons):
        n = len(lesson.ids)
        ids[i, :n], labels[i, :n], mask[i, :n] = torch.tensor(lesson.ids), torch.tensor(lesson.labels), 1
    pictures = [picture for lesson in lessons for picture in lesson.pictures]
    pixels = processor.image_processor(images=[picture.image for picture in pictures], return_tensors="pt")
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels["pixel_values"]}
    inputs["image_grid_thw"] = pixels["image_grid_thw"]
    inputs["mm_token_type_ids"] = (ids == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    cells = cell_tokens(pictures, processor.tokenizer)
    hinted = torch.tensor([(i, *hint) for i, lesson in enumerate(lessons) for hint in lesson.hints]).reshape(-1, 4)
    return Batch(inputs, labels, cells, hinted, [lesson.family for lesson in lessons])
