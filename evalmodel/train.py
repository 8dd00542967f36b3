"""Train tileworld: `python -m evalmodel.train`.

Two stages: the vision tower learns to read cells (tower.py), then tower and low-rank adapters on the frozen decoder
learn to answer. All state is in one folder; a run that was stopped goes on where its last checkpoint was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from evalmodel.graft import build_processor, find_decoder, graft
from evalmodel.hints import KINDS, WORDS
from evalmodel.lessons import IGNORED, Batch, Lesson, collate, make_lesson
from evalmodel.questions import FAMILIES, Size, generator
from evalmodel.tower import align, reading_loss
from evalmodel.weights import SCALING, shipped, unpack

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


def adapt(model: Any, rank: int) -> None:
    """Freeze the decoder and put low-rank adapters on its linear layers."""
    from peft import LoraConfig, inject_adapter_in_model

    for parameter in model.model.language_model.parameters():
        parameter.requires_grad_(False)
    adapters = LoraConfig(r=rank, lora_alpha=int(SCALING * rank), target_modules=LINEAR)
    inject_adapter_in_model(adapters, model.model.language_model)


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Course:
    """Which lessons come next: harder ones later, families that fail more often.

    Attributes
    ----------
    right, hinted : dict of deque of float
        Shares of a family's answers that were right, and of the hints of a kind and family that were followed, in
        their latest lessons.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.right: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))
        self.hinted: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))

    def lessons(self, step: int, tokenizer: Any, tokens: int) -> list[Lesson]:
        """Lessons of similar length, `tokens` in all with padding."""
        rng = generator("train", self._seed, step)
        most = 4 if step < 150 else 6
        tight = 0.9 if step < 350 else 0.6 if step < 1200 else 0.45
        open_now = [f for f in FAMILIES if step >= (80 if f in ("compare", "legend", "two_hop") else 0)]
        weights = [1.1 - min(1.0, self.mean(family)) for family in open_now]
        pool = []
        for _ in range(12):
            size = Size(most, rng.random() < tight)
            family = rng.choices(open_now, weights)[0]
            asked = 3 if family == "question_first" else rng.randint(5, 9)
            pool.append(make_lesson(family, tokenizer, rng, size, asked))
        pool.sort(key=lambda lesson: len(lesson.ids))
        start = rng.randrange(len(pool))
        chosen = pool[start:] + pool[:start][::-1]
        some: list[Lesson] = []
        for lesson in chosen:
            if some and max(len(lesson.ids), *(len(s.ids) for s in some)) * (len(some) + 1) > tokens:
                break
            some.append(lesson)
        return some

    def mean(self, family: str) -> float:
        return _mean(self.right[family])


def _mean(shares: Collection[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0


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


def learn(model: Any, thoughts: Thoughts, batch: Batch, tokenizer: Any) -> Learnt:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/tileworld"), help="folder of checkpoints and log")
    parser.add_argument("--tower-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--decay", type=int, default=500, help="of the steps, the last ones with a falling rate")
    parser.add_argument("--tokens", type=int, default=1100, help="a step, padding included")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from-shipped", action="store_true", help="start from the weights of the package")
    options = parser.parse_args()
    if options.from_shipped and (options.work / "state.pt").exists():
        parser.error(f"--from-shipped: {options.work} holds a training already; it goes on without the flag")
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    gguf = find_decoder(options.work)
    processor = build_processor(gguf)
    model = graft(gguf, processor.tokenizer)
    log = (options.work / "log.jsonl").open("a", buffering=1)
    _first_stage(model, processor, options, log)
    _second_stage(model, processor, options, log)


def _first_stage(model: Any, processor: Any, options: argparse.Namespace, log: Any) -> None:
    if options.from_shipped or (options.work / "state.pt").exists():
        return  # the second stage brings its own tower
    done = options.work / "tower.pt"
    if not done.exists():
        start = time.monotonic()
        for row in align(model, processor, options.tower_steps):
            if row["step"] % 20 == 0 or row["step"] == options.tower_steps - 1:
                _write(log, {"stage": "tower", **row, "seconds": time.monotonic() - start})
        part = done.with_suffix(".part")
        torch.save(model.model.visual.state_dict(), part)
        part.replace(done)
    model.model.visual.load_state_dict(torch.load(done, weights_only=True))


def _second_stage(model: Any, processor: Any, options: argparse.Namespace, log: Any) -> None:
    adapt(model, options.rank)
    model.train()
    parameters = trained(model)
    tower = [p for name, p in parameters.items() if ".visual." in name]
    others = [p for name, p in parameters.items() if ".visual." not in name]
    groups = [{"params": tower}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, weight_decay=0.01, betas=(0.9, 0.98))
    thoughts = Thoughts(model.config.text_config.hidden_size)
    thinking = torch.optim.AdamW(thoughts.parameters(), lr=options.rate, weight_decay=0.0, betas=(0.9, 0.98))
    course = Course(options.seed)
    step = 0
    checkpoint = options.work / "state.pt"
    if options.from_shipped:
        model.load_state_dict(unpack(shipped(), SCALING), strict=False)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        if "thoughts" in state:
            thoughts.load_state_dict(state["thoughts"])
            thinking.load_state_dict(state["thinking"])
        for about, seen in state["hinted"].items():
            course.hinted[about].extend(seen)
        step = state["step"]
        for family, seen in state["right"].items():
            course.right[family].extend(seen)
        print(f"going on from step {step}", flush=True)
    start = time.monotonic()
    tokens = 0
    while step < options.steps:
        factor = min(1.0, (step + 1) / 40) * min(1.0, 0.02 + (options.steps - step) / options.decay)
        for group, share in zip(optimizer.param_groups, (TOWER_RATE, 1.0), strict=True):
            group["lr"] = options.rate * share * factor
        thinking.param_groups[0]["lr"] = options.rate * factor
        batch = collate(course.lessons(step, processor.tokenizer, options.tokens), processor)
        learnt = learn(model, thoughts, batch, processor.tokenizer)
        optimizer.zero_grad()
        thinking.zero_grad()
        learnt.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        thinking.step()
        tokens += batch.labels.numel()
        for family, share in zip(batch.families, learnt.right, strict=True):
            course.right[family].append(share)
        for about, shares in learnt.hinted.items():
            course.hinted[about].extend(shares)
        step += 1
        if step % 10 == 0 or step == options.steps:
            means = {family: round(course.mean(family), 3) for family in FAMILIES}
            took = time.monotonic() - start
            _write(
                log,
                {
                    "stage": "answers",
                    "step": step,
                    "loss": learnt.loss.item(),
                    "read": learnt.read,
                    "hinted": {about: round(_mean(seen), 3) for about, seen in course.hinted.items()},
                    "seconds": took,
                    "tokens": tokens,
                    **means,
                },
            )
        if step % options.save_every == 0 or step == options.steps:
            part = checkpoint.with_suffix(".part")
            kept: dict[str, Any] = {"model": {k: v.detach() for k, v in parameters.items()}}
            kept |= {"optimizer": optimizer.state_dict()}
            kept |= {"thoughts": thoughts.state_dict(), "thinking": thinking.state_dict()}
            kept |= {"step": step, "right": {k: list(v) for k, v in course.right.items()}}
            kept |= {"hinted": {k: list(v) for k, v in course.hinted.items()}}
            torch.save(kept, part)
            part.replace(checkpoint)


def _write(log: Any, row: dict[str, Any]) -> None:
    line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    print(line, flush=True)
    log.write(line + "\n")


if __name__ == "__main__":
    main()
