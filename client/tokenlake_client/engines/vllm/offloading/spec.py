"""`TokenLakeOffloadingSpec`, a backend of vLLM's OffloadingConnector: adapts manager and worker to vLLM's classes.

`TokenLakeConnector` uses it by itself where it is needed. It can also be named for vLLM's own connector::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"spec_name": "TokenLakeOffloadingSpec",
                                   "spec_module_path": "tokenlake_client.engines.vllm.offloading.spec"}}
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tokenlake.errors import LayoutRefused
from tokenlake.identity import SessionId
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.common.declined import declined
from tokenlake_client.engines.common.reports import Reports
from tokenlake_client.engines.devices.cuda import CudaDevice
from tokenlake_client.engines.vllm.adapters import Adapters, LoadedAdapters, options_of, watch_loads
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.offloading.chunks import GROUP_BYTES, blocks_per_chunk
from tokenlake_client.engines.vllm.offloading.hooks import extend
from tokenlake_client.engines.vllm.offloading.lookup import Found
from tokenlake_client.engines.vllm.offloading.manager import ChunkManager
from tokenlake_client.engines.vllm.offloading.opening import Opening
from tokenlake_client.engines.vllm.offloading.pages import DevicePages, HostPages, PageTable, chunk_bytes
from tokenlake_client.engines.vllm.offloading.worker import BlockRange, ChunkWorker, Pages, RankPlace
from tokenlake_client.engines.vllm.request import hints_of, unnamed_media
from tokenlake_client.engines.vllm.settings import read_settings
from tokenlake_client.engines.vllm.status import PoolStatus
from tokenlake_client.pool import Pool

logger = init_logger("vllm.tokenlake")

Hook = TypeVar("Hook", bound=Callable[..., Any])

VLLM_SETTINGS = ("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only")
"""Keys of `kv_connector_extra_config` that vLLM's OffloadingConnector reads."""
RESULTS = [LookupResult.MISS, *[LookupResult[found.name.replace("PENDING", "HIT_PENDING")] for found in Found]]
"""vLLM's name of each `Found`, by the value of the `Found`. The values begin with 1; index 0 is not used."""
POLL_S = 0.0002
"""Seconds for which the answer RETRY to one chunk of a request holds for its other chunks: vLLM asks for all chunks of
a prompt in one go."""
_RETRY = LookupResult.RETRY
_GROUP = slice(-GROUP_BYTES, None)


class TokenLakeOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """The pool as a backend of vLLM's OffloadingConnector. vLLM makes one for its scheduler and one for each rank."""

    def __init__(self, config: Any) -> None:
        """Raises `ConfigurationError` for an unknown or invalid setting."""
        super().__init__(config)
        given = {name: value for name, value in config.extra_config.items() if name not in VLLM_SETTINGS}
        self.settings = read_settings(given, os.environ)
        self.counters = EngineCounters()
        self.reports = Reports(logger, self.counters, prefix="TokenLake: ")
        self.replicated_layout = config.replicated_layout
        # The tokens that a request generates are stored too: they are the prompt of the conversation's next turn.
        self.offload_prompt_only = bool(config.extra_config.get("offload_prompt_only", False))
        if not {"block_size", "blocks_per_chunk"} & set(config.extra_config):
            self.blocks_per_chunk = blocks_per_chunk(self.tokens_per_block, self.settings.segment_tokens)
        self.manager: PoolManager | None = None
        self.worker: PoolWorker | None = None
        extend()

    def get_manager(self) -> PoolManager:
        """vLLM's hook in its scheduler."""
        if self.manager is None:
            groups = zip(self.config.groups, self.tokens_per_block, strict=True)
            chunks = {group.group_id: tokens * self.blocks_per_chunk for group, tokens in groups}
            self.manager = PoolManager(self, chunks)
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> PoolWorker:
        """vLLM's hook on a rank, with the cache of the rank's layers."""
        groups = [
            [PageTable(_bytes_of(kv_caches.tensors[ref.tensor_idx].tensor), ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        parallel = self.config.parallel
        place = RankPlace(
            shard=0 if self.replicated_layout else parallel.rank,
            group_ids=tuple(group.group_id for group in self.config.groups),
            group_tokens=self.tokens_per_block,
            chunk_blocks=self.blocks_per_chunk,
        )
        pages: Pages | None = None
        try:
            pages = _pages(groups, self.blocks_per_chunk)
        except LayoutRefused as error:
            self.refuse(str(error))
            self.decline(str(error))
        watch_loads()
        loaded = LoadedAdapters(self.warn_of_adapter)
        worker = ChunkWorker(pages, place, self.settings, self._join, self.counters, self.reports.failure, loaded)
        self.worker = PoolWorker(worker, parallel.rank, chunk_bytes(groups, self.blocks_per_chunk), groups)
        return self.worker

    def refuse(self, reason: str) -> None:
        """Log why the pool does not serve the engine."""
        self.reports.warn(f"served without the pool: {reason}")

    def decline(self, reason: str) -> Connection:
        """Tell the daemon why the pool does not serve the engine (`declined`)."""
        return declined(self.settings.socket, self.settings.daemon_uid, reason)

    def warn_of_adapter(self, line: str) -> None:
        """Log a line about a LoRA adapter."""
        self.reports.warn(line, kind="adapters")

    def connect(self, layout: OpaqueLayout) -> Pool:
        """A connection of the manager. Raises the errors of `Pool.connect`."""
        return Pool.connect(
            self.settings.socket or None,
            layout,
            self.settings.credential,
            verify=self.settings.verify,
            daemon_uid=self.settings.daemon_uid,
            deadlines=self.settings.deadlines,
        )

    def _join(self, session: int, layout: bytes) -> Pool:
        # The manager has verified the segments before a rank reads them.
        return Pool.connect(
            self.settings.socket or None,
            OpaqueLayout.decode(layout),
            self.settings.credential,
            session=SessionId(session),
            daemon_uid=self.settings.daemon_uid,
            deadlines=self.settings.deadlines,
        )


def guarded(hook: Hook) -> Hook:
    """A decorator for hooks of `PoolManager` without a result: an error is reported and does not reach vLLM."""

    @functools.wraps(hook)
    def call(self: PoolManager, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.spec.reports.failure(hook.__name__, error)

    return cast(Hook, call)


class PoolManager(OffloadingManager):  # type: ignore[misc]
    """`ChunkManager` as vLLM calls it. No method raises."""

    def __init__(self, spec: TokenLakeOffloadingSpec, chunk_tokens: dict[int, int]) -> None:
        """`chunk_tokens`: the tokens of a chunk, by the number of its cache group."""
        self.spec = spec
        self._reports = spec.reports
        self._chunk_tokens = {group.to_bytes(GROUP_BYTES, "big"): tokens for group, tokens in chunk_tokens.items()}
        self.chunks = ChunkManager(spec.settings, spec.counters, spec.reports.failure, spec.refuse)
        self.opening = Opening(self.chunks, spec.connect, spec.reports.failure, spec.decline)
        self._status = PoolStatus(logger)
        self._adapters: Adapters | None = None
        self._asked: tuple[Any, bytes] = None, b""
        """The request and the chunk of the last lookup that went to the manager."""
        self._unanswered: Any = None
        """The request whose last answer was RETRY."""
        self._ask_at = 0.0
        """The time from which the manager is asked for its chunks again."""

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """vLLM's hook that asks for a chunk: returns whether it can be loaded."""
        if req_context is self._unanswered and time.monotonic() < self._ask_at:
            return _RETRY
        try:
            self._asked = req_context, key
            found = self.chunks.lookup(req_context.req_id, key, self._keys)
        except Exception as error:
            self._reports.failure("looking up segments", error)
            found = Found.MISS
        if found is Found.RETRY:
            self._unanswered, self._ask_at = req_context, time.monotonic() + POLL_S
        else:
            self._unanswered = None
        return RESULTS[found]

    def _keys(self) -> list[bytes]:
        """The keys of all chunks of the request that vLLM asks about. vLLM has no public list of them; without it, only
        the chunk that it asks for is looked up."""
        context, key = self._asked
        positions: dict[bytes, int] = getattr(context, "_offload_key_positions", None) or {}
        tokens = self._chunk_tokens
        return [each for each, end in positions.items() if not end % tokens[each[_GROUP]]] or [key]

    def get_load_source(self, key: bytes, req_context: Any) -> CacheHitSource:
        """vLLM's hook: returns the place of a chunk that is loaded."""
        return CacheHitSource.P2P if self.chunks.remote(req_context.req_id, key) else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """vLLM's hook: the job that loads chunks whose lookups were hits."""
        return self.chunks.prepare_load(req_context.req_id, keys)

    @guarded
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """vLLM's hook for a load that all ranks have ended."""
        self.chunks.complete_load(req_context.req_id)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """vLLM's hook: the job that stores chunks."""
        try:
            # vLLM also offers the last, incomplete chunk of some prompts. Its key names fewer tokens than a chunk has.
            whole = [key for key in keys if not _position(req_context, key) % self._chunk_tokens[key[_GROUP]]]
            planned = self.chunks.prepare_store(req_context.req_id, whole) if whole else None
        except Exception as error:
            self._reports.failure("planning which segments to store", error)
            planned = None
        if planned is None:
            return PrepareStoreOutput([], None, [])
        stored, job = planned
        return PrepareStoreOutput(list(stored), job, [])

    @guarded
    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """vLLM's hook for a job that all ranks have ended."""
        self.chunks.complete_store(keys)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """vLLM's hook for a request that has arrived."""
        hints = None
        try:
            hints = hints_of(req_context.kv_transfer_params)
        except ValueError as error:
            name = req_context.req_id[:100]
            self._reports.warn(f"request {name!r} is served without its hints: {error}", kind="hints")
        except Exception as error:
            self._reports.failure("reading a request's hints", error)
        self.chunks.new_request(req_context.req_id, hints)
        self.opening.requested()
        return RequestOffloadingContext()

    @guarded
    def arrived(self, request: Any) -> None:
        """vLLM's request whose arrival `on_new_request` has reported. Never raises."""
        name, lora = request.request_id, request.lora_request
        self.chunks.with_tokens(name, lambda: int(request.num_tokens))
        reason = unnamed_media(request.mm_features)
        if reason is None and lora is not None and self._adapters is None:
            reason = "requests with LoRA adapters, whose loads this version of vLLM does not show"
        if reason is not None:
            self.chunks.refuse_request(name, reason)
        elif lora is not None and self._adapters is not None:
            self.chunks.with_adapter(name, self._adapters.find(lora))

    def serve_adapters(self, lora_config: Any, dtype: Any) -> None:
        """Serve requests with LoRA adapters, if the ranks can tell which adapters vLLM has loaded."""
        if lora_config is not None and watch_loads():
            self._adapters = Adapters(options_of(lora_config, dtype), self.spec.warn_of_adapter)

    @guarded
    def on_request_finished(self, req_context: Any) -> None:
        """vLLM's hook for a request that has ended."""
        self.chunks.finished(req_context.req_id)

    @guarded
    def on_schedule_end(self, context: Any) -> None:
        """vLLM's hook at the end of each scheduling step."""
        self.chunks.step_ends(context.new_req_ids, context.preempted_req_ids)
        self._status.update(self.opening.pool, silent=self.chunks.silent)

    def reset_cache(self) -> None:
        """vLLM's hook for a reset of the caches, after which the weights may have changed."""
        self.new_epoch(empty=False)

    @guarded
    def new_epoch(self, *, empty: bool) -> None:
        """Begin an epoch of the weights: chunks that were stored before are not loaded any more. `empty`: vLLM's own
        cache is empty."""
        if empty:
            self.chunks.cache_emptied()
        self.chunks.new_weights(self.opening.reset(empty=empty))

    def shutdown(self) -> None:
        """Release all leases, and end the connection."""
        self.chunks.close()
        self.opening.close()
        if self._adapters is not None:
            self._adapters.close()


class PoolWorker(OffloadingWorker):  # type: ignore[misc]
    """`ChunkWorker` as vLLM calls it. Each job is a success for vLLM; `take_failed` names those that are not."""

    def __init__(self, chunks: ChunkWorker, rank: int, shard_bytes: int, groups: Sequence[Sequence[PageTable]]) -> None:
        self.chunks = chunks
        self.rank = rank
        self.shard_bytes = shard_bytes
        """The bytes of the largest chunk on this rank."""
        outer = get_current_vllm_config_or_none()
        transfer = outer.kv_transfer_config if outer is not None else None
        self.nested = transfer is None or transfer.kv_connector == "MultiConnector"
        """True: the connector is, or may be, one of several."""
        self.told = False
        """True: the rank has reported on its cache."""
        self.page_bytes = [[table.nbytes for table in group] for group in groups]
        """The bytes of the pages of each cache group's tables."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """vLLM's hook: store chunks."""
        self.chunks.submit_store(job_id, _blocks(src_spec), dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """vLLM's hook: load chunks."""
        self.chunks.submit_load(job_id, src_spec, _blocks(dst_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        """vLLM's hook: the jobs that ended since the last call."""
        return [TransferResult(one.job, True, one.nbytes, one.seconds) for one in self.chunks.take_finished()]

    def take_failed(self) -> set[str]:
        """The requests of the loads among these jobs that failed, since the last call."""
        return self.chunks.take_failed()

    def wait(self, job_ids: set[int]) -> None:
        """vLLM's hook: the blocks of these jobs are about to be used otherwise."""
        self.chunks.wait(job_ids)

    def shutdown(self) -> None:
        """Store the waiting chunks for a limited time, and leave the session."""
        self.chunks.close()


def _blocks(spec: Any) -> BlockRange:
    return BlockRange(spec.block_ids.tolist(), spec.group_sizes, spec.block_indices)


def _position(context: Any, key: bytes) -> int:
    """The number of tokens of the prompt up to the end of a chunk; 0 where vLLM does not state it."""
    return int(context.get_offload_key_position(key) or 0)


def _bytes_of(tensor: Any) -> Any:
    """vLLM's table of pages as [block, bytes]."""
    return tensor.flatten(1) if tensor.dim() > 2 else tensor


def _pages(groups: Sequence[Sequence[PageTable]], chunk_blocks: int) -> Pages:
    devices = {table.pages.device for group in groups for table in group}
    device = next(iter(devices))
    if len(devices) == 1 and device.type == "cpu":
        return HostPages(groups, chunk_blocks)
    if len(devices) == 1 and device.type == "cuda":
        return DevicePages(groups, chunk_blocks, CudaDevice(device))
    raise LayoutRefused(f"the cache is on {', '.join(sorted(map(str, devices)))}; supported: one cpu or cuda device")
