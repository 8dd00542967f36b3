"""Pictures' identities in vLLM's front end: the same digests as everywhere, so that entries are shared by engines.

vLLM names a picture by a digest of its own, or by an id that a client gives. The digest here is of the pixels that vLLM
hands to the processor, and of the processor's settings. A picture under a client's id is not reused, since nobody
checked that two pictures with one id are the same.
"""

from __future__ import annotations

import json
from typing import Any

from PIL import Image

from vlcache.keys import digest, fingerprint_settings
from vlcache.media import pixel_digest

__all__ = ["content_of", "identified", "identifier"]

_PREFIX = "vlcache-"


def identifier(content: str) -> str:
    """A picture's digest as the name that vLLM knows it by."""
    return _PREFIX + content


def content_of(name: str) -> str | None:
    """The digest in a name; None where the name is not ours."""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None


def identified(processor: type) -> type:
    """A processor class of vLLM's whose pictures are named by `identifier`."""

    class Identified(processor):  # type: ignore[misc]
        def _get_mm_hashes(self, inputs: Any) -> Any:
            hashes = super()._get_mm_hashes(inputs)
            if "image" not in hashes:
                return hashes
            given = (inputs.mm_uuid_items or {}).get("image") or [None] * len(hashes["image"])
            items = inputs.mm_data_items["image"]
            settings = _settings(self.info, inputs.hf_processor_mm_kwargs)
            hashes["image"] = [
                _name(items.get(number), settings) or theirs if uuid is None else _foreign(theirs)
                for number, (theirs, uuid) in enumerate(zip(hashes["image"], given, strict=True))
            ]
            return hashes

    Identified.__name__ = f"Identified{processor.__name__}"
    return Identified


def _foreign(name: str) -> str:
    """A client's id, never one of ours."""
    return f"client-{name}" if name.startswith(_PREFIX) else name


def _name(item: Any, settings: str) -> str | None:
    """None for what is no picture: embeddings that a client computed itself."""
    if not isinstance(item, Image.Image):
        return None
    return identifier(pixel_digest(item if item.mode == "RGB" else item.convert("RGB"), settings))


def _settings(info: Any, options: Any) -> str:
    """Fingerprint of the image processor, and of what the server and this request set on it."""
    pictures = info.get_hf_processor().image_processor
    settings = fingerprint_settings(type(pictures).__name__, pictures.to_dict())
    options = dict(info.ctx.get_merged_mm_kwargs(options))
    if info.ctx.model_config.get_multimodal_config().mm_device_do_normalize:
        for name in ("do_normalize", "do_rescale"):  # vLLM's own: the model does it instead, to the same end
            options.pop(name, None)
    return digest(settings, json.dumps(options, sort_keys=True, default=str)) if options else settings
