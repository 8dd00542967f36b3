"""Picture reuse for Hugging Face transformers."""

from vlcache.engines.transformers.cache import VLCache

__all__ = ["VLCache"]
