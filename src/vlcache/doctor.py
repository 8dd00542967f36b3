"""What is installed, what is configured, what is supported."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from vlcache import __version__
from vlcache.config import load_config

__all__ = ["examine", "show"]

_TRANSFORMERS = ("5.16", "5.24")
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pillow", "torchvision", "xxhash", "redis")


def examine() -> dict[str, Any]:
    """Findings as plain data.

    Raises
    ------
    ConfigError
        The configuration does not resolve.
    """
    from vlcache.bench.checkpoints import SHAPES
    from vlcache.bench.machine import describe_run
    from vlcache.engines.transformers.load import torchvision_imports
    from vlcache.families import REFUSED, SUPPORTED
    from vlcache.policies import POLICIES

    cuda = torch.cuda.is_available()
    return {
        "vlcache": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "transformers_tested": f"{_TRANSFORMERS[0]} to {_TRANSFORMERS[1]}",
        "transformers_in_range": _in_range(_version("transformers")),
        "torchvision_imports": torchvision_imports(),
        **describe_run("cuda" if cuda else "cpu"),
        "cuda": cuda,
        "configuration": load_config().shown(),
        "policies": list(POLICIES),
        "models": list(SUPPORTED.values()),
        "refused": dict(REFUSED),
        "bench_shapes": list(SHAPES),
    }


def show(findings: dict[str, Any]) -> None:
    """Print findings for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in findings.items():
        if isinstance(value, dict):
            value = "\n".join(f"{key}: {item}" for key, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(value)
        table.add_row(name.replace("_", " "), str(value))
    Console(soft_wrap=True).print(table)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_range(version: str | None) -> bool:
    if version is None:
        return False
    low, high = (tuple(map(int, bound.split("."))) for bound in _TRANSFORMERS)
    return low <= tuple(map(int, version.split(".")[:2])) <= high
