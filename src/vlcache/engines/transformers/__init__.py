"""Picture reuse for Hugging Face transformers."""

from vlcache.engines.transformers.cache import VLCache
from vlcache.engines.transformers.load import load_checkpoint, load_processor

__all__ = ["VLCache", "load_checkpoint", "load_processor"]
