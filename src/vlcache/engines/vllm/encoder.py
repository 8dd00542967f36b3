"""The encoder connector: known pictures' encoder outputs come from the store, new ones' stay where entries find them.

--ec-transfer-config '{"ec_connector": "VLCacheEncoderConnector", "ec_role": "ec_both",
                       "ec_connector_module_path": "vlcache.engines.vllm.encoder"}'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from vlcache.engines.vllm.identity import content_of
from vlcache.engines.vllm.shared import settings_of, shared
from vlcache.types import Entry

__all__ = ["VLCacheEncoderConnector"]


@dataclass
class _Wanted(ECConnectorMetadata):  # type: ignore[misc]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


class VLCacheEncoderConnector(ECConnectorBase):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        extra = vllm_config.kv_transfer_config
        config, _ = settings_of(extra.kv_connector_extra_config if extra is not None else {})
        self._shared = shared(config)
        self._promised: dict[str, torch.Tensor] = {}
        self._wanted: dict[str, torch.Tensor] = {}

    def has_cache_item(self, identifier: str) -> bool:
        entry = self._entry(identifier)
        if entry is None:
            return False
        self._promised[identifier] = entry.encoder  # it may be evicted before the worker wants it
        return True

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        name = request.mm_features[index].identifier
        if name in self._promised:
            self._wanted[name] = self._promised[name]

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        wanted, self._wanted, self._promised = self._wanted, {}, {}
        return _Wanted(wanted)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._shared.encoder_cache = encoder_cache
        wanted = self._get_connector_metadata()
        assert isinstance(wanted, _Wanted)
        for name, output in wanted.outputs.items():
            if name not in encoder_cache:
                encoder_cache[name] = output.to(self._shared.device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        self._shared.encoder_cache = encoder_cache

    def _entry(self, name: str) -> Entry | None:
        content = content_of(name)
        if content is None or not self._shared.scope:
            return None
        return self._shared.entry(content)
