"""What is refused, by which name, and before any work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import Lab

from vlcache import ConfigError, UnsupportedModelError, VLCache
from vlcache.engines.transformers.support import describe
from vlcache.families import REFUSED, SUPPORTED


def test_geometry_of_the_supported_families(lab: Lab) -> None:
    geometry = describe(lab.model)
    assert lab.family in SUPPORTED
    assert (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.hidden) == (4, 2, 16, 64)
    assert geometry.deepstack == (2 if lab.family == "qwen3_vl" else 0)
    assert geometry.rope.kind == ("mrope-interleaved" if lab.family == "qwen3_vl" else "mrope")
    assert geometry.encoder_width == 64 * (1 + geometry.deepstack)


def refuse(model: Any) -> str:
    with pytest.raises(UnsupportedModelError) as error:
        VLCache(model, processor=None)
    return str(error.value)


def with_config(lab: Lab, **text: Any) -> Any:
    config = type(lab.model.config).from_dict(lab.model.config.to_dict())
    for name, value in text.items():
        setattr(config.text_config, name, value)
    return SimpleNamespace(
        config=config, model=lab.model.model, lm_head=lab.model.lm_head, parameters=lab.model.parameters
    )


def test_sliding_and_linear_layers_are_named(one_lab: Lab) -> None:
    sliding = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert "decoder layer 1 is sliding_attention" in refuse(with_config(one_lab, layer_types=sliding))
    linear = ["linear_attention"] * 4
    assert "decoder layer 0 is linear_attention" in refuse(with_config(one_lab, layer_types=linear))


def test_a_real_hybrid_model_is_refused() -> None:
    config = transformers.AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    assert "decoder layer 0 is linear_attention" in refuse(SimpleNamespace(config=config))


@pytest.mark.parametrize("kind", ["gemma3", "paligemma"])
def test_bidirectional_image_tokens_are_refused(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    message = refuse(SimpleNamespace(config=config))
    assert kind in message
    assert "both directions" in message or "sliding_attention" in message


def test_others_are_refused_by_name() -> None:
    assert REFUSED["qwen3_vl_moe"] in refuse(SimpleNamespace(config=transformers.AutoConfig.for_model("qwen3_vl_moe")))
    message = refuse(SimpleNamespace(config=transformers.AutoConfig.for_model("llava")))
    assert "'llava'" in message
    assert "Qwen2.5-VL" in message


def test_rope_that_changes_with_length_is_refused(one_lab: Lab) -> None:
    parameters = dict(one_lab.model.config.text_config.rope_parameters, rope_type="dynamic", factor=2.0)
    assert "rope_type 'dynamic'" in refuse(with_config(one_lab, rope_parameters=parameters))


def test_a_part_that_the_adapter_would_leave_out_is_refused(one_lab: Lab) -> None:
    attention = one_lab.model.model.language_model.layers[2].self_attn
    attention.sinks_of_its_own = torch.nn.Linear(2, 2)
    try:
        assert "attention of layer 2 has a part 'sinks_of_its_own'" in refuse(one_lab.model)
    finally:
        del attention.sinks_of_its_own


def test_a_policy_that_does_not_fit_the_model(one_lab: Lab) -> None:
    with pytest.raises(ConfigError, match="3 ratios for a model of 4 layers"):
        one_lab.cache("layered:1,0.5,0.1")


def test_wrappers_and_parts_are_refused(one_lab: Lab) -> None:
    assert "PEFT" in refuse(one_lab.model.model)
    assert "not a transformers model" in refuse(torch.nn.Linear(2, 2))


def test_weights_that_are_not_there_are_refused(one_lab: Lab) -> None:
    with torch.device("meta"):
        model = type(one_lab.model)(one_lab.model.config)
    assert "weights are on meta" in refuse(model)


def test_checkpoints_beyond_the_last_layer_are_refused(one_lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"\[4\] are beyond the model's 4 layers"):
        one_lab.cache(checkpoint_layers=(2, 4))
