"""What the connectors of one process have in common: the store, and encoder outputs that are not in it yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vlcache.config import Config, load_config
from vlcache.policies import Policy, parse_policy
from vlcache.store import Store
from vlcache.store.open import open_store
from vlcache.types import Entry, EntryKey, Header, Span
from vlcache.worth import Worth

__all__ = ["Shared", "settings_of", "shared"]

_OWN = ("strict",)


@dataclass
class Shared:
    """Of one configuration in this process.

    Attributes
    ----------
    store : Store
    worth : Worth
        Of loading against computing.
    encoder_cache : mutable mapping of str to Tensor
        vLLM's own, by the pictures' names in it; empty until the encoder connector has run.
    scope : str
        Of entries' keys; empty until the model is loaded.
    layers : int
        L; 0 until the model is loaded.
    policy_of : callable
        A policy as it is written, with the numbers of the model's profile; empty for the configured one.
    device : torch.device
        Where the model lies.
    is_current : callable
        Whether the model still has the weights that `scope` was made of.
    header_of : callable or None
        What an entry has to say of itself, by a picture's span.
    """

    config: Config
    store: Store
    worth: Worth
    encoder_cache: MutableMapping[str, Tensor] = field(default_factory=dict)
    scope: str = ""
    layers: int = 0
    policy_of: Callable[[str], Policy] = field(default=parse_policy)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_current: Callable[[], bool] = field(default=lambda: True)
    header_of: Callable[[Span], Header] | None = None

    def entry(self, content: str, span: Span | None = None) -> Entry | None:
        """A picture's, if it is stored and is all that is expected of it.

        Parameters
        ----------
        span : Span, optional
            Where the picture stands; without it its grid is not compared.
        """
        key = EntryKey(content, self.scope)
        try:
            entry = self.store.get_many([key]).get(key)
        except Exception:  # a store that breaks its promise: a miss
            return None
        if entry is None or self.header_of is None or not self.is_current():
            return None
        here = span or Span(content, 0, entry.header.tokens, entry.header.grid)
        return entry if entry.mismatch(self.header_of(here)) is None else None


_LOCK = threading.Lock()
_KNOWN: dict[Config, Shared] = {}


def shared(config: Config) -> Shared:
    """The same for every connector of this process."""
    with _LOCK:
        if config not in _KNOWN:
            worth = Worth(config.always_reuse)
            _KNOWN[config] = Shared(config, open_store(config, worth), worth)
        return _KNOWN[config]


def settings_of(extra: dict[str, Any]) -> tuple[Config, bool]:
    """The project's configuration, and whether it is strict, from a connector's `kv_connector_extra_config`."""
    options = {name: value for name, value in extra.items() if name not in _OWN}
    return load_config(**options), bool(extra.get("strict", False))
