"""What a checkpoint that vLLM runs is to the core: geometry, fingerprints, how its chat template separates turns.

All of it is what the transformers adapter finds for the same checkpoint, so that one engine's entries and profiles are
the other's: the configuration is read as transformers reads it, and the weights were sampled as vLLM loaded them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vlcache.context import TurnMarks, find_marks
from vlcache.families import check_family, fingerprint_config, geometry_of
from vlcache.keys import Sample, fingerprint_samples, fingerprint_settings
from vlcache.profile import PROFILE_NAME, Profile, read_profile
from vlcache.types import Geometry

__all__ = ["Checkpoint", "read_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """See the module.

    Attributes
    ----------
    geometry : Geometry
    fingerprint, profile_fingerprint : str
        As `vlcache.engines.transformers.weights.WeightsWatch` gives them.
    marks : TurnMarks
    processor : str
        Fingerprint of the image processor's settings.
    """

    geometry: Geometry
    fingerprint: str
    profile_fingerprint: str
    marks: TurnMarks
    processor: str

    def profile(self, named: str, folder: str) -> Profile | None:
        """The profile that a configuration names, or the one in the model's directory; None where there is none.

        Raises
        ------
        ConfigError
            It cannot be read, or was measured on another model.
        """
        path = Path(named) if named else Path(folder) / PROFILE_NAME
        if not named and not path.is_file():
            return None
        profile = read_profile(path)
        profile.check_model(self.profile_fingerprint, self.geometry.layers, str(path))
        return profile


def read_checkpoint(folder: str, dtype: torch.dtype, weights: Mapping[str, Sample]) -> Checkpoint:
    """Read what transformers makes of a checkpoint.

    Parameters
    ----------
    folder : str
        The checkpoint's directory.
    dtype : torch.dtype
        That the model runs in.
    weights : mapping of str to Sample
        By their names in the checkpoint.

    Raises
    ------
    UnsupportedModelError
        A model that cannot be reused on.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    check_family(config.model_type, config)
    with torch.device("meta"):
        shape = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    text = config.get_text_config()
    rotary = type(shape.model.language_model.rotary_emb)(text)
    sections = getattr(rotary, "mrope_section", ())
    frequencies, scaling = rotary.inv_freq.float().tolist(), float(rotary.attention_scaling)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    pictures = processor.image_processor
    known = {_today(name): one for name, one in weights.items()}
    named = [name for name, _ in shape.named_parameters()]
    # Where names are others, of a quantised checkpoint say: no other engine's entries, but its own
    samples = [(name, known[name]) for name in named] if set(named) <= set(known) else sorted(known.items())
    return Checkpoint(
        geometry=geometry_of(config.model_type, config, frequencies, scaling, sections),
        fingerprint=fingerprint_samples(
            fingerprint_config(shape.config), ((name, _rounded(one, dtype)) for name, one in samples)
        ),
        profile_fingerprint=fingerprint_samples(
            config.model_type, ((name, _rounded(_rounded(one, dtype), torch.bfloat16)) for name, one in samples)
        ),
        marks=_marks(folder, processor),
        processor=fingerprint_settings(type(pictures).__name__, pictures.to_dict()),
    )


def _today(name: str) -> str:
    """A weight's name in a loaded model of today's transformers."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return "model.language_model." + name.removeprefix("model.")
    return name


def _rounded(one: Sample, dtype: torch.dtype) -> Sample:
    return replace(one, values=one.values.to(dtype)) if one.values.is_floating_point() else one


def _marks(folder: str, processor: Any) -> TurnMarks:
    import transformers

    try:
        stops: Any = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        stops = None
    named = [processor.tokenizer.eos_token_id, *(stops if isinstance(stops, list | tuple) else [stops])]
    return find_marks(
        {int(token) for token in named if token is not None},
        lambda chat: str(processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)),
        lambda words: processor.tokenizer(words)["input_ids"],
    )
