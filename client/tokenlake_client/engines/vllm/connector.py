"""vLLM's hooks, translated; what to do is decided elsewhere. Beside this module only `checkpoint` and `versions` import
vLLM."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from tokenlake.errors import ConfigurationError, LayoutRefused, Refused
from tokenlake.hints import Hints
from tokenlake.identity import SessionId
from tokenlake.layout import Layout
from tokenlake_client.engines.connection import Connection
from tokenlake_client.engines.slots import TORCH_DTYPES
from tokenlake_client.engines.vllm.counters import Counters, Counts
from tokenlake_client.engines.vllm.entry import Scheduled
from tokenlake_client.engines.vllm.epoch import WeightsEpoch
from tokenlake_client.engines.vllm.hints import hints_of
from tokenlake_client.engines.vllm.host_copy import HostCopy
from tokenlake_client.engines.vllm.identity import block_tokens_of, layout_of
from tokenlake_client.engines.vllm.membership import Membership
from tokenlake_client.engines.vllm.paged import block_views, check_tensors, stack_layers
from tokenlake_client.engines.vllm.plan import StepPlan, StepReport
from tokenlake_client.engines.vllm.ranks import rank_shards
from tokenlake_client.engines.vllm.scheduler import SchedulerSide
from tokenlake_client.engines.vllm.settings import read_settings
from tokenlake_client.engines.vllm.trouble import Trouble, guarded
from tokenlake_client.engines.vllm.versions import hear_versions
from tokenlake_client.engines.vllm.worker import AbsentWorker, WorkerSide
from tokenlake_client.pool import Pool

__all__ = ["TokenLakeConnector"]

logger = logging.getLogger("tokenlake.vllm")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler's side to each rank."""

    plan: StepPlan


@dataclass
class StepOutcome(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From each rank to the scheduler's side."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepOutcome:
        """What both ranks have done."""
        assert isinstance(other, StepOutcome)
        return StepOutcome(self.report.merged(other.report))


class TokenLakeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one for its scheduler and one for each rank. No hook raises or waits longer than its deadline.

    With a model or a setting that the pool cannot serve it says so once and does nothing. `SupportsHMA` is declared for
    such models: without it vLLM starts no hybrid model with a connector, and turns its memory manager for sliding
    windows off. A model that the pool serves has one group of layers, whose block ids are the same either way.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `ConfigurationError` for an unknown or invalid setting, or where a lost segment would end its request,
        and nothing else."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.settings = read_settings(transfer.kv_connector_extra_config, os.environ)
        # A lost segment must cost a recompute, not the request, whatever vLLM's default is. The scheduler reads this
        # after it has made its connector.
        transfer.kv_load_failure_policy = "recompute"
        self._counters = Counters()
        self._trouble = Trouble(self._counters)
        self._scheduler: SchedulerSide | None = None
        # A rank that cannot serve must say so: the scheduler's side may have promised what is never loaded.
        self._worker: WorkerSide | AbsentWorker | None = AbsentWorker() if role == KVConnectorRole.WORKER else None
        self._connection: Connection | None = None
        self._epoch: WeightsEpoch | None = None
        self._gpu_blocks: Any = None
        self.layout = self._find_layout(vllm_config, kv_cache_config)
        if self.layout is not None:
            _check_policy_arrived()
            self._block = block_tokens_of(kv_cache_config)
            self._blocks = kv_cache_config.num_blocks
            if role == KVConnectorRole.SCHEDULER:
                try:
                    self._open_scheduler(self.layout)
                except LayoutRefused as error:
                    self._refused(error)

    @property
    def counts(self) -> Counts:
        """A copy of this side's counts so far."""
        return self._counters.read()

    @property
    def requires_kv_delivery(self) -> bool:
        """A segment that is not stored is a miss later, and nothing else."""
        return False

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything computed so far is stored; False when `timeout` seconds were not enough."""
        return self._worker is None or self._worker.flush(timeout)

    # -- the scheduler's hooks

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        if self._scheduler is None:
            return
        reason = _not_served(request)
        if reason is None:
            self._scheduler.new_request(request, self._hints(request))
        else:
            self._counters.add(requests_not_served=1)
            self._trouble.say(f"served without the pool: {reason}")

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded; None while that is not known."""
        if self._scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._scheduler.waits

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(lambda: StepMetadata(StepPlan(0)))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the ranks do in this step."""
        if self._scheduler is None:
            return StepMetadata(StepPlan(0))
        if self._epoch is not None and scheduler_output.total_num_scheduled_tokens:
            self._epoch.computes()
        tables = scheduler_output.kv_connector_block_state
        return StepMetadata(
            self._scheduler.step(_scheduled(scheduler_output), lambda name: tables.get_block_ids(name)[0])
        )

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """The outcome of a step, of all ranks."""
        if self._scheduler is not None:
            outcome = connector_output.kv_connector_worker_meta
            self._scheduler.worker_output(
                outcome.report if outcome is not None else None,
                sorted(connector_output.finished_recving or ()),
                set(connector_output.invalid_block_ids or ()),
            )

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks are still needed."""
        if self._scheduler is None:
            return False, None
        status = request.status.name
        complete = status in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        reason = _STOP_REASONS.get(status, "")
        # Of one that was refused there is nothing to say.
        output = request.num_output_tokens if reason else -1
        keep = self._scheduler.finished(request, block_ids, complete=complete, stop_reason=reason, output_tokens=output)
        return keep, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, with the blocks of each group of layers; vLLM calls this one."""
        # The pool serves models with one group; of any other there is no scheduler's side.
        return self.request_finished(request, block_ids[0]) if self._scheduler is not None else (False, None)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's own cache."""
        self._gpu_blocks = gpu_block_pool

    @guarded(lambda: False)
    def reset_cache(self) -> bool:
        """The weights may be others from now on: nothing that was stored before is loaded after. False where requests
        still have blocks, whose cache vLLM goes on using; then nothing is shared with other engines."""
        if self._scheduler is None or self._epoch is None:
            return True
        blocks = self._gpu_blocks
        # vLLM calls this after it has tried to empty its own cache, which it can do when no block but one is in use.
        empty = blocks is not None and blocks.num_gpu_blocks - blocks.get_num_free_blocks() == 1
        self._scheduler.new_weights(self._epoch.reset(empty=empty))
        return empty

    @guarded(lambda: None)
    def new_weights(self, version: str) -> None:
        """The weights were changed in place to the trainer's `version`: share with engines that started from the same
        weights and say the same version. On the scheduler's side, after a reset and before anything is computed."""
        if self._scheduler is None or self._epoch is None:
            return
        digest = self._epoch.named(version)
        if digest is None:
            self._trouble.say(
                f"nothing is shared under the weights' version {version!r}: it was set without a reset of the caches "
                "(pause with clear_cache, or reset_prefix_cache with reset_connector) right before"
            )
            digest = self._epoch.reset(empty=False)
        self._scheduler.new_weights(digest)

    def _hints(self, request: Any) -> Hints | None:
        try:
            return hints_of(request.kv_transfer_params)
        except ValueError as error:
            self._trouble.say(f"a hint is not passed on: {error}")
            return None

    # -- the ranks' hooks

    @guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The blocks' memory."""
        if self.layout is None:
            return
        try:
            self._open_worker(self.layout, kv_caches)
        except LayoutRefused as error:
            self._refused(error)

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called first in every step, before anything is written into blocks."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.begin(kv_connector_metadata.plan)

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the forward pass where the step waits for loads, else after it."""
        if self._worker is not None:
            self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete, or ordered before the pass, when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Segments are copied out behind the step, whole."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Queues what the step computed; waits for nothing."""
        if self._worker is not None:
            self._worker.save()

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may go, and requests whose loads ended."""
        return self._worker.finished() if self._worker is not None else (None, None)

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not filled."""
        return self._worker.errors() if self._worker is not None else set()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """How far this rank is."""
        return StepOutcome(self._worker.report()) if self._worker is not None else None

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Leave the pool."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._connection is not None:
            self._connection.close()

    # -- inside

    def _find_layout(self, vllm_config: Any, kv_cache_config: Any) -> Layout | None:
        try:
            return layout_of(vllm_config, kv_cache_config, self.settings)
        except LayoutRefused as error:
            self._refused(error)
        except Exception as error:
            self._trouble.report("finding the layout", error)
        return None

    def _refused(self, error: LayoutRefused) -> None:
        self.layout = None
        _say_refusal(str(error))

    def _open_scheduler(self, layout: Layout) -> None:
        connection = self._connection = Connection(
            lambda: Pool.connect(
                self.settings.socket or None, layout, self.settings.credential, daemon_uid=self.settings.daemon_uid
            ),
            self._trouble.report,
            wait_s=0.0,
        )
        pool = connection.get()
        if pool is not None:
            place = cast(Pool, pool).socket
            logger.info("connected to the pool at %s; layout %s", place, layout.fingerprint().hex()[:12])
        self._epoch = WeightsEpoch(layout.weights_digest)
        hear_versions(_tell_version)
        usable: Callable[[], Any] = connection.get
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        self._scheduler = SchedulerSide(
            usable,
            self.settings,
            self._block,
            self._counters,
            self._trouble.report,
            segment_bytes=layout.segment_bytes,
            shared=rank_shards(layout, 0, ranks).writers > 1,
        )

    def _open_worker(self, layout: Layout, kv_caches: Mapping[str, Any]) -> None:
        size = get_tensor_model_parallel_world_size()
        shards = rank_shards(layout, get_tensor_model_parallel_rank(), size)
        heads = max(1, layout.kv_heads // size)
        width = layout.key_dim + layout.value_dim
        names = check_tensors(kv_caches, heads, width, TORCH_DTYPES[layout.dtype], self._blocks)
        views = block_views(_backend_of(self._vllm_config, names))
        stacks = stack_layers([kv_caches[name] for name in names], self._blocks, views)
        copy = _copier(kv_caches[names[0]].device.type)(layout, shards, stacks)
        members = Membership(
            lambda session: Pool.connect(
                self.settings.socket or None,
                layout,
                self.settings.credential,
                session=SessionId(session),
                verify=self.settings.verify,
                daemon_uid=self.settings.daemon_uid,
            ),
            self._trouble.report,
        )
        self._worker = WorkerSide(
            members, copy, shards, self.settings, self._block, self._counters, self._trouble.report
        )

    def _hook_failed(self, error: Exception) -> None:
        # A pool that says no is there, and says so at once; any other failure may have cost a deadline.
        if self._connection is not None and not isinstance(error, Refused):
            self._connection.failed()


def _tell_version(connector: Any, version: str) -> None:
    if isinstance(connector, TokenLakeConnector):
        connector.new_weights(version)


def _copier(device: str) -> Any:
    if device == "cpu":
        return HostCopy
    if device == "cuda":
        from tokenlake_client.engines.vllm.cuda_copy import CudaCopy

        return CudaCopy
    raise LayoutRefused(f"the cache is on a device of kind {device!r}; supported: cpu, cuda")


@functools.cache
def _say_refusal(reason: str) -> None:
    """Once in a process: where the scheduler's side and a rank share one, both find the same reason."""
    logger.warning("served without the pool: %s", reason)


def _check_policy_arrived() -> None:
    """Raise `ConfigurationError` where vLLM's scheduler would end a request whose segment is lost.

    A connector within another one, such as `MultiConnector`, is given a configuration of its own, and the scheduler
    reads the outer one. That one is current while the ranks make their connectors; the scheduler's side does not see
    it, and a rank may be another process than the scheduler, so it can check the policy and not set it.
    """
    outer = get_current_vllm_config_or_none()
    transfer = outer.kv_transfer_config if outer is not None else None
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise ConfigurationError(
            "kv_load_failure_policy",
            transfer.kv_load_failure_policy,
            "'recompute': a lost segment would end its request with an error. Add "
            f'"kv_load_failure_policy": "recompute" to --kv-transfer-config, beside "kv_connector": '
            f'"{transfer.kv_connector}" (vLLM does not read it within "connectors")',
        )


_STOP_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_REPETITION": "repetition",
    "FINISHED_ABORTED": "abort",
}


def _not_served(request: Any) -> str | None:
    """Why the pool cannot serve a request; None when it can."""
    if request.lora_request is not None:
        return "requests with LoRA adapters"
    if request.mm_features:
        return "requests with images, sound or video"
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "requests with embeddings for tokens"
    if request.sampling_params is None:
        return "requests that do not generate"
    return "requests whose input is still streaming" if request.resumable else None


def _scheduled(output: Any) -> list[Scheduled]:
    parts = [
        Scheduled(
            new.req_id, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id], new.block_ids[0], whole=True
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    rows: Iterable[tuple[str, Any, int]] = zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    )
    parts += [
        Scheduled(
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
    """Name of the layers' attention backend, with the instruction set where its layout depends on it."""
    backends = get_current_attn_backends(vllm_config, list(names))
    if len(backends) != 1:
        raise LayoutRefused(f"the layers have {len(backends)} attention backends; supported: one")
    name = str(backends[0].get_name())
    if name != "CPU_ATTN":
        return name
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache, model = vllm_config.cache_config, vllm_config.model_config
    return f"{name}/{_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)}"
