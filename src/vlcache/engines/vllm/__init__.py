"""VLCache inside vLLM, as a plugin: `register` is what vLLM's entry point `vllm.general_plugins` calls.

request -> spans (in the front end) -> lookup and claim (in the scheduler) -> selective prefill (in the worker) -> store

Nothing of vLLM is imported until then.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Have vLLM take the plugin's model classes, which are its own with pictures identified as the project does."""
    from vllm import ModelRegistry

    from vlcache.engines.vllm.models import CLASSES

    for name in CLASSES:
        ModelRegistry.register_model(name, f"vlcache.engines.vllm.models:{name}")
