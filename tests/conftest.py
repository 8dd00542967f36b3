"""Tiny random models of each family, and the largest differences that the exactness tests saw."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from PIL import Image
from servers import RedisServer

from vlcache import VLCache
from vlcache.bench.checkpoints import TINY, build_model, build_processor

torch.set_num_threads(1)  # tiny matrices: threads only wait for each other

_LARGEST: dict[str, float] = {}


@dataclass(frozen=True)
class Lab:
    """A model, its processor, and short ways to make prompts for them."""

    family: str
    model: Any
    processor: Any

    def chat(self, *user: Any, system: str = "You answer questions about pictures.") -> list[dict[str, Any]]:
        """One user turn of pictures and texts behind a system prompt."""
        parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in user]
        return [{"role": "system", "content": system}, {"role": "user", "content": parts}]

    def inputs(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What plain transformers makes of a chat."""
        options = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return dict(self.processor.apply_chat_template(messages, **options))

    def cache(self, policy: str | Any = "full", **options: Any) -> VLCache:
        """A cache whose hits are pictures' hits: no exact prefixes unless asked for."""
        return VLCache(self.model, self.processor, policy, **({"prefix_cache": False} | options))


def make_picture(seed: int, width: int = 168, height: int = 112) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="session", params=sorted(TINY))
def lab(request: pytest.FixtureRequest) -> Lab:
    shape = TINY[request.param]
    processor = build_processor(shape)
    return Lab(request.param, build_model(shape, processor.tokenizer), processor)


@pytest.fixture(scope="session")
def one_lab() -> Lab:
    """One family, for what does not depend on it."""
    processor = build_processor(TINY["qwen2_5_vl"])
    return Lab("qwen2_5_vl", build_model(TINY["qwen2_5_vl"], processor.tokenizer), processor)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of the whole run's; who uses it empties it first."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def close(request: pytest.FixtureRequest) -> Callable[[torch.Tensor, torch.Tensor, float], None]:
    """Assert that two tensors agree, and remember by how much, for the summary."""

    def check(ours: torch.Tensor, reference: torch.Tensor, bound: float) -> None:
        assert ours.shape == reference.shape
        difference = float((ours.float() - reference.float()).abs().max())
        name = request.node.name
        _LARGEST[name] = max(_LARGEST.get(name, 0.0), difference)
        assert difference <= bound, f"largest difference {difference:.2e} is over {bound:.0e}"

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _LARGEST:
        terminalreporter.section("largest differences from the reference")
        for name, difference in sorted(_LARGEST.items()):
            terminalreporter.write_line(f"{difference:.1e}  {name}")
