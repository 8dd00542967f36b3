"""Random checkpoints: real architectures, real processors, no training.

Published shapes for speed and memory, tiny ones for exactness. What such a model says is noise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vlcache.engines.transformers.load import PictureProcessor, torchvision_imports

__all__ = ["SHAPES", "TINY", "Shape", "build_model", "build_processor", "save_checkpoint"]

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_POOL = 1 << 22


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths and depths of a model, in the names of its configuration."""

    family: Family
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sections: tuple[int, int, int]
    vision_depth: int
    vision_hidden: int
    vision_intermediate: int
    vision_heads: int
    vision_full: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()
    vocabulary: int = 151_936
    theta: float = 1e6
    tied: bool = True
    std: float = 0.02

    @property
    def patch(self) -> int:
        return 16 if self.family == "qwen3_vl" else 14


SHAPES: dict[str, Shape] = {
    "small": Shape("qwen2_5_vl", 896, 4864, 24, 14, 2, 64, (8, 12, 12), 8, 768, 2048, 12, vision_full=tuple(range(8))),
    "demo": Shape(
        "qwen2_5_vl", 512, 2048, 12, 8, 2, 64, (8, 12, 12), 6, 384, 1024, 6, vision_full=tuple(range(6)), vocabulary=320
    ),
    "qwen2-vl-2b": Shape("qwen2_vl", 1536, 8960, 28, 12, 2, 128, (16, 24, 24), 32, 1280, 5120, 16),
    "qwen2.5-vl-3b": Shape(
        "qwen2_5_vl", 2048, 11008, 36, 16, 2, 128, (16, 24, 24), 32, 1280, 3420, 16, vision_full=(7, 15, 23, 31)
    ),
    "qwen3-vl-2b": Shape(
        "qwen3_vl", 2048, 6144, 28, 16, 8, 128, (24, 20, 20), 24, 1024, 4096, 16, deepstack=(5, 11, 17), theta=5e6
    ),
}
"""`small` is the decoder of Qwen2.5-0.5B behind a ViT of 8 blocks, `demo` one that float32 on a laptop runs in a
second; the others are published models' shapes."""

TINY: dict[Family, Shape] = {
    "qwen2_vl": Shape("qwen2_vl", 64, 128, 4, 4, 2, 16, (2, 3, 3), 2, 32, 128, 2, vocabulary=320, tied=False, std=0.1),
    "qwen2_5_vl": Shape(
        "qwen2_5_vl", 64, 128, 4, 4, 2, 16, (2, 3, 3), 2, 32, 64, 2, (1,), vocabulary=320, tied=False, std=0.1
    ),
    "qwen3_vl": Shape("qwen3_vl", 64, 128, 4, 4, 2, 16, (4, 2, 2), 3, 32, 64, 2, (), (0, 1), 320, 5e6, False, 0.1),
}
"""For exactness: deep enough for budgets per layer, small enough for thousands of forwards."""


def build_processor(shape: Shape, max_pixels: int = 12_845_056) -> Any:
    """A processor with a byte tokenizer, Qwen's special tokens and the real picture preprocessing."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = transformers.Qwen2TokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    settings = {"patch_size": shape.patch, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 56 * 56, "longest_edge": max_pixels}
    if not torchvision_imports():
        pictures = transformers.Qwen2VLImageProcessorPil(size=size, **settings)
        return PictureProcessor(tokenizer, pictures, _TEMPLATE)
    names = {
        "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
        "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
        "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    }
    processor_name, video_name = names[shape.family]
    pictures = transformers.Qwen2VLImageProcessor(size=size, **settings)
    videos = getattr(transformers, video_name)(**settings)
    make = getattr(transformers, processor_name)
    return make(image_processor=pictures, tokenizer=tokenizer, video_processor=videos, chat_template=_TEMPLATE)


def _config(shape: Shape, tokenizer: Any) -> Any:
    import transformers

    rope = {"rope_type": "default", "rope_theta": shape.theta, "mrope_section": list(shape.sections)}
    if shape.family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "initializer_range": shape.std,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }
    vision: dict[str, Any] = {
        "depth": shape.vision_depth,
        "num_heads": shape.vision_heads,
        "patch_size": shape.patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": shape.std,
    }
    if shape.family == "qwen2_vl":
        ratio = shape.vision_intermediate // shape.vision_hidden
        vision |= {"embed_dim": shape.vision_hidden, "hidden_size": shape.hidden, "mlp_ratio": ratio}
    else:
        vision |= {
            "hidden_size": shape.vision_hidden,
            "intermediate_size": shape.vision_intermediate,
            "out_hidden_size": shape.hidden,
        }
    if shape.family == "qwen2_5_vl":
        vision |= {"window_size": 112, "fullatt_block_indexes": list(shape.vision_full)}
    if shape.family == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": list(shape.deepstack), "num_position_embeddings": 2304}
    names = {"qwen2_vl": "Qwen2VLConfig", "qwen2_5_vl": "Qwen2_5_VLConfig", "qwen3_vl": "Qwen3VLConfig"}
    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return getattr(transformers, names[shape.family])(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=shape.tied,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()},
    )


def build_model(shape: Shape, tokenizer: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model with random weights, on the CPU, in seconds also at billions of parameters.

    Weights come from one pool of random numbers, each tensor from its own offset; biases and norms are moved off
    zero and one, so that leaving one out shows.
    """
    import transformers

    config = _config(shape, tokenizer)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(_POOL, generator=generator).to(dtype)
    done = set()
    with torch.no_grad():
        for module in model.modules():
            if list(module.buffers(recurse=False)):
                model._init_weights(module)
        for name, weight in model.named_parameters():
            if weight.data_ptr() in done:
                continue
            done.add(weight.data_ptr())
            _fill(weight, pool, generator, shape.std)
            if weight.ndim == 1 and "norm" in name and name.endswith("weight"):
                weight.add_(1)
    model.generation_config.do_sample = False
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def _fill(weight: torch.Tensor, pool: torch.Tensor, generator: torch.Generator, std: float) -> None:
    flat = weight.view(-1)
    at = int(torch.randint(len(pool), (), generator=generator))
    for start in range(0, len(flat), len(pool)):
        piece = flat[start : start + len(pool)]
        head = min(len(piece), len(pool) - at)
        piece[:head] = pool[at : at + head]
        piece[head:] = pool[: len(piece) - head]
    flat.mul_(std)


def save_checkpoint(folder: str | Path, shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write a random checkpoint that `AutoProcessor` and `AutoModelForImageTextToText` load."""
    folder = Path(folder)
    processor = build_processor(shape)
    model = build_model(shape, processor.tokenizer, dtype, seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "vlcache-random.json").write_text(json.dumps({"random_weights": True, "seed": seed}))
    return folder
