"""The families of models that can be reused on, read off a model's configuration: refusals, and the decoder's geometry.

A model is refused by name, before any work, where moving a picture's K/V would be wrong (its state is not a K/V
per token, or tokens see what comes later) or where nobody has tested it. Configurations are transformers', whoever
runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlcache.errors import UnsupportedModelError
from vlcache.keys import fingerprint_settings
from vlcache.rope import Rope
from vlcache.types import Geometry

__all__ = ["REFUSED", "SUPPORTED", "check_family", "fingerprint_config", "geometry_of", "refusal"]

_CIRCUMSTANCES = ("_name_or_path", "transformers_version")

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


def check_family(kind: str, config: Any) -> None:
    """Refuse a model by its type and its decoder's attention.

    Parameters
    ----------
    kind : str
        `model_type` of the whole model.
    config
        Of the whole model.

    Raises
    ------
    UnsupportedModelError
        Names what rules it out.
    """
    text = config.get_text_config()
    for layer, attention in enumerate(getattr(text, "layer_types", None) or ()):
        if attention != "full_attention":
            raise UnsupportedModelError(refusal(kind, f"decoder layer {layer} is {attention}", attention))
    if kind in REFUSED:
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {REFUSED[kind]}")
    if kind not in SUPPORTED:
        known = ", ".join(SUPPORTED.values())
        raise UnsupportedModelError(f"model type {kind!r} is not supported: it has not been tested; known are {known}")


def fingerprint_config(config: Any) -> str:
    """Digest of a whole model's configuration, the same wherever it lies and whichever release wrote it."""
    return fingerprint_settings(
        config.model_type, {name: value for name, value in config.to_dict().items() if name not in _CIRCUMSTANCES}
    )


def geometry_of(
    kind: str, config: Any, frequencies: Sequence[float], scaling: float, sections: Sequence[int] = ()
) -> Geometry:
    """The decoder's geometry.

    Parameters
    ----------
    frequencies : sequence of float
        Inverse frequencies of the rotary embedding, as float32 holds them.
    scaling : float
        Its factor on cos and sin.
    sections : sequence of int
        Its pairs that belong to t, h and w, where the configuration does not say.

    Raises
    ------
    UnsupportedModelError
        A rotary embedding that keys cannot be moved under.
    """
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Geometry(
        layers=text.num_hidden_layers,
        kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        hidden=text.hidden_size,
        deepstack=len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ()),
        rope=_rope(kind, text, tuple(frequencies), scaling, head_dim, tuple(sections)),
    )


def refusal(kind: str, what: str, attention: str) -> str:
    why = {
        "sliding_attention": "a cached picture would be seen by rows that its window hides it from",
        "linear_attention": "its state is not a K/V per token and cannot be moved",
    }
    return f"model type {kind!r} is not supported: {what}; " + why.get(attention, "only full attention can be moved")


def _rope(
    kind: str, text: Any, frequencies: tuple[float, ...], scaling: float, head_dim: int, sections: tuple[int, ...]
) -> Rope:
    parameters = text.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"model type {kind!r} is not supported with rope_type {rope_type!r}: "
            "its frequencies change with the prompt's length"
        )
    sections = tuple(parameters.get("mrope_section") or sections)
    if sum(sections) != len(frequencies) or 2 * len(frequencies) != head_dim:
        raise UnsupportedModelError(
            f"model type {kind!r} is not supported: rotary sections {sections} do not fill a head of {head_dim}"
        )
    interleaved = kind == "qwen3_vl"
    return Rope(
        kind="mrope-interleaved" if interleaved else "mrope",
        frequencies=frequencies,
        sections=sections,
        scaling=scaling,
    )
