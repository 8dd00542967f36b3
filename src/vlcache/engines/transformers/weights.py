"""Noticing that a model is no longer the one whose K/V are kept.

Weights can be replaced, moved, written to in place, and adapters switched, all under a cache that is in use. Reading
them for every prompt would cost seconds, so it is their identities that are compared; the fingerprint, which samples
values, is taken anew when one of those differs.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from vlcache.families import fingerprint_config
from vlcache.keys import fingerprint_weights

__all__ = ["WeightsWatch"]


class WeightsWatch:
    """Watches one model.

    What goes past autograd's version counter (`parameter.data.copy_(...)`) is not seen.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tensors: list[tuple[weakref.ref[Tensor], int, int]] = []
        self._adapters: tuple[str, ...] = ()

    def changed(self) -> bool:
        """Whether anything is different from the last call; True on the first."""
        tensors, adapters = self._tensors_now(), _adapters(self._model)
        same = (
            adapters == self._adapters
            and len(tensors) == len(self._tensors)
            and all(
                ref() is tensor and pointer == _pointer(tensor) and version == _version(tensor)
                for tensor, (ref, pointer, version) in zip(tensors, self._tensors, strict=True)
            )
        )
        if not same:
            self._tensors = [(weakref.ref(t), _pointer(t), _version(t)) for t in tensors]
            self._adapters = adapters
        return not same

    def fingerprint(self) -> str:
        """Digest of configuration, weights' samples and the adapters in force; the same wherever the model lies and
        whichever release of transformers runs it."""
        settings = fingerprint_config(self._model.config) + "\n".join(self._adapters)
        return fingerprint_weights(settings, self._model.named_parameters())

    def profile_fingerprint(self) -> str:
        """The same for profiles: of the kind of model, its weights and adapters, in float32 or bfloat16 alike and
        whatever else a release of transformers writes into a configuration."""
        settings = "\n".join((self._model.config.model_type, *_adapters(self._model)))
        return fingerprint_weights(settings, self._model.named_parameters(), torch.bfloat16)

    def _tensors_now(self) -> list[Tensor]:
        # A model's dtype change rounds the rotary frequencies as well, which are buffers
        return [*self._model.parameters(), self._model.model.language_model.rotary_emb.inv_freq]


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # wrapper subclasses have no storage of their own
        return 0


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _adapters(model: Any) -> tuple[str, ...]:
    """The state of every adapted layer (PEFT): which adapters are active, merged or off, and how strong."""
    return tuple(
        f"{name} {module.active_adapters} {module.disable_adapters} {module.merged_adapters} {module.scaling}"
        for name, module in model.named_modules()
        if hasattr(type(module), "merged_adapters")
    )
