"""Which models can be reused on, and the decoder's geometry as the core wants it.

A model is refused by name, before any work, where moving a picture's K/V would be wrong (its state is not a K/V
per token, or tokens see what comes later) or where nobody has tested it.
"""

from __future__ import annotations

from typing import Any

from vlcache.errors import UnsupportedModelError
from vlcache.rope import Rope
from vlcache.types import Geometry

__all__ = ["REFUSED", "SUPPORTED", "describe"]

SUPPORTED = {"qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
"""Model types tested for equality with a full prefill."""

_BIDIRECTIONAL = "its image tokens attend to each other in both directions, so K/V of a picture depend on later tokens"
REFUSED = {
    "gemma3": _BIDIRECTIONAL,
    "gemma3n": _BIDIRECTIONAL,
    "paligemma": _BIDIRECTIONAL,
    "qwen3_vl_moe": "its mixture-of-experts layers have not been tested",
}
"""Model types that are known and ruled out, with the reason."""

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
    text = model.config.get_text_config()
    for layer, attention in enumerate(getattr(text, "layer_types", None) or ()):
        if attention != "full_attention":
            raise UnsupportedModelError(_refusal(kind, f"decoder layer {layer} is {attention}", attention))
    if kind in REFUSED:
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {REFUSED[kind]}")
    if kind not in SUPPORTED:
        known = ", ".join(SUPPORTED.values())
        raise UnsupportedModelError(f"model type {kind!r} is not supported: it has not been tested; known are {known}")

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
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Geometry(
        layers=text.num_hidden_layers,
        kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        hidden=text.hidden_size,
        deepstack=len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ()),
        rope=_rope(kind, text, decoder.rotary_emb, head_dim),
    )


def _refusal(kind: str, what: str, attention: str) -> str:
    why = {
        "sliding_attention": "a cached picture would be seen by rows that its window hides it from",
        "linear_attention": "its state is not a K/V per token and cannot be moved",
    }
    return f"model type {kind!r} is not supported: {what}; " + why.get(attention, "only full attention can be moved")


def _check_parts(kind: str, where: str, module: Any, needed: set[str], allowed: set[str]) -> None:
    """The adapter runs a layer part by part, so a part that it does not know would be left out in silence."""
    parts = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    for name in sorted(needed - parts):
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {where} has no {name}")
    for name in sorted(parts - needed - allowed):
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {where} has a part {name!r} of its own")


def _rope(kind: str, text: Any, rotary: Any, head_dim: int) -> Rope:
    parameters = text.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"model type {kind!r} is not supported with rope_type {rope_type!r}: "
            "its frequencies change with the prompt's length"
        )
    frequencies = tuple(rotary.inv_freq.float().tolist())
    sections = tuple(parameters.get("mrope_section") or getattr(rotary, "mrope_section", ()))
    if sum(sections) != len(frequencies) or 2 * len(frequencies) != head_dim:
        raise UnsupportedModelError(
            f"model type {kind!r} is not supported: rotary sections {sections} do not fill a head of {head_dim}"
        )
    interleaved = kind == "qwen3_vl"
    return Rope(
        kind="mrope-interleaved" if interleaved else "mrope",
        frequencies=frequencies,
        sections=sections,
        scaling=float(rotary.attention_scaling),
    )
