"""Make torchvision importable beside a CPU build of torch.

transformers' `AutoProcessor` wants torchvision for Qwen's video processors. The wheel on PyPI is linked against CUDA:
beside a CPU torch its compiled part does not load, and importing it fails, because operators are missing whose
shapes its Python part registers. Their declarations are all it needs; image transforms are plain torch.

Installs the wheel without its dependencies and a start-up hook that declares the operators when torchvision is first
imported. Does nothing where torch is not a CPU build or torchvision already loads.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

VERSIONS = {"2.13": "0.28.0"}
HOOK = '''\
"""Declares two operators of torchvision before it is imported beside a CPU build of torch."""
import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            torch._torchvision_operators = library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Declare())
'''


def loads() -> bool:
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


def main() -> None:
    if torch.version.cuda is not None or loads():
        return
    version = VERSIONS.get(".".join(torch.__version__.split(".")[:2]))
    if version is None:
        print(f"no torchvision is known to go with torch {torch.__version__}; vlcache works without it")
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"torchvision=={version}"]
    subprocess.run(pip, check=True)
    site = Path(sysconfig.get_path("purelib"))
    (site / "_cpu_torchvision.py").write_text(HOOK)
    (site / "cpu_torchvision.pth").write_text("import _cpu_torchvision\n")
    print("torchvision", version, "loads" if loads() else "does not load; vlcache works without it")


if __name__ == "__main__":
    main()
