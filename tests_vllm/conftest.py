"""vLLM engines on tiny random checkpoints, one per family and session, and short ways to ask them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, to look at it
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the reference

import numpy as np
import pytest
import torch
from PIL import Image

from vlcache.bench.checkpoints import Shape, save_checkpoint

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
BLOCK = 128

# As the other tests' tiny shapes, with the smallest heads that vLLM's attention on CPUs takes
SHAPES: dict[str, Shape] = {
    "qwen2_vl": Shape("qwen2_vl", 128, 256, 4, 4, 2, 32, (4, 6, 6), 2, 64, 256, 2, vocabulary=320, tied=False, std=0.1),
    "qwen2_5_vl": Shape(
        "qwen2_5_vl", 128, 256, 4, 4, 2, 32, (4, 6, 6), 2, 64, 128, 2, (1,), vocabulary=320, tied=False, std=0.1
    ),
    "qwen3_vl": Shape("qwen3_vl", 128, 256, 4, 4, 2, 32, (8, 4, 4), 3, 64, 256, 2, (), (0, 1), 320, 5e6, False, 0.1),
}


def picture(seed: int, width: int = 560, height: int = 420) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def prompt(body: str, pictures: Sequence[Image.Image], system: str = "You answer.") -> dict[str, Any]:
    """A chat of one turn; `[]` in its text are the pictures."""
    text = body.replace("[]", PICTURE)
    whole = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return {"prompt": whole, "multi_modal_data": {"image": list(pictures)}}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, their log-probabilities, and how many of the prompt's tokens vLLM counts as cached."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    prompt_tokens: int


@dataclass
class Engine:
    """An engine with the plugin."""

    family: str
    folder: Path
    llm: Any

    def ask(self, *prompts: dict[str, Any], vlcache: Any = "", tokens: int = 16) -> list[Answer]:
        """All prompts at once. `vlcache`: a policy, or False for vLLM as it is."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"vlcache": vlcache}}
        options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, extra_args=extra)
        return [
            Answer(
                list(out.outputs[0].token_ids),
                [
                    line[token].logprob
                    for token, line in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)
                ],
                int(out.num_cached_tokens or 0),
                len(out.prompt_token_ids),
            )
            for out in self.llm.generate(list(prompts), options, use_tqdm=False)
        ]

    def forget(self, store: bool = True) -> None:
        """Empty vLLM's prefix and encoder caches, and the store."""
        from vlcache.engines.vllm.shared import shared

        assert self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if store:
            connector = self.connector
            shared(connector._config).store.clear()
            connector._scheduler._behind.clear()
            connector._scheduler._chats.clear()

    def plain(self, *prompts: dict[str, Any], tokens: int = 16) -> list[Answer]:
        """What vLLM answers without the plugin's help, and without any cache."""
        self.forget(store=False)
        answers = self.ask(*prompts, vlcache=False, tokens=tokens)
        self.forget(store=False)
        return answers

    @property
    def connector(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector


def start(folder: Path, family: str, **options: Any) -> Engine:
    from vllm import LLM

    settings = {
        "enforce_eager": True,
        "max_model_len": 4096,
        "dtype": "float32",
        "limit_mm_per_prompt": {"image": 4, "video": 0},
        "max_num_seqs": 4,
        "seed": 0,
        "kv_transfer_config": {
            "kv_connector": "VLCacheConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "vlcache.engines.vllm.connector",
            "kv_connector_extra_config": {"policy": "full"},
        },
        "ec_transfer_config": {
            "ec_connector": "VLCacheEncoderConnector",
            "ec_role": "ec_both",
            "ec_connector_module_path": "vlcache.engines.vllm.encoder",
        },
    }
    return Engine(family, folder, LLM(model=str(folder), **(settings | options)))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_checkpoint(tmp_path_factory.mktemp(family), SHAPES[family])
        return made[family]

    return get


@pytest.fixture(scope="module", params=sorted(SHAPES))
def engine(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Iterator[Engine]:
    """One after the other: two would share the plugin's globals."""
    its = start(checkpoints(request.param), request.param)
    yield its
    its.llm.llm_engine.engine_core.shutdown()
    del its.llm


@pytest.fixture
def known(engine: Engine) -> Engine:
    """`picture(0)` has been seen in another context, and vLLM's own caches are empty."""
    engine.forget()
    engine.ask(prompt("[]what?", [picture(0)], "first"), tokens=1)
    engine.forget(store=False)
    return engine


def close(ours: Sequence[Answer], theirs: Sequence[Answer], bound: float = 1e-4) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other.tokens
        assert max(abs(a - b) for a, b in zip(mine.logprobs, other.logprobs, strict=True)) <= bound


torch.set_num_threads(1)
