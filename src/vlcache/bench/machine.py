"""The machine a benchmark ran on: what it is, and how fast it reads and multiplies."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from vlcache import __version__

__all__ = ["describe_run", "measure_rates", "rounded", "seconds_of"]


def seconds_of(work: Callable[[], object]) -> float:
    """Wall seconds of a call, its work on an accelerator included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_rates(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a matrix-vector product and operations per second of a square GEMM, the best of five each."""
    weights = torch.randn(1 << 13, 1 << 14, device=device).to(dtype)
    vector = torch.randn(1 << 14, 1, device=device).to(dtype)
    a = torch.randn(2048, 2048, device=device).to(dtype)
    nbytes = weights.numel() * weights.element_size()
    bandwidth = max(nbytes / seconds_of(lambda: weights @ vector) for _ in range(5))
    gemm = max(2 * 2048**3 / seconds_of(lambda: a @ a) for _ in range(5))
    return bandwidth, gemm


def rounded(value: Any) -> Any:
    """A result with its numbers to five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def describe_run(device: str) -> dict[str, str]:
    """Machine, versions and commit, for the row that the figures stand in."""
    return {
        "machine": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{_processor()}, {torch.get_num_threads()} threads",
        "versions": f"vlcache {__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str:
    """The checkout's commit, marked if files differ from it; empty outside a checkout."""
    root = Path(__file__).parents[3]
    if not (root / "src" / "vlcache").is_dir():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
