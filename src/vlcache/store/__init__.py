"""Where entries live. The disk's store is imported where it is used: `vlcache.store.disk`."""

from vlcache.store.base import Store, StoreStats
from vlcache.store.memory import MemoryStore

__all__ = ["MemoryStore", "Store", "StoreStats"]
