"""First stage: the vision tower alone learns to say in the decoder's own word embeddings what each cell shows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evalmodel.pictures import BLANK, Drawn
from evalmodel.questions import Size, generator, make_item

__all__ = ["align", "cell_tokens", "reading_loss"]

_BLANK_WEIGHT = 0.1


def align(model: Any, processor: Any, steps: int, rate: float = 1.5e-3) -> Iterator[dict[str, float]]:
    """Train `model.model.visual`, yielding the loss and the share of cells that show something and are read right."""
    tower = model.model.visual
    words = model.get_input_embeddings().weight.detach()
    optimizer = torch.optim.AdamW(tower.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * min(1.0, 0.02 + (steps - step) / (0.6 * steps))
        pictures = _pictures(generator("train", "tower", step), cells=700)
        pixels = processor.image_processor(images=[p.image for p in pictures], return_tensors="pt")
        features = model.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"]).pooler_output
        features = torch.cat(list(features))
        targets = cell_tokens(pictures, processor.tokenizer)
        wrong, read = reading_loss(features, targets, words, processor.tokenizer)
        apart = ((features - words[targets]) ** 2).mean() / words[targets].var()
        loss = wrong + apart
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        yield {"step": step, "loss": loss.item(), "read": read}


def reading_loss(features: Tensor, targets: Tensor, words: Tensor, tokenizer: Any) -> tuple[Tensor, float]:
    """How far features are from their cells' words, as a choice among the words that are there.

    Parameters
    ----------
    features : Tensor, `[cells, hidden]`
    targets : Tensor, int64, `[cells]`
    words : Tensor, `[vocabulary, hidden]`
        The decoder's embeddings.

    Returns
    -------
    Tensor, float
        The loss, and the share read right of the cells that show something.
    """
    vocabulary, place = torch.unique(targets, return_inverse=True)
    likeness = 20 * F.normalize(features, dim=-1) @ F.normalize(words[vocabulary], dim=-1).T
    shown = targets != _token(tokenizer, BLANK)
    weight = torch.where(shown, 1.0, _BLANK_WEIGHT)
    loss = (F.cross_entropy(likeness, place, reduction="none") * weight).sum() / weight.sum()
    return loss, (likeness.argmax(-1) == place)[shown].float().mean().item()


def cell_tokens(pictures: Sequence[Drawn], tokenizer: Any) -> Tensor:
    """The word of every cell of every picture as its token, int64 `[cells]`."""
    return torch.tensor([_token(tokenizer, word) for p in pictures for row in p.words for word in row])


def _pictures(rng: random.Random, cells: int) -> list[Drawn]:
    """Pictures of `cells` cells, nearly all of which show something."""
    pictures: list[Drawn] = []
    while sum(len(p.words) * len(p.words[0]) for p in pictures) < cells:
        size = Size(rng.choice((6, 9, 12, 16)), rng.random() < 0.85)
        pictures += make_item(rng.choice(("lookup", "lookup", "table", "form")), rng, size).pictures
    return pictures


@lru_cache(maxsize=1024)
def _token(tokenizer: Any, word: str) -> int:
    (token,) = tokenizer(word, add_special_tokens=False).input_ids
    return int(token)
