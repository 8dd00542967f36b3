"""The processor without torchvision gives what transformers' own gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Lab, make_picture

from vlcache import ConfigError, VLCache
from vlcache.bench.checkpoints import TINY, save_checkpoint
from vlcache.engines.transformers import load
from vlcache.engines.transformers.load import PictureProcessor, load_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), TINY["qwen3_vl"])


def stand_in(lab: Lab) -> PictureProcessor:
    own = lab.processor
    return PictureProcessor(own.tokenizer, own.image_processor, own.chat_template)


def test_the_stand_in_gives_the_same_inputs(lab: Lab) -> None:
    chat = lab.chat(make_picture(1), "and", make_picture(2, 112, 196), "?")
    ours, theirs = Lab(lab.family, lab.model, stand_in(lab)).inputs(chat), lab.inputs(chat)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_the_stand_in_serves_the_cache(lab: Lab) -> None:
    other = Lab(lab.family, lab.model, stand_in(lab))
    for chat in (lab.chat(make_picture(1), "q"), lab.chat("text alone")):
        expected = lab.model.generate(**lab.inputs(chat), max_new_tokens=6, min_new_tokens=6)
        with VLCache(other.model, other.processor) as cache:
            assert torch.equal(
                other.model.generate(**cache.prefill(chat), max_new_tokens=6, min_new_tokens=6), expected
            )


@pytest.mark.parametrize("torchvision", [True, False])
def test_a_checkpoint_loads_with_and_without_torchvision(
    checkpoint: Path, torchvision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torchvision:
        monkeypatch.setattr(load, "torchvision_imports", lambda: False)
    model, processor = load_checkpoint(checkpoint)
    assert isinstance(processor, PictureProcessor) is not torchvision
    lab: Any = Lab("qwen3_vl", model, processor)
    chat = lab.chat(make_picture(1), "q")
    with VLCache(model, processor) as cache:
        assert cache.prefill(chat)["input_ids"].shape[1] > 20
        assert cache.last.spans[0].outcome == "new"


def test_what_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_checkpoint(tmp_path)
