"""vLLM's model classes, with two things added: pictures are identified as the project does, and the model that was
loaded can be found by the connector, with samples of its weights as they stood in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as _Qwen25
from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration as _Qwen2
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration as _Qwen3
from vllm.multimodal import MULTIMODAL_REGISTRY

from vlcache.engines.vllm.identity import identified
from vlcache.keys import Sample, sample

__all__ = ["CLASSES", "Loaded", "loaded"]

CLASSES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")


@dataclass
class Loaded:
    """What this process has loaded.

    Attributes
    ----------
    model : vLLM model or None
        The latest.
    weights : dict of str to Sample
        Of each tensor of its checkpoint, by its name there.
    encoded : int
        Pictures that went through its encoder.
    times : int
        How often weights were loaded.
    """

    model: Any = None
    weights: dict[str, Sample] = field(default_factory=dict)
    encoded: int = 0
    times: int = 0


loaded = Loaded()


class _Found:
    """Before one of vLLM's classes."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        loaded.model = self
        loaded.weights = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded.times += 1
        names: set[str] = super().load_weights(_sampled(weights))  # type: ignore[misc]
        return names

    def embed_multimodal(self, **kwargs: Any) -> Any:
        grids = kwargs.get("image_grid_thw")
        loaded.encoded += 0 if grids is None else len(grids)
        return super().embed_multimodal(**kwargs)  # type: ignore[misc]


def _sampled(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        loaded.weights[name] = sample(weight)
        yield name, weight


def _registered(base: Any) -> Any:
    """vLLM's decorator, with the base's own processor but for the pictures' identities."""
    its = base._processor_factory
    processor = identified(its.processor)
    return MULTIMODAL_REGISTRY.register_processor(processor, info=its.info, dummy_inputs=its.dummy_inputs)


@_registered(_Qwen2)
class Qwen2VLForConditionalGeneration(_Found, _Qwen2):  # type: ignore[misc]
    pass


@_registered(_Qwen25)
class Qwen2_5_VLForConditionalGeneration(_Found, _Qwen25):  # type: ignore[misc]  # noqa: N801
    pass


@_registered(_Qwen3)
class Qwen3VLForConditionalGeneration(_Found, _Qwen3):  # type: ignore[misc]
    pass
