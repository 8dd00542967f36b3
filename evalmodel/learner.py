"""The second stage's learning: tower and adapters on the frozen decoder, and what one batch teaches them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from evalmodel.hints import KINDS, WORDS
from evalmodel.lessons import IGNORED, Batch
from evalmodel.tower import reading_loss
from evalmodel.weights import SCALING

__all__ = ["Learner", "Learnt"]

LINEAR = r"layers\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
TOWER_RATE = 0.1
"""Of the second stage's learning rate: the tower can read by then, and faster steps make it forget."""
READING = 1.0
"""Weight of reading cells beside answering, in the second stage."""
HINTS = 1.0
"""Weight of what cells should make the decoder think of."""
HINTED_AFTER = {"means": 20, "asked": 20, "tile": 24, "answer": 26}
"""Layers of the decoder behind which hints of a kind are read. Its heads that look for what followed the same word
earlier are in the 18th and 19th, and answers are looked up from the 22nd to the 24th: what a cell learns about itself
later than that is of no use to them."""


class Thoughts(torch.nn.Module):
    """Reads off the decoder's hidden states what they hold, a matrix for each kind of hint. Training alone has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = torch.nn.Parameter(torch.eye(width).repeat(len(KINDS), 1, 1))

    def forward(self, hidden: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        """Hidden states `[n, width]`, normed, and their kinds `[n]` to states to compare with words' embeddings."""
        every = torch.einsum("nw,kwv->nkv", hidden, self.read)
        return every[torch.arange(len(kind)), kind]


def _adapt(model: Any, rank: int) -> None:
    """Freeze the decoder and put low-rank adapters on its linear layers."""
    from peft import LoraConfig, inject_adapter_in_model

    for parameter in model.model.language_model.parameters():
        parameter.requires_grad_(False)
    adapters = LoraConfig(r=rank, lora_alpha=int(SCALING * rank), target_modules=LINEAR)
    inject_adapter_in_model(adapters, model.model.language_model)


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one batch says.

    Attributes
    ----------
    loss : Tensor
        Over answers, cells and hints.
    right : list of float
        Share of answer tokens that were right, by lesson.
    read : float
        Share of cells that were read right.
    hinted : dict of str to list of float
        By kind and family, shares of hints that were followed.
    """

    loss: torch.Tensor
    right: list[float]
    read: float
    hinted: dict[str, list[float]]


def _learn(model: Any, thoughts: Thoughts, batch: Batch, tokenizer: Any) -> Learnt:
    seen: list[Any] = []
    states: dict[int, Any] = {}
    decoder = model.model.language_model
    hooks = [model.model.visual.register_forward_hook(lambda module, args, out: seen.append(out.pooler_output))]
    for after in sorted(set(HINTED_AFTER.values())):
        layer = decoder.layers[:after][-1]
        hooks.append(layer.register_forward_hook(lambda module, args, out, after=after: states.update({after: out})))
    hidden = model.model(**batch.inputs).last_hidden_state
    for hook in hooks:
        hook.remove()
    labels = batch.labels[:, 1:]
    asked = labels != IGNORED
    logits = model.lm_head(hidden[:, :-1][asked])
    answers = F.cross_entropy(logits, labels[asked])
    words = model.get_input_embeddings().weight.detach()
    cells, read = reading_loss(seen[0], batch.cells, words, tokenizer)
    row = torch.arange(len(labels))[:, None].expand_as(labels)[asked]
    right = (logits.argmax(-1) == labels[asked]).float()
    said = labels[asked] != tokenizer.eos_token_id  # the end of an answer is easy
    shares = [right[(row == i) & said].mean().item() for i in range(len(labels))]
    loss = answers + READING * cells
    hinted: dict[str, list[float]] = defaultdict(list)
    if len(batch.hints):
        lesson, place, kind, token = batch.hints.T
        states = {after: out[0] if isinstance(out, tuple) else out for after, out in states.items()}
        vocabulary = torch.tensor(sorted(tokenizer(word, add_special_tokens=False).input_ids[0] for word in WORDS))
        read_off = torch.stack([states[HINTED_AFTER[name]] for name in KINDS])[kind, lesson, place]
        thought = thoughts(decoder.norm(read_off), kind) @ words[vocabulary].T
        wanted = torch.searchsorted(vocabulary, token.contiguous())
        loss = loss + HINTS * F.cross_entropy(thought, wanted)
        followed = (thought.argmax(-1) == wanted).float()
        for i, family in enumerate(batch.families):
            for k, name in enumerate(KINDS):
                if len(these := followed[(lesson == i) & (kind == k)]):
                    hinted[f"{name} {family}"].append(these.mean().item())
    return Learnt(loss, shares, read, hinted)


class Learner:
    """A model in training.

    Parameters
    ----------
    model : transformers model
        Grafted; gets adapters of `rank`.
    tokenizer
    rank : int

    Attributes
    ----------
    parameters : dict of str to Tensor
        What is trained, by the model's own names.
    """

    def __init__(self, model: Any, tokenizer: Any, rank: int) -> None:
        _adapt(model, rank)
        model.train()
        self._model = model
        self._tokenizer = tokenizer
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tower = [p for name, p in self.parameters.items() if ".visual." in name]
        others = [p for name, p in self.parameters.items() if ".visual." not in name]
        self._thoughts = Thoughts(model.config.text_config.hidden_size)
        options: dict[str, Any] = {"betas": (0.9, 0.98)}
        self._optimizer = torch.optim.AdamW([{"params": tower}, {"params": others}], weight_decay=0.01, **options)
        # Apart: it moves only where a batch has hints
        self._thinking = torch.optim.AdamW(self._thoughts.parameters(), weight_decay=0.0, **options)

    def step(self, batch: Batch, rate: float) -> Learnt:
        """Learn from a batch."""
        groups = [*self._optimizer.param_groups, *self._thinking.param_groups]
        for group, share in zip(groups, (TOWER_RATE, 1.0, 1.0), strict=True):
            group["lr"] = rate * share
        learnt = _learn(self._model, self._thoughts, batch, self._tokenizer)
        for optimizer in (self._optimizer, self._thinking):
            optimizer.zero_grad()
        learnt.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for optimizer in (self._optimizer, self._thinking):
            optimizer.step()
        return learnt

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self._optimizer.state_dict(),
            "thoughts": self._thoughts.state_dict(),
            "thinking": self._thinking.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, or from a `model` alone."""
        self._model.load_state_dict(state["model"], strict=False)
        parts: dict[str, Any] = {"optimizer": self._optimizer, "thoughts": self._thoughts, "thinking": self._thinking}
        for name, mine in parts.items():
            if name in state:
                mine.load_state_dict(state[name])
