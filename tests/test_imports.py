"""The core imports torch, safetensors and the standard library, and the package nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CORE = [
    "types",
    "keys",
    "rope",
    "ranges",
    "plan",
    "lookup",
    "prefill",
    "capture",
    "exact",
    "context",
    "families",
    "verify",
    "errors",
    "config",
    "report",
    "policies",
    "store",
    "store.open",
    "store.tiered",
    "worth",
]

# torch works without numpy, so numpy is blocked too
BLOCKED = [
    "transformers",
    "tokenizers",
    "PIL",
    "yaml",
    "click",
    "rich",
    "numpy",
    "requests",
    "tqdm",
    "psutil",
    "xxhash",
    "redis",
]

_BLOCK = f"""
import importlib, json, sys, warnings
warnings.simplefilter("ignore")

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(BLOCKED)!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Block())
"""


def run(code: str) -> Any:
    """What a fresh interpreter prints last, read as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_core_imports_with_everything_else_blocked() -> None:
    new = run(
        f"""{_BLOCK}
import torch, safetensors
before = set(sys.modules)
for name in {["vlcache", *(f"vlcache.{module}" for module in CORE)]!r}:
    importlib.import_module(name)
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""
    )
    assert set(new) - sys.stdlib_module_names <= {"vlcache", "torch", "safetensors"}
    assert "vlcache" in new


def test_the_block_works() -> None:
    """Otherwise the test above would pass whatever the core imports."""
    refused = run(
        f"""{_BLOCK}
refused = []
for name in {BLOCKED!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        refused.append(name)
print(json.dumps(refused))
"""
    )
    assert refused == BLOCKED


def test_digests_configuration_and_store_work_with_everything_else_blocked() -> None:
    digest, policy, stored = run(
        f"""{_BLOCK}
import torch
from vlcache import config, keys, rope, store, types
digest = keys.digest(keys.tensor_bytes(torch.arange(4, dtype=torch.uint8)))
policy = config.load_config({{"VLCACHE_POLICY": "full"}}).policy
geometry = types.Geometry(1, 1, 2, 2, 0, rope.Rope("1d", (1.0,)))
header = types.Header(types.EntryKey("c", "s"), (1, 2, 2), 1, "torch.float32", geometry, "m", "p", "")
stored = store.MemoryStore(100).put(types.Entry(header, torch.zeros(1, 2), torch.zeros(1, 1).long()))
print(json.dumps([digest, policy, stored]))
"""
    )
    assert (len(digest), policy, stored) == (64, "full", True)


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = run("import vlcache, json, sys; print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))")
    assert "vlcache" in loaded
    assert not {"transformers", "PIL", "torch", "numpy", "yaml", "click"} & set(loaded)


def test_importing_the_core_imports_neither_transformers_nor_pillow() -> None:
    code = ["import json, sys", *(f"import vlcache.{module}" for module in CORE)]
    loaded = run("\n".join([*code, "print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"]))
    assert "torch" in loaded
    assert not {"transformers", "PIL", "yaml", "click", "xxhash", "redis"} & set(loaded)


def test_every_package_is_in_the_distribution() -> None:
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")
    root = Path(__file__).parents[1]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in (*(root / "src").rglob("*.py"), *(root / "evalmodel").rglob("*.py"))}
    names = {".".join(folder.relative_to(root).parts).removeprefix("src.") for folder in folders}
    assert set(listed) - names == {"vlcache.assets"}
    assert names <= set(listed)
