"""The connector for models whose layout the pool knows: translates between vLLM's hooks and the two sides of the
connector, `SchedulerSide` and `WorkerSide`. `front` makes it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from tokenlake.errors import ConfigurationError, LayoutRefused, Unreachable
from tokenlake.layout import Layout
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.common.slots import SLOT_DTYPES
from tokenlake_client.engines.vllm.copies import copy_for
from tokenlake_client.engines.vllm.epoch import WeightsEpoch
from tokenlake_client.engines.vllm.known.blocks import BlockCache, block_views, check_tensors, stack_layers
from tokenlake_client.engines.vllm.known.disaggregated import NOT_SPLIT, Split, split_of
from tokenlake_client.engines.vllm.known.identity import block_tokens_of, layout_of
from tokenlake_client.engines.vllm.known.ranks import rank_shards
from tokenlake_client.engines.vllm.known.request import ScheduledPart, end_of, media_digests
from tokenlake_client.engines.vllm.known.scheduler import SchedulerSide
from tokenlake_client.engines.vllm.known.step_plan import StepPlan, StepReport
from tokenlake_client.engines.vllm.known.worker import UnservedWorker, WorkerSide
from tokenlake_client.engines.vllm.patches import VERSION, apply
from tokenlake_client.engines.vllm.served_request import is_split
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import read_settings
from tokenlake_client.engines.vllm.side import PoolHooks, Side, check_failure_policy, hook, logger
from tokenlake_client.engines.vllm.stats import sources_of_hit


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The message from the scheduler's side to each rank for one step of the engine; vLLM transports it."""

    plan: StepPlan


@dataclass
class StepOutcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The message from each rank to the scheduler's side about one step of the engine; vLLM transports it."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepOutcome:
        """The outcome of this rank and of `other` (other tensor-parallel ranks) as one message."""
        return StepOutcome(self.report.merged(cast(StepOutcome, other).report))


class KnownLayoutConnector(PoolHooks, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one connector for its scheduler and one for each rank. No hook raises, and none waits longer than its
    deadline.

    With a model that the pool cannot serve the connector logs the reason and does nothing. It declares `SupportsHMA`
    for such models: without it vLLM starts no hybrid model with a connector, and turns off its memory manager for
    sliding windows. A model that the pool serves has one group of layers, whose block ids do not depend on that
    manager.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `ConfigurationError` for an unknown or invalid setting, and for a policy of vLLM under which a lost
        segment would end its request. Raises no other error."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.side = Side(transfer.kv_connector_extra_config)
        self.settings = self.side.settings
        self._engine_id = str(transfer.engine_id)
        self._inner = self._is_inner()
        # vLLM's load-failure policy is set to recomputation: the tokens of a lost segment are recomputed, and its
        # request does not fail, whatever vLLM's default is. vLLM's scheduler reads the policy after it has made its
        # connector.
        transfer.kv_load_failure_policy = "recompute"
        self._scheduler: SchedulerSide | None = None
        # Until `register_kv_caches` has succeeded, a rank reports that it cannot serve: the scheduler's side may have
        # promised loads to vLLM, whose blocks must then be recomputed.
        self._worker: WorkerSide | UnservedWorker | None = UnservedWorker() if role == KVConnectorRole.WORKER else None
        self._connection: Connection | None = None
        self._epoch: WeightsEpoch | None = None
        self._refusal = ""
        self.layout = self._find_layout(vllm_config, kv_cache_config)
        if self.layout is not None:
            check_failure_policy()
            try:
                self._block = block_tokens_of(kv_cache_config)
                self._blocks = kv_cache_config.num_blocks
                if role == KVConnectorRole.SCHEDULER:
                    self._open_scheduler(self.layout)
            except LayoutRefused as error:
                self._refuse(error)
                self._close_scheduler()
            except Exception as error:
                self.side.reports.failure("opening the connector", error)
                self.layout, self._refusal = None, str(error)
                self._close_scheduler()
        if self.layout is None and role == KVConnectorRole.SCHEDULER:
            self._decline()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Always False. Also checks the settings, and raises `ConfigurationError`: where CUDA graphs are in use, vLLM
        calls this method in the process that the user started, before a model is loaded."""
        read_settings(extra_config, os.environ)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the connector stores segments as best effort; one that is not stored is a miss later."""
        return False

    def on_rank(self) -> WorkerSide | UnservedWorker | None:
        """See `PoolHooks`."""
        return self._worker

    # -- hooks of the scheduler's side

    @hook(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """vLLM's hook for a request that has arrived."""
        if self._scheduler is None:
            if self._connection is not None:
                self._connection.get()
            return
        admitted = self.side.admit(request, _not_served(request))
        if admitted is not None:
            acts, adapter = admitted
            extras = media_digests(request.mm_features, self.settings.segment_tokens)
            self._scheduler.new_request(request, acts.hints, adapter, extras, self._split(request))
            for bring in acts.brings:
                self.side.brought(bring, self._scheduler.bring(request.request_id, bring))

    @hook(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's hook that asks how many tokens of a request the pool has behind the tokens that are computed. Returns
        (that number of tokens to load, or None while it is not known; True for a load, which is asynchronous)."""
        if self._scheduler is None:
            return 0, False
        reads = not request.skip_reading_prefix_cache
        tokens = self._scheduler.matched(request, num_computed_tokens, reads=reads)
        return tokens, bool(tokens)

    @hook(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's hook for a request that was given blocks, also where nothing is to be loaded: plan its load."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @hook(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """vLLM's hook after `update_state_after_alloc`: returns the loaded tokens by their source. vLLM counts tokens
        that are missing in the result as those of an unspecified source."""
        if self._scheduler is None:
            return {}
        return sources_of_hit(num_external_tokens, self._scheduler.remote_tokens(request.request_id))

    @hook(lambda: StepMetadata(StepPlan(0)))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """vLLM's hook before a step: returns the plan of loads and saves for the ranks in this step."""
        if self._scheduler is None:
            return StepMetadata(StepPlan(0))
        try:
            self._log_status()
            if self._epoch is not None and scheduler_output.total_num_scheduled_tokens:
                self._epoch.computes()
            tables = scheduler_output.kv_connector_block_state
            scheduled = _scheduled(scheduler_output)
        except Exception as error:
            self.hook_failed("build_connector_meta", error)
            return StepMetadata(self._scheduler.unknown_step())
        return StepMetadata(self._scheduler.step(scheduled, lambda name: tables.get_block_ids(name)[0]))

    @hook(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM's hook for the outcome of a step on all ranks."""
        if self._scheduler is not None:
            outcome = connector_output.kv_connector_worker_meta
            self._scheduler.worker_output(
                outcome.report if outcome is not None else None,
                sorted(connector_output.finished_recving or ()),
                set(connector_output.invalid_block_ids or ()),
            )

    @hook(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for a request that has finished. Returns (True while the ranks still have to read its blocks,
        the `kv_transfer_params` of the answer: for the engine that decodes the request, None where there is none)."""
        if self._scheduler is None:
            return False, None
        end = end_of(request.status.name, request.num_output_tokens)
        keep, offer = self._scheduler.finished(request, block_ids, end)
        return keep, None if offer is None else offer.fields(request.request_id, self._engine_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's hook for a request that has finished, called instead of `request_finished` with the blocks of each
        group of layers. Returns as `request_finished`."""
        # The first group is enough: for a model with several groups, which the pool does not serve, `_scheduler` is
        # None.
        return self.request_finished(request, block_ids[0]) if self._scheduler is not None else (False, None)

    def planner(self) -> tuple[WeightsEpoch, SchedulerSide] | None:
        """See `PoolHooks`."""
        return (self._epoch, self._scheduler) if self._epoch is not None and self._scheduler is not None else None

    def _split(self, request: Any) -> Split:
        # vLLM accepts each field of an answer from one connector only, and another one may hand the prompt over too.
        if self._inner:
            if is_split(request.kv_transfer_params):
                self.side.reports.warn(
                    "no prompt is handed over to another engine: the connector is within another one"
                )
            return NOT_SPLIT
        try:
            return split_of(request.kv_transfer_params)
        except ValueError as error:
            self.side.reports.warn(
                f"request {request.request_id[:100]!r} is served as if no other engine had computed it: {error}",
                kind="remote prefill",
            )
            return NOT_SPLIT

    # -- hooks of the ranks

    @hook(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's hook for its allocated cache: the rank begins to serve, if it can read and write the cache."""
        if self.layout is None:
            return
        try:
            self._open_worker(self.layout, kv_caches)
        except LayoutRefused as error:
            self._refuse(error)
            self._decline()

    @hook(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. vLLM calls this hook first in each step, before any block is written."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.begin(kv_connector_metadata.plan)

    @hook(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """vLLM's hook for loads: execute those of the step."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM's hook for loads by layer. It does nothing: loads are complete when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """vLLM's hook for saves by layer. It does nothing: whole segments are copied out of the blocks after the
        step."""

    @hook(lambda: None)
    def wait_for_save(self) -> None:
        """vLLM's hook at the end of a step: queue the segments whose tokens the step completed, so that they are stored
        in the background."""
        if self._worker is not None:
            self._worker.save()

    @hook(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """vLLM's hook for asynchronous work of this rank. Returns (finished requests whose blocks may be freed,
        requests whose loads ended), both since the last call."""
        return self._worker.finished() if self._worker is not None else (None, None)

    @hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """vLLM's hook for failed loads: returns the numbers of the blocks that loads since the last call should have
        filled and did not."""
        return self._worker.errors() if self._worker is not None else set()

    @hook(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """vLLM's hook after a step: returns this rank's report on the step, for the scheduler's side."""
        return StepOutcome(self._worker.report()) if self._worker is not None else None

    @hook(lambda: None)
    def shutdown(self) -> None:
        """Store the waiting segments for a limited time, release all leases, and leave the session."""
        self._close_part(self._worker)
        self._close_scheduler()

    def _close_scheduler(self) -> None:
        """End the scheduler's side, also one that was opened in part: it serves no request any more."""
        for part in (self._scheduler, self.side, self._connection):
            self._close_part(part)
        self._scheduler = self._connection = None

    def _close_part(self, part: Any) -> None:
        try:
            if part is not None:
                part.close()
        except Exception as error:
            self.hook_failed("shutdown", error)

    def _find_layout(self, vllm_config: Any, kv_cache_config: Any) -> Layout | None:
        try:
            return layout_of(vllm_config, kv_cache_config, self.settings)
        except LayoutRefused as error:
            self._refuse(error)
        except ConfigurationError:
            raise
        except Exception as error:
            self.side.reports.failure("finding the layout", error)
            self._refusal = str(error)
        return None

    def _is_inner(self) -> bool:
        """True if another connector, such as `MultiConnector`, makes this one. vLLM's configuration does not state it,
        so the callers of the constructor are examined."""
        frame: FrameType | None = sys._getframe(1)
        callers = []
        while frame is not None:
            callers.append(frame.f_locals.get("self"))
            frame = frame.f_back
        return any(isinstance(caller, KVConnectorBase_V1) and caller is not self for caller in callers)

    def _refuse(self, error: LayoutRefused) -> None:
        self.layout, self._refusal = None, str(error)
        _log_refusal(self._refusal)

    def _decline(self) -> None:
        self._connection = self.settings.decline(self._refusal)

    def _log_status(self) -> None:
        if self._connection is not None and self._scheduler is not None:
            self.side.status.update(self._connection.pool, silent=self._scheduler.silent)

    def _open_scheduler(self, layout: Layout) -> None:
        connection = self._connection = Connection(
            lambda: self.settings.connect(layout, verify=False),
            self.side.reports.failure,
            wait_s=0.0,
        )
        self._epoch = WeightsEpoch(layout.weights_digest)
        apply(VERSION)
        config = self._vllm_config
        self.side.serve_adapters(config.lora_config, config.model_config.dtype)
        usable: Callable[[], Any] = connection.get
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        self._scheduler = SchedulerSide(
            usable,
            self.settings,
            self._block,
            self.counters,
            self.side.reports.failure,
            segment_bytes=layout.segment_bytes,
            shared=rank_shards(layout, 0, ranks).writers > 1,
            model=str(self._vllm_config.model_config.served_model_name),
            refuse=lambda line: self.side.reports.warn(line, kind="remote prefill"),
        )
        self._log_status()

    def _open_worker(self, layout: Layout, kv_caches: Mapping[str, Any]) -> None:
        size = get_tensor_model_parallel_world_size()
        shards = rank_shards(layout, get_tensor_model_parallel_rank(), size)
        heads = max(1, layout.kv_heads // size)
        width = layout.key_dim + layout.value_dim
        names = check_tensors(kv_caches, heads, width, SLOT_DTYPES[layout.dtype], self._blocks)
        views = block_views(_backend_of(self._vllm_config, names))
        stacks = stack_layers([kv_caches[name] for name in names], self._blocks, views)
        copy = copy_for(BlockCache(layout, shards, stacks), {stacks[0].tensor.device})
        session = RankSession(lambda number: self.settings.connect(layout, number), self.side.reports.failure)
        adapters = self.side.loaded_adapters() if self._vllm_config.lora_config is not None else None
        self._worker = WorkerSide(
            session,
            copy,
            shards,
            self.settings,
            self._block,
            self.counters,
            self.side.reports.failure,
            lambda line: self.side.reports.warn(line, kind="loads"),
            adapters,
        )

    def hook_failed(self, name: str, error: Exception) -> None:
        """See `PoolHooks`."""
        super().hook_failed(name, error)
        # A call that the daemon did not answer may have cost a deadline, so the pool is not used for a while after it.
        # Any other error came at once, perhaps from the values of one request: the pool serves the next one.
        if self._connection is not None and isinstance(error, Unreachable):
            self._connection.failed()


@functools.cache
def _log_refusal(reason: str) -> None:
    """Log the reason why the pool cannot serve the model, once per process: the scheduler's side and a rank in the same
    process find the same reason."""
    logger.warning("TokenLake: served without the pool: %s", reason)


def _not_served(request: Any) -> str | None:
    """The reason why the pool cannot serve a request of vLLM; None if it can."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "requests with embeddings for tokens"
    if request.sampling_params is None:
        return "requests that do not generate"
    if request.resumable:
        return "requests whose input is still streaming"
    return None


def _scheduled(output: Any) -> list[ScheduledPart]:
    parts = [
        ScheduledPart(
            new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id], new.block_ids[0], whole=True
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    rows: Iterable[tuple[str, Any, int]] = zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    )
    parts += [
        ScheduledPart(
            name,
            computed,
            output.num_scheduled_tokens[name],
            blocks[0] if blocks is not None else (),
            whole=name in cached.resumed_req_ids,
        )
        for name, blocks, computed in rows
    ]
    return parts


def _backend_of(vllm_config: Any, names: Iterable[str]) -> str:
    """The name of the layers' attention backend, of which there must be one."""
    backends = get_current_attn_backends(vllm_config, list(names))
    if len(backends) != 1:
        raise LayoutRefused(f"the layers have {len(backends)} attention backends; supported: one")
    return backend_name(vllm_config, backends[0], vllm_config.cache_config.block_size)


def backend_name(vllm_config: Any, backend: Any, block_tokens: int) -> str:
    """The name of an attention backend as `block_views` takes it: with the instruction set where the memory layout
    depends on it. `block_tokens`: the tokens of a block."""
    name = str(backend.get_name())
    if name != "CPU_ATTN":
        return name
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache, model = vllm_config.cache_config, vllm_config.model_config
    return f"{name}/{_get_attn_isa(model.dtype, block_tokens, model.get_head_size(), cache.cache_dtype)}"
