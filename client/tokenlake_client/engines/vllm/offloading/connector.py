"""The connector for models whose layout the pool does not know: vLLM's OffloadingConnector on the pool. `front` makes
it."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.vllm.connector import check_failure_policy
from tokenlake_client.engines.vllm.counters import Counts, EngineCounters
from tokenlake_client.engines.vllm.disaggregated import is_split
from tokenlake_client.engines.vllm.epoch import on_weight_version, set_version, version_refused
from tokenlake_client.engines.vllm.offloading.hooks import begin, manager_of, worker_of
from tokenlake_client.engines.vllm.offloading.spec import PoolManager, PoolWorker, TokenLakeOffloadingSpec
from tokenlake_client.engines.vllm.stats import TokenLakeStats, stats_of

Hook = TypeVar("Hook", bound=Callable[..., Any])

IDLE_S = 0.0005
"""Pause of an empty step while a lookup or a load runs in the background."""


def timed(hook: Hook) -> Hook:
    """A decorator for hooks of `OpaqueLayoutConnector`: the hook's time is added to the counts."""

    @functools.wraps(hook)
    def call(self: OpaqueLayoutConnector, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return hook(self, *args, **kwargs)
        finally:
            self.counters.add(hook_seconds=time.perf_counter() - started)

    return cast(Hook, call)


class OpaqueLayoutConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM makes one connector for its scheduler and one for each rank. Only engines with an equal layout understand
    the bytes of a segment."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `ConfigurationError` for an unknown or invalid setting, and the errors of vLLM's connector."""
        transfer = vllm_config.kv_transfer_config
        # vLLM's scheduler reads the policy after it has made its connector. The tokens of a lost segment are computed.
        transfer.kv_load_failure_policy = "recompute"
        config = copy.copy(vllm_config)
        config.kv_transfer_config = copy.copy(transfer)
        config.kv_transfer_config.kv_connector_extra_config = {
            **transfer.kv_connector_extra_config,
            "spec_name": TokenLakeOffloadingSpec.__name__,
            "spec_module_path": TokenLakeOffloadingSpec.__module__,
        }
        super().__init__(config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            check_failure_policy()
        side = self.connector_scheduler if role == KVConnectorRole.SCHEDULER else self.connector_worker
        manager: PoolManager | None = manager_of(self)
        self._manager = manager
        spec: TokenLakeOffloadingSpec = manager.spec if manager is not None else side.spec
        self.counters: EngineCounters = spec.counters
        self._reports = spec.reports
        self._gpu_blocks: Any = None
        self._placed: set[str] = set()
        self._local: dict[str, int] = {}
        if manager is not None:
            begin(self)
            on_weight_version(set_version)

    @property
    def counts(self) -> Counts:
        """A copy of the counts of this side of the connector (the scheduler's, or a rank's)."""
        return self.counters.read()

    @property
    def layout(self) -> OpaqueLayout | None:
        """The layout, once all ranks have reported; only in vLLM's scheduler."""
        return self._manager.opening.layout if self._manager is not None else None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all computed chunks are stored; False when `timeout` seconds were not enough."""
        worker: PoolWorker | None = worker_of(self)
        return worker is None or worker.chunks.flush(timeout)

    # -- hooks of the scheduler's side

    @timed
    def on_new_request(self, request: Any) -> None:
        """vLLM's hook for a request that has arrived."""
        with self._reported("on_new_request"):
            if is_split(request.kv_transfer_params):
                self._reports.warn("no prompt is handed over to another engine: the segments of the model are opaque")
        super().on_new_request(request)

    @timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's hook that asks how many tokens of a request the pool has."""
        self._placed.discard(request.request_id)
        self._local[request.request_id] = num_computed_tokens
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._manager is not None:
            self._manager.chunks.takes(request.request_id, num_computed_tokens, num_computed_tokens)
        return found

    @timed
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's hook for a request that was given blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        name = request.request_id
        if name not in self._placed:
            self._placed.add(name)
            with self._reported("update_state_after_alloc"):
                self._count(request, num_external_tokens)

    def _count(self, request: Any, hit: int) -> None:
        """Count the tokens of a request that was given blocks, `hit` of which are loaded."""
        assert self._manager is not None
        remote = 0
        if hit:
            sources = self.get_external_cache_hit_sources(request, hit)
            remote = sources.get(CacheHitSource.P2P, 0)
        local = self._local.get(request.request_id, 0)
        rest = request.num_tokens - local - hit
        asked = self._manager.chunks.asked(request.request_id)
        self._manager.chunks.takes(request.request_id, local, local + hit)
        self.counters.add(
            requests=1,
            tokens_local=local,
            tokens_hit_here=hit - remote,
            tokens_hit_remote=remote,
            tokens_not_found=rest if asked else 0,
            tokens_not_asked=0 if asked else rest,
        )

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

    @timed
    def _plan_step(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._manager is not None and scheduler_output.total_num_scheduled_tokens:
            self._manager.opening.computes()
        return super().build_connector_meta(scheduler_output)

    @timed
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for a request that has finished."""
        self._placed.discard(request.request_id)
        self._local.pop(request.request_id, None)
        kept: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return kept

    def has_pending_push_work(self) -> bool:
        """False: vLLM need not go on with empty steps until all chunks are stored. The jobs run in the background, and
        the next step takes their outcome."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep a reference to the block pool of vLLM's own cache: `reset_cache` counts its used blocks."""
        self._gpu_blocks = gpu_block_pool

    def reset_cache(self) -> bool:
        """vLLM's hook for a reset of the caches, after which the weights may have changed. False: some requests still
        have blocks, whose cache vLLM continues to use."""
        super().reset_cache()
        blocks, empty = self._gpu_blocks, False
        with self._reported("reset_cache"):
            # vLLM has tried to empty its own cache before this call. It has succeeded if only the null block is in use.
            empty = blocks is not None and blocks.num_gpu_blocks - blocks.get_num_free_blocks() == 1
        # Also after an error: the weights may have changed.
        if self._manager is not None:
            self._manager.new_epoch(empty=empty)
        return bool(empty)

    def new_weights(self, version: str) -> None:
        """To be called when the weights were changed in place to the trainer's `version`, in vLLM's scheduler, after a
        reset and before anything is computed: chunks are shared with engines that have the same version."""
        if self._manager is None:
            return
        digest = self._manager.opening.named(version)
        if digest is None:
            self._reports.warn(version_refused(version))
            digest = self._manager.opening.reset(empty=False)
        self._manager.chunks.new_weights(digest)

    def get_kv_connector_stats(self) -> TokenLakeStats | None:
        """vLLM's hook after a step: returns the growth of the counts of this side; None: they have not grown."""
        stats: TokenLakeStats | None = None
        with self._reported("get_kv_connector_stats"):
            stats = stats_of(self.counters, self.role)
        return stats

    @contextlib.contextmanager
    def _reported(self, hook: str) -> Iterator[None]:
        """Count and log an error of the connector's own part of vLLM's hook `hook`, so that it does not reach vLLM."""
        try:
            yield
        except Exception as error:
            self._reports.failure(f"hook {hook}", error)

    # -- hooks of the ranks

    @timed
    def wait_for_save(self) -> None:
        """vLLM's hook at the end of a step. vLLM's own connector hands the jobs of the step to its backend in the next
        step; here they begin at once, because they run in the background."""
        super().wait_for_save()
        self.connector_worker.start_kv_transfers(OffloadingConnectorMetadata({}, {}))
