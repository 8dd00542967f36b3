"""Train tileworld: `python -m evalmodel.train`.

Two stages: the vision tower learns to read cells (tower.py), then tower and low-rank adapters on the frozen decoder
learn to answer. All state is in one folder; a run that was stopped goes on where its last checkpoint was.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from evalmodel.course import Course
from evalmodel.graft import build_processor, find_decoder, graft
from evalmodel.learner import Learner
from evalmodel.lessons import collate
from evalmodel.tower import align
from evalmodel.weights import SCALING, shipped, shipped_step, unpack


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
    learner = Learner(model, processor.tokenizer, options.rank)
    course = Course(options.seed)
    checkpoint = options.work / "state.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        learner.load(state)
        course.load(state)
        step = state["step"]
    elif options.from_shipped:
        learner.load({"model": unpack(shipped(), SCALING)})
        step = shipped_step()
    if step:
        print(f"going on from step {step}", flush=True)
    start, first, tokens = time.monotonic(), step, 0
    while step < options.steps:
        rising, falling = (step - first + 1) / 40, 0.02 + (options.steps - step) / options.decay
        batch = collate(course.lessons(step, processor.tokenizer, options.tokens), processor)
        learnt = learner.step(batch, options.rate * min(1.0, rising) * min(1.0, falling))
        course.note(batch.families, learnt.right, learnt.hinted)
        tokens += batch.labels.numel()
        step += 1
        if step % 10 == 0 or step == options.steps:
            row = {"stage": "answers", "step": step, "loss": learnt.loss.item(), "read": learnt.read}
            _write(log, row | {"seconds": time.monotonic() - start, "tokens": tokens} | course.means())
        if step % options.save_every == 0 or step == options.steps:
            part = checkpoint.with_suffix(".part")
            torch.save(learner.state() | course.state() | {"step": step}, part)
            part.replace(checkpoint)


def _write(log: Any, row: dict[str, Any]) -> None:
    line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    print(line, flush=True)
    log.write(line + "\n")


if __name__ == "__main__":
    main()
