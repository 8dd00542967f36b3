"""The K/V connector: vLLM's interface on one side, `scheduler.py` and `worker.py` on the other.

--kv-transfer-config '{"kv_connector": "VLCacheConnector", "kv_role": "kv_both",
                       "kv_connector_module_path": "vlcache.engines.vllm.connector"}'
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.model_executor.models.utils import extract_layer_index

from vlcache.engines.vllm.checkpoint import read_checkpoint
from vlcache.engines.vllm.messages import Work
from vlcache.engines.vllm.models import loaded
from vlcache.engines.vllm.paged import PagedKV, UnreadableLayoutError
from vlcache.engines.vllm.scheduler import Scheduler
from vlcache.engines.vllm.shared import settings_of, shared
from vlcache.engines.vllm.worker import Worker, looks_behind
from vlcache.errors import VLCacheError
from vlcache.keys import digest_tenant, scope
from vlcache.plan import make_plan
from vlcache.policies import Evidence, Policy, parse_policy
from vlcache.types import Span

__all__ = ["VLCacheConnector"]

logger = logging.getLogger("vllm.vlcache")


class VLCacheConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._strict = settings_of(self._kv_transfer_config.kv_connector_extra_config)
        # What cannot be loaded is computed: otherwise vLLM fails the request
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._shared = shared(self._config)
        self._block_size = vllm_config.cache_config.block_size
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.WORKER:
            self._shared.scope = ""  # of an engine before this one in the process
        self._invalid: set[int] = set()
        self._filled: set[str] = set()
        self._refused = _refusal(vllm_config)
        if self._refused:
            self._refuse(self._refused)

    # The scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._refused:
            return
        self._scheduler = Scheduler(
            has_kv=self._has_kv,
            to_end=lambda text: looks_behind(self._shared.policy_of(text), self._shared.layers),
            block_size=self._block_size,
            hit=lambda request: int(kv_cache_manager.get_computed_blocks(request)[1]),
            blocks_of=lambda name: kv_cache_manager.get_block_ids(name)[0],
        )
        self._known_requests: dict[str, Any] = {}

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None and self._shared.scope:
            self._known_requests[request.request_id] = request
            self._scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.claim(request, num_computed_tokens)
        # Between steps: other requests go on, and this one comes to the worker when it is known how far it was filled
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return Work()
        before = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed = {name: before[name] + new for name, new in scheduler_output.num_scheduled_tokens.items()}
        work = self._scheduler.step(
            computed, lambda name: self._known_requests[name].prompt_token_ids, scheduler_output.finished_req_ids
        )
        for name in scheduler_output.finished_req_ids:
            self._known_requests.pop(name, None)
        return work

    def _has_kv(self, span: Span) -> bool:
        entry = self._shared.entry(span.content, span)
        return entry is not None and entry.has_kv

    # The worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._refused:
            return
        try:
            self._worker = self._make_worker(kv_caches)
        except (VLCacheError, UnreadableLayoutError) as error:
            self._refuse(str(error))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        if not work.loads:
            return
        assert self._worker is not None
        try:
            _, failed = self._worker.load(work.loads)
        except Exception:  # whatever it was, vLLM can compute the requests itself
            logger.exception("vlcache could not fill %d requests", len(work.loads))
            failed = work.loads
        self._filled |= {one.asked.request for one in work.loads}
        for one in failed:
            self._invalid |= set(one.asked.blocks[one.begin // self._block_size :])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        filled, self._filled = self._filled, set()
        return None, filled or None

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        if work.saves and self._worker is not None:
            self._worker.save(work.saves)

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _make_worker(self, kv_caches: dict[str, torch.Tensor]) -> Worker:
        names = sorted(kv_caches, key=extract_layer_index)
        layers = self._vllm_config.compilation_config.static_forward_context
        attentions = [layers[name] for name in names]
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        device = kv_caches[names[0]].device
        build = attentions[0].get_attn_backend().get_builder_cls()
        builder = build(spec, names, self._vllm_config, device)
        kv = PagedKV(attentions, [kv_caches[name] for name in names], builder, self._block_size)
        model = self._vllm_config.model_config
        if not loaded.weights:
            raise VLCacheError(f"weights loaded as {self._vllm_config.load_config.load_format} were not seen")
        checkpoint = read_checkpoint(model.model, model.dtype, loaded.weights)
        profile, configured = checkpoint.profile(self._config.profile, model.model), self._config.policy

        def policy_of(text: str) -> Policy:
            text = text or configured
            policy = parse_policy(text) if profile is None else profile.policy(text)
            layers = checkpoint.geometry.layers  # one that does not fit the model says so now
            make_plan(policy, [Span("", 0, 1, (1, 1, 1))], [Evidence(layers)], 0, 2, layers)
            return policy

        policy = policy_of("")
        dtype, tenant = str(model.dtype), digest_tenant(self._config.cache_salt)
        self._shared.scope = scope(checkpoint.fingerprint, dtype, tenant)
        self._shared.device, self._shared.layers = device, checkpoint.geometry.layers
        self._shared.policy_of = policy_of
        logger.info("vlcache is active: %s, policy %s", loaded.model.__class__.__name__, policy.name)
        worker = Worker(loaded.model, checkpoint, kv, self._shared, policy_of)
        times = loaded.times
        self._shared.is_current = lambda: loaded.times == times
        self._shared.header_of = lambda span: worker.headers([span])[0]
        return worker

    def _refuse(self, why: str) -> None:
        self._refused = why
        if self._strict:
            raise VLCacheError(f"vlcache: {why}; leave strict out to start without reuse")
        logger.warning("vlcache is not active: %s", why)


def _refusal(config: Any) -> str:
    """What of vLLM's configuration rules reuse out; empty if nothing does."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        return "tensor and pipeline parallel have not been tested"
    if config.speculative_config is not None:
        return "speculative decoding has not been tested"
    if config.cache_config.cache_dtype not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
        return f"K/V in {config.cache_config.cache_dtype} have not been tested"
    if config.lora_config is not None:
        return "LoRA has not been tested"
    if parallel.distributed_executor_backend not in (None, "uni"):
        return f"workers in other processes ({parallel.distributed_executor_backend}) have not been tested"
    model = config.model_config
    if model.runner_type != "generate":
        return f"a {model.runner_type} model has no answers to verify"
    if model.hf_overrides or model.revision:
        return "a configuration or a revision other than the checkpoint's own has not been tested"
    if model.multimodal_config is not None and model.multimodal_config.mm_processor_cache_type == "shm":
        return "pictures in shared memory (mm_processor_cache_type shm) cannot be told apart here"
    return ""
