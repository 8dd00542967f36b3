"""Running a model's vision encoder over the pictures that are new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlcache.engines.transformers.pictures import Media
from vlcache.engines.transformers.prompt import vision_tokens

__all__ = ["encode"]


def encode(model: Any, new: Mapping[str, Media]) -> dict[str, Tensor]:
    """Encoder outputs of pictures, `[N, hidden * (1 + deepstack)]` each, in one call of the encoder.

    Parameters
    ----------
    new : mapping of str to Media
        Pictures by digest.
    """
    if not new:
        return {}
    device = model.get_input_embeddings().weight.device
    patches = torch.cat([media.patches() for media in new.values()]).to(device)
    grids = torch.tensor([media.grid for media in new.values()], device=device)
    out = model.model.get_image_features(patches, grids, return_dict=True)
    sizes = [vision_tokens(model, media.grid) for media in new.values()]
    features = [
        # Some releases split DeepStack features by picture, as the embeddings always are, some do not
        torch.split(f, sizes) if isinstance(f, Tensor) else f
        for f in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
    ]
    return {
        content: torch.cat([f[number] for f in features], dim=-1).to(model.dtype) for number, content in enumerate(new)
    }
