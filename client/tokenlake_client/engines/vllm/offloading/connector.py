"""The connector for models whose layout the pool does not know: vLLM's OffloadingConnector on the pool. `front` makes
it."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tokenlake.errors import LayoutRefused
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.vllm.epoch import WeightsEpoch
from tokenlake_client.engines.vllm.offloading.identity import (
    RankFacts,
    counted_group,
    has_recurrent_states,
    identity_of,
    rank_facts,
    some_groups_forget,
)
from tokenlake_client.engines.vllm.offloading.manager import ChunkManager
from tokenlake_client.engines.vllm.offloading.spec import (
    CHUNK_SETTING,
    PoolManager,
    PoolWorker,
    TokenLakeOffloadingSpec,
)
from tokenlake_client.engines.vllm.offloading.worker import ChunkWorker
from tokenlake_client.engines.vllm.patches import VERSION, apply
from tokenlake_client.engines.vllm.served_request import is_split
from tokenlake_client.engines.vllm.side import PoolHooks, Side, check_failure_policy, hook

IDLE_S = 0.0005
"""Pause of an empty step while a lookup or a load runs in the background."""
EXTENDED = ("build_connector_worker_meta", "get_transfer_results", "on_new_request", "update_connector_output")
"""Methods of vLLM's connector without which the pool could not tell vLLM that a load failed, or which cache it has."""


@dataclass
class PoolWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """vLLM's message from the ranks to the scheduler's side, with the reports of ranks on their caches."""

    facts: dict[int, RankFacts] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The messages of several ranks as one."""
        whole = super().aggregate(other)
        facts = {**self.facts, **getattr(other, "facts", {})}
        return PoolWorkerMetadata(whole.completed_jobs, whole.transfer_stats, facts)


class OpaqueLayoutConnector(PoolHooks, OffloadingConnector):  # type: ignore[misc]
    """vLLM makes one connector for its scheduler and one for each rank. Only engines with an equal layout understand
    the bytes of a segment. Each rank reports on its cache in its first step; when all have reported, the layout is
    known and the pool is opened."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `ConfigurationError` for an unknown or invalid setting, `LayoutRefused` for a version of vLLM that the
        pool cannot extend, and the errors of vLLM's connector."""
        if not all(hasattr(OffloadingConnector, name) for name in EXTENDED):
            raise LayoutRefused("this version of vLLM lacks a method of OffloadingConnector that the pool extends")
        transfer = vllm_config.kv_transfer_config
        # vLLM's scheduler reads the policy after it has made its connector. The tokens of a lost segment are computed.
        transfer.kv_load_failure_policy = "recompute"
        config = copy.copy(vllm_config)
        config.kv_transfer_config = copy.copy(transfer)
        # A recurrent state is kept at the end of a block, which would be the end of a longer chunk by chance only.
        chunk = {CHUNK_SETTING: 1} if has_recurrent_states(kv_cache_config) else {}
        config.kv_transfer_config.kv_connector_extra_config = {
            **transfer.kv_connector_extra_config,
            "spec_name": TokenLakeOffloadingSpec.__name__,
            "spec_module_path": TokenLakeOffloadingSpec.__module__,
            **chunk,
        }
        super().__init__(config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            check_failure_policy()
        self._manager: PoolManager | None = None
        self._reported = False
        self._placed: set[str] = set()
        self._local: dict[str, int] = {}
        self._some_groups_forget = False
        if role == KVConnectorRole.SCHEDULER:
            self._manager = self.connector_scheduler.manager
            self.side: Side = self._manager.spec.side
            self._identify(self._manager)
            apply(VERSION)
        else:
            self.side = self.connector_worker.spec.side

    @property
    def layout(self) -> OpaqueLayout | None:
        """The layout, once all ranks have reported; only in vLLM's scheduler."""
        return self._manager.opening.layout if self._manager is not None else None

    def on_rank(self) -> ChunkWorker | None:
        """See `PoolHooks`."""
        return self._worker.chunks if self._worker is not None else None

    @property
    def _worker(self) -> PoolWorker | None:
        """The backend on a rank, once vLLM has made it."""
        return getattr(self.connector_worker, "worker", None)

    def _identify(self, manager: PoolManager) -> None:
        """Begin to identify the model. Reads the model's files in the background."""
        spec, config, cached = manager.spec, self._vllm_config, self._kv_cache_config
        manager.chunks.counted_group = counted_group(cached)
        self._some_groups_forget = some_groups_forget(cached)
        self.side.serve_adapters(config.lora_config, config.model_config.dtype)
        manager.opening.identify(
            lambda: identity_of(
                config, cached, spec.settings, chunk_blocks=spec.blocks_per_chunk, replicated=spec.replicated_layout
            )
        )

    # -- hooks of the scheduler's side

    @hook(None)
    def on_new_request(self, request: Any) -> None:
        """vLLM's hook for a request that has arrived."""
        self._warn_of_split(request)
        super().on_new_request(request)
        if self._manager is not None:
            self._manager.arrived(request)

    @hook(lambda: None)
    def _warn_of_split(self, request: Any) -> None:
        if is_split(request.kv_transfer_params):
            self.side.reports.warn("no prompt is handed over to another engine: the segments of the model are opaque")

    @hook(None)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's hook that asks how many tokens of a request the pool has."""
        self._placed.discard(request.request_id)
        self._local[request.request_id] = num_computed_tokens
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._manager is not None:
            self._manager.takes(request.request_id, num_computed_tokens)
            if self._manager.tails_wait(request.request_id):
                return None, False
            if found[0] is not None:
                self._mark_shared_prefix(request, num_computed_tokens + found[0])
        return found

    @hook(lambda: None)
    def _mark_shared_prefix(self, request: Any, hit: int) -> None:
        """Let vLLM keep, and offer to the pool, what its groups with windows and recurrent states need to begin at the
        end of the prefix that the prompt shares with stored ones, where the pool has the groups with full attention up
        to there. vLLM does so by itself for prefixes in its own cache."""
        assert self._manager is not None
        if not self._some_groups_forget or not self._manager.spec.settings.save:
            return
        shared = self._manager.shared_tokens(request.request_id)
        if shared > hit:
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, shared)

    @hook(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's hook for a request that was given blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._store_filled_blocks(request)
        name = request.request_id
        if name not in self._placed:
            self._placed.add(name)
            self._count(request, num_external_tokens)

    @hook(lambda: None)
    def _store_filled_blocks(self, request: Any) -> None:
        """Let a block be stored that the load of a tail filled in part, once it is full. vLLM counts it as loaded, so
        that later prompts would find no whole chunk there."""
        status = self.connector_scheduler._req_status[request.request_id]
        for state in status.group_states:
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, state.num_hit_chunks)

    @hook(lambda: None)
    def _count(self, request: Any, hit: int) -> None:
        """Count the tokens of a request that was given blocks, `hit` of which are loaded."""
        assert self._manager is not None
        remote = 0
        if hit:
            sources = self.get_external_cache_hit_sources(request, hit)
            remote = sources.get(CacheHitSource.P2P, 0)
        local = self._local.get(request.request_id, 0)
        asked = self._manager.chunks.asked(request.request_id)
        self._manager.chunks.takes(request.request_id, local, local + hit)
        self.counters.add_request(request.num_tokens, local, here=hit - remote, remote=remote, asked=asked)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """vLLM's hook before a step: returns the jobs of the ranks in this step."""
        if (
            self._manager is not None
            and not scheduler_output.total_num_scheduled_tokens
            and self._manager.chunks.waiting
        ):
            # Where vLLM runs its scheduler in the caller's process, it repeats empty steps without a pause, and would
            # keep the interpreter from the threads that look up and load. Its server processes pause by themselves.
            time.sleep(IDLE_S)
        return self._plan_step(scheduler_output)

    @hook(None)
    def _plan_step(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._manager is not None and scheduler_output.total_num_scheduled_tokens:
            self._manager.opening.epoch.computes()
        return super().build_connector_meta(scheduler_output)

    @hook(None)
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for a request that has finished."""
        self._placed.discard(request.request_id)
        self._local.pop(request.request_id, None)
        kept: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return kept

    @hook(None)
    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM's hook for the outcome of a step on all ranks."""
        self._take_reports(connector_output)
        super().update_connector_output(connector_output)

    @hook(lambda: None)
    def _take_reports(self, output: Any) -> None:
        if self._manager is not None:
            facts = getattr(output.kv_connector_worker_meta, "facts", {})
            if facts:
                self._manager.opening.reported(facts, self._vllm_config.parallel_config.world_size)
            for name in output.failed_recving or ():
                self._manager.chunks.load_failed(name)

    def has_pending_push_work(self) -> bool:
        """False: vLLM need not go on with empty steps until all chunks are stored. The jobs run in the background, and
        the next step takes their outcome."""
        return False

    def planner(self) -> tuple[WeightsEpoch, ChunkManager] | None:
        """See `PoolHooks`."""
        return (self._manager.opening.epoch, self._manager.chunks) if self._manager is not None else None

    def reset_cache(self) -> bool:
        """See `PoolHooks`."""
        OffloadingConnector.reset_cache(self)
        return super().reset_cache()

    # -- hooks of the ranks

    @hook(None)
    def wait_for_save(self) -> None:
        """vLLM's hook at the end of a step. vLLM's own connector hands the jobs of the step to its backend in the next
        step; here they begin at once, because they run in the background."""
        super().wait_for_save()
        self.connector_worker.start_kv_transfers(OffloadingConnectorMetadata({}, {}))

    @hook(None)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM's hook for asynchronous work of this rank: names the requests whose load failed, so that vLLM computes
        them. vLLM's own connector takes each load for a success."""
        results, worker = super().get_transfer_results(finished_req_ids), self._worker
        if worker is not None:
            results.failed_recving |= worker.take_failed() & set(results.finished_recving or ())
        return results

    @hook(None)
    def build_connector_worker_meta(self) -> Any:
        """vLLM's hook after a step: the first message has the report on the rank's cache."""
        meta, worker = super().build_connector_worker_meta(), self._worker
        if worker is None or self._reported:
            return meta
        self._reported = True
        facts = rank_facts(self._vllm_config, self._kv_cache_config, worker.rank, worker.cache)
        told = PoolWorkerMetadata(facts={worker.rank: facts})
        return told if meta is None else told.aggregate(meta)
