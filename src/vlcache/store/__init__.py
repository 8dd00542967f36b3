"""Where entries live."""

from vlcache.store.base import Store, StoreStats
from vlcache.store.memory import MemoryStore

__all__ = ["MemoryStore", "Store", "StoreStats"]
