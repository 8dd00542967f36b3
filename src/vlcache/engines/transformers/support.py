"""Which loaded models can be reused on, and the decoder's geometry as the core wants it."""

from __future__ import annotations

from typing import Any

from vlcache.errors import UnsupportedModelError
from vlcache.families import check_family, geometry_of
from vlcache.types import Geometry

__all__ = ["describe"]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


def describe(model: Any) -> Geometry:
    """Geometry of a supported model.

    Raises
    ------
    UnsupportedModelError
        Names the layer or the attention that rules the model out.
    """
    if not hasattr(model, "config"):
        raise UnsupportedModelError(f"a {type(model).__name__} is not a transformers model")
    kind = getattr(model.config, "model_type", type(model).__name__)
    check_family(kind, model.config)
    decoder = getattr(getattr(model, "model", None), "language_model", None)
    if decoder is None or not hasattr(model, "lm_head"):
        raise UnsupportedModelError(
            f"a {type(model).__name__} is a wrapper or a part of a model; give the ...ForConditionalGeneration itself "
            "(of a PEFT model: model.get_base_model())"
        )
    places = {str(p.device) for p in model.parameters()}
    if len(places) != 1 or "meta" in places:
        where = ", ".join(sorted(places))
        raise UnsupportedModelError(f"the model's weights are on {where}; load it onto one device")
    for number, layer in enumerate(decoder.layers):
        _check_parts(kind, f"decoder layer {number}", layer, _LAYER, set())
        _check_parts(kind, f"attention of layer {number}", layer.self_attn, _ATTENTION, {"q_norm", "k_norm"})
    rotary = decoder.rotary_emb
    return geometry_of(
        kind,
        model.config,
        rotary.inv_freq.float().tolist(),
        float(rotary.attention_scaling),
        getattr(rotary, "mrope_section", ()),
    )


def _check_parts(kind: str, where: str, module: Any, needed: set[str], allowed: set[str]) -> None:
    """The adapter runs a layer part by part, so a part that it does not know would be left out in silence."""
    parts = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    for name in sorted(needed - parts):
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {where} has no {name}")
    for name in sorted(parts - needed - allowed):
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {where} has a part {name!r} of its own")
