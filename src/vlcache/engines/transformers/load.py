"""Loading a checkpoint with transformers, with or without torchvision.

`AutoProcessor` wants torchvision for Qwen's video processors, which pictures do not need. Where it is missing, a
processor of the parts that need only Pillow stands in.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vlcache.engines.transformers.prompt import expand_text, picture_sources
from vlcache.errors import ConfigError
from vlcache.media import open_picture

__all__ = ["PictureProcessor", "check_device", "load_checkpoint", "load_processor", "torchvision_imports"]


class PictureProcessor:
    """Text and pictures, no video: a tokenizer and an image processor behind a processor's two methods.

    Parameters
    ----------
    tokenizer, image_processor
        transformers' own.
    chat_template : str, optional
        Instead of the tokenizer's.
    """

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer: Any, image_processor: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.chat_template = chat_template

    def apply_chat_template(self, messages: Any, tokenize: bool = False, **options: Any) -> Any:
        """Text; or with `tokenize` the model's inputs, pictures included."""
        options.pop("return_dict", None)
        tensors = options.pop("return_tensors", "pt")
        render = partial(self.tokenizer.apply_chat_template, chat_template=self.chat_template, **options)
        if not tokenize:
            return render(messages, tokenize=False)
        sources, plain = picture_sources(messages)
        text = render(plain, tokenize=False)
        images = [open_picture(source, number).decode(1 << 40) for number, source in enumerate(sources, 1)]
        return self(text=[text], images=images or None, return_tensors=tensors)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the parts, for `load_processor` where torchvision is missing."""
        if self.chat_template is not None:
            self.tokenizer.chat_template = self.chat_template
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)

    def __call__(self, text: list[str], images: Any = None, return_tensors: str = "pt") -> Any:
        pictures: dict[str, Any] = {}
        if images is not None:
            pictures = dict(self.image_processor(images=images, return_tensors=return_tensors))
            merge = self.image_processor.merge_size**2
            tokens = (pictures["image_grid_thw"].prod(-1) // merge).tolist()
            text = [expand_text(text[0], self.image_token, tokens), *text[1:]]
        inputs = self.tokenizer(text, return_tensors=return_tensors)
        image_token = self.tokenizer.convert_tokens_to_ids(self.image_token)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == image_token).int()
        inputs.update(pictures)
        return inputs


def torchvision_imports() -> bool:
    """Whether torchvision is there and loads beside this torch."""
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        return False
    try:
        import_module("torchvision")
    except Exception:
        return False
    return True


def check_device(device: str) -> None:
    """Raise ConfigError for a device that is not there."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"device {device!r} cannot be used with this torch; give cpu, or cuda where there is a GPU"
        ) from None


def load_processor(folder: str | Path) -> Any:
    """The checkpoint's processor, or the stand-in where torchvision is missing."""
    import transformers

    if torchvision_imports():
        return transformers.AutoProcessor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return PictureProcessor(tokenizer, transformers.AutoImageProcessor.from_pretrained(folder))


def load_checkpoint(folder: str | Path, dtype: str = "auto", device: str = "cpu") -> tuple[Any, Any]:
    """Model and processor of a checkpoint directory.

    Raises
    ------
    ConfigError
        No directory, or no checkpoint in it.
    """
    import transformers

    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"model {str(folder)!r}: no such directory; give the directory of a checkpoint")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {str(folder)!r}: has no config.json; give the directory of a checkpoint")
    chosen = dtype if dtype == "auto" else getattr(torch, dtype)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=chosen).to(device).eval()
    return model, load_processor(path)
