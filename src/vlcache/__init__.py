"""vlcache: reuse a recurring picture's encoder output and K/V wherever it stands in a prompt.

Importing the package imports nothing heavy: `VLCache` brings in transformers when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlcache.errors import ConfigError, InputError, MediaError, UnsupportedModelError, VLCacheError

if TYPE_CHECKING:
    from vlcache.engines.transformers import VLCache

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "InputError",
    "MediaError",
    "UnsupportedModelError",
    "VLCache",
    "VLCacheError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "VLCache":
        from vlcache.engines.transformers import VLCache

        return VLCache
    raise AttributeError(f"module 'vlcache' has no attribute {name!r}")
