"""The store that a configuration asks for."""

from __future__ import annotations

import math

import torch

from vlcache.config import Config
from vlcache.errors import ConfigError
from vlcache.store.base import Store
from vlcache.store.memory import MemoryStore
from vlcache.store.tiered import TieredStore
from vlcache.types import Geometry
from vlcache.worth import Worth

__all__ = ["check_bounds", "open_store", "open_tiers"]


def check_bounds(config: Config, geometry: Geometry, tokens: int, dtype: torch.dtype) -> None:
    """Refuse a tier that could not hold one entry.

    Parameters
    ----------
    tokens : int
        Of the smallest picture.

    Raises
    ------
    ConfigError
        Naming the least that works.
    """
    kv = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim
    hidden = geometry.encoder_width + len(config.checkpoint_layers) * geometry.hidden
    tensors = tokens * ((kv + hidden) * dtype.itemsize + geometry.rope.axes * 8)
    head = 8192 + 512 * geometry.layers
    tiers = {"memory_gb": True, "disk_gb": bool(config.disk_path), "redis_gb": bool(config.redis_url)}
    for name, used in tiers.items():
        given = getattr(config, name)
        least = tensors + (0 if name == "memory_gb" else head)
        if used and 0 < given * 1e9 < least:
            remedy = f"give at least {math.ceil(least / 1e3) / 1e6:g}, or 0 to turn it off"
            raise ConfigError(f"{name}: {given:g} GB is less than one entry of this model; {remedy}")


def open_store(config: Config, worth: Worth) -> Store:
    """Memory alone, or memory before a disk and a server where the configuration names them."""
    tiers = open_tiers(config, worth)
    return tiers["memory"] if len(tiers) == 1 else TieredStore(tiers)


def open_tiers(config: Config, worth: Worth) -> dict[str, Store]:
    """By name, the fastest first; a tier whose bound is 0 is off. What a tier needs is imported here.

    Raises
    ------
    ConfigError
        A URL that is none; a server without the package for it.
    """
    tiers: dict[str, Store] = {"memory": MemoryStore(int(config.memory_gb * 1e9))}
    try:
        _add_lasting(tiers, config, worth)
    except BaseException:
        for tier in tiers.values():
            tier.close()
        raise
    return tiers


def _add_lasting(tiers: dict[str, Store], config: Config, worth: Worth) -> None:
    if config.disk_path and config.disk_gb:
        from vlcache.store.disk import DiskStore

        tiers["disk"] = DiskStore(config.disk_path, int(config.disk_gb * 1e9), config.store_dtype, worth)
    if config.redis_url and config.redis_gb:
        try:
            from vlcache.store.redis import RedisStore
        except ModuleNotFoundError as error:
            raise ConfigError(f"redis_url: the package {error.name} is missing; pip install 'vlcache[redis]'") from None
        tiers["redis"] = RedisStore(
            config.redis_url, int(config.redis_gb * 1e9), math.ceil(config.redis_ttl_s), config.store_dtype, worth
        )
