"""`TokenLakeOffloadingSpec`, a backend of vLLM's OffloadingConnector: adapts manager and worker to vLLM's classes. Only
for `OpaqueLayoutConnector`, which tells vLLM of failed loads."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

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
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.vllm.copies import copy_for
from tokenlake_client.engines.vllm.offloading.chunks import GROUP_BYTES, blocks_per_chunk
from tokenlake_client.engines.vllm.offloading.lookup import Found
from tokenlake_client.engines.vllm.offloading.manager import ChunkManager
from tokenlake_client.engines.vllm.offloading.opening import Opening
from tokenlake_client.engines.vllm.offloading.pages import PageCache, PageTable
from tokenlake_client.engines.vllm.offloading.worker import BlockRange, ChunkWorker, RankPlace
from tokenlake_client.engines.vllm.served_request import traceparent_of
from tokenlake_client.engines.vllm.side import Side
from tokenlake_client.pool import Pool

Hook = TypeVar("Hook", bound=Callable[..., Any])

CHUNK_SETTING = "blocks_per_chunk"
"""The key of `kv_connector_extra_config` with the number of blocks of a chunk, where `segment_tokens` does not tell."""
VLLM_SETTINGS = ("spec_name", "spec_module_path", CHUNK_SETTING)
"""Keys of `kv_connector_extra_config` for vLLM's OffloadingConnector, by the first two of which it finds this class."""
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
        self.side = Side({name: value for name, value in config.extra_config.items() if name not in VLLM_SETTINGS})
        self.settings, self.replicated_layout = self.side.settings, config.replicated_layout
        # The tokens that a request generates are stored too: they are the prompt of the conversation's next turn.
        self.offload_prompt_only = False
        if CHUNK_SETTING not in config.extra_config:
            self.blocks_per_chunk = blocks_per_chunk(self.tokens_per_block, self.settings.segment_tokens)
        self.manager: PoolManager | None = None
        self.worker: PoolWorker | None = None

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
        side, cache, copy = self.side, PageCache(groups, self.blocks_per_chunk), None
        try:
            copy = copy_for(cache, cache.devices)
        except LayoutRefused as error:
            side.refuse(str(error))
            side.settings.decline(str(error))
        loaded = side.loaded_adapters()
        worker = ChunkWorker(copy, place, self.settings, self._join, side.counters, side.reports.failure, loaded)
        self.worker = PoolWorker(worker, parallel.rank, cache)
        return self.worker

    def _join(self, session: int, layout: bytes) -> Pool:
        # The manager has verified the segments before a rank reads them.
        return self.settings.connect(OpaqueLayout.decode(layout), session, verify=False)


def guarded(hook: Hook) -> Hook:
    """A decorator for hooks of `PoolManager` without a result: an error is reported and does not reach vLLM."""

    @functools.wraps(hook)
    def call(self: PoolManager, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            self.spec.side.reports.failure(hook.__name__, error)

    return cast(Hook, call)


class PoolManager(OffloadingManager):  # type: ignore[misc]
    """`ChunkManager` as vLLM calls it. No method raises."""

    def __init__(self, spec: TokenLakeOffloadingSpec, chunk_tokens: dict[int, int]) -> None:
        """`chunk_tokens`: the tokens of a chunk, by the number of its cache group."""
        self.spec, self._side = spec, spec.side
        side, self._reports = spec.side, spec.side.reports
        self._chunk_tokens = {group.to_bytes(GROUP_BYTES, "big"): tokens for group, tokens in chunk_tokens.items()}
        self.chunks = ChunkManager(side.settings, side.counters, side.reports.failure, side.refuse)
        self.opening = Opening(self.chunks, side.settings.connect, side.reports.failure, side.settings.decline)
        self._asked: tuple[Any, bytes] = None, b""
        """The request and the chunk of the last lookup that went to the manager."""
        self._unanswered: Any = None
        """The request whose last answer was RETRY."""
        self._ask_at = 0.0
        """The time from which the manager is asked for its chunks again."""

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """vLLM's hook that asks for a chunk: returns whether it can be loaded."""
        try:
            if self._is_tail(req_context, key):
                return RESULTS[self.chunks.lookup_tail(req_context.req_id, key)]
            if req_context is self._unanswered and time.monotonic() < self._ask_at:
                return _RETRY
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
        """The keys of all whole chunks of the request that vLLM asks about; without vLLM's list of them, only the chunk
        that it asks for is looked up."""
        context, key = self._asked
        return list(self._whole_chunks(context)) or [key]

    def _whole_chunks(self, context: Any) -> dict[bytes, int]:
        """The keys of the whole chunks of a request, with the number of its tokens up to the end of each. vLLM has no
        public list of them."""
        positions: dict[bytes, int] = getattr(context, "_offload_key_positions", None) or {}
        tokens = self._chunk_tokens
        return {key: end for key, end in positions.items() if not end % tokens[key[_GROUP]]}

    def _is_tail(self, context: Any, key: bytes) -> bool:
        """True if a chunk ends within its block. Its key is vLLM's hash of the tokens of the prompt up to there, which
        is not the hash up to the end of any block, so that it never names a whole chunk."""
        return bool(_position(context, key) % self._chunk_tokens[key[_GROUP]])

    def tails_wait(self, name: str) -> bool:
        """See `ChunkManager.tails_wait`. Never raises."""
        try:
            return self.chunks.tails_wait(name)
        except Exception as error:
            self._reports.failure("looking up segments", error)
            return False

    def shared_tokens(self, name: str) -> int:
        """The number of tokens of a request, from the first on, whose chunks of the counted group the pool has. For the
        request whose chunks were asked for last; 0 for others."""
        context, _ = self._asked
        if context is None or context.req_id != name:
            return 0
        group = self.chunks.counted_group.to_bytes(GROUP_BYTES, "big")
        ends = sorted((end, key) for key, end in self._whole_chunks(context).items() if key[_GROUP] == group)
        return self.chunks.leading(name, [key for _, key in ends]) * self._chunk_tokens[group]

    def get_load_source(self, key: bytes, req_context: Any) -> CacheHitSource:
        """vLLM's hook: returns the place of a chunk that is loaded."""
        return CacheHitSource.P2P if self.chunks.remote(req_context.req_id, key) else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """vLLM's hook: the job that loads chunks whose lookups were hits."""
        return self.chunks.prepare_load(req_context.req_id, keys)

    @guarded
    def takes(self, name: str, cached: int) -> None:
        """Record that vLLM's own cache has the first `cached` tokens of a request, which may load no more."""
        self.chunks.takes(name, cached, cached)

    @guarded
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """vLLM's hook for a load that all ranks have ended."""
        self.chunks.complete_load(req_context.req_id)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """vLLM's hook: the job that stores chunks."""
        try:
            planned = self.chunks.prepare_store(req_context.req_id, list(keys)) if keys else None
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
        """vLLM's hook for a request that has arrived; `arrived` follows."""
        return RequestOffloadingContext()

    @guarded
    def arrived(self, request: Any) -> None:
        """Serve a request, unless the pool cannot. Never raises."""
        self.opening.requested()
        admitted = self._side.admit(request)
        if admitted is None:
            return
        acts, adapter = admitted
        # The keys of chunks follow from hashes of vLLM's, which a router does not name.
        for bring in acts.brings:
            self._side.brought(bring, False)
        tokens, traceparent = lambda: int(request.num_tokens), traceparent_of(request)
        self.chunks.new_request(request.request_id, acts.hints, tokens, adapter, traceparent)

    @guarded
    def on_request_finished(self, req_context: Any) -> None:
        """vLLM's hook for a request that has ended."""
        self.chunks.finished(req_context.req_id)

    @guarded
    def on_schedule_end(self, context: Any) -> None:
        """vLLM's hook at the end of each scheduling step."""
        self.chunks.step_ends(context.new_req_ids, context.preempted_req_ids)
        self._side.status.update(self.opening.pool, silent=self.chunks.silent)

    def shutdown(self) -> None:
        """Release all leases, and end the connection."""
        self.chunks.close()
        self.opening.close()
        self._side.close()


class PoolWorker(OffloadingWorker):  # type: ignore[misc]
    """`ChunkWorker` as vLLM calls it. Each job is a success for vLLM; `take_failed` names those that are not."""

    def __init__(self, chunks: ChunkWorker, rank: int, cache: PageCache) -> None:
        self.chunks = chunks
        self.rank = rank
        self.cache = cache

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """vLLM's hook: store chunks."""
        self.chunks.submit_store(job_id, _blocks(src_spec), dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """vLLM's hook: load chunks. False, at which vLLM ends, for an expedited load: the step that waits for it would
        compute on its blocks also where it failed. vLLM makes such loads with its setting `sync_load_budget_bytes`
        alone, which is not one of the client's settings, so that an engine with it does not start."""
        if expedited:
            return False
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
