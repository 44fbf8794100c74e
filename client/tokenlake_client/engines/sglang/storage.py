"""`TokenLakeStorage`, a storage backend of SGLang's HiCache: adapts the pages of each cache pool to SGLang's classes.

SGLang makes one backend in each scheduler's process, which is a rank, and calls it in three threads of its own: one
looks up, one loads, one stores. The scheduler's thread makes it, registers the host pools, and reads the counts::

    __init__, register_*          the settings are checked; the digest of the weights and the connection are made in the
                                  background, and lookups are misses until then
    batch_exists, batch_exists_v2 the prefix that the pool has; its pages stay leased until they are read (`leases`)
    batch_get_v1, batch_get_v2    copies from the arena into SGLang's host memory
    batch_set_v1, batch_set_v2    copies from SGLang's host memory into the arena
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from tokenlake.errors import LayoutRefused
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.common.page_counts import PageCounters, PageCounts
from tokenlake_client.engines.common.pages import PageKind, PageStore, Parts
from tokenlake_client.engines.common.reports import Reports
from tokenlake_client.engines.common.status import PoolStatus
from tokenlake_client.engines.sglang.epoch import Weights, watch
from tokenlake_client.engines.sglang.hits import SidePool, needed, restorable
from tokenlake_client.engines.sglang.identity import (
    KV,
    EngineFacts,
    PoolFacts,
    engine_facts,
    group_of,
    layout_of,
    pool_facts,
    weights_digest_of,
)
from tokenlake_client.engines.sglang.metrics import StorageSeries
from tokenlake_client.engines.sglang.settings import read_settings
from tokenlake_client.pool import Pool

logger = logging.getLogger("sglang.tokenlake")


class _Side:
    """One of SGLang's host pools, and its pages in the pool."""

    def __init__(self, host_pool: Any, facts: PoolFacts, pages: PageStore) -> None:
        self.host_pool = host_pool
        self.facts = facts
        self.pages = pages

    def places(self, host_indices: Any, pages: int) -> list[Parts]:
        """The parts of `pages` pages in SGLang's host memory. Raises `ValueError` where SGLang gives other sizes than
        at the start."""
        if host_indices is None or len(host_indices) != pages * self.facts.page_tokens:
            given = 0 if host_indices is None else len(host_indices)
            raise ValueError(f"{given} host indices for {pages} pages of {self.facts.page_tokens} tokens")
        addresses, sizes = self.host_pool.get_page_buffer_meta(host_indices)
        parts = len(self.facts.part_bytes)
        if list(sizes) != [*self.facts.part_bytes] * pages or len(addresses) != len(sizes):
            raise ValueError(f"the parts of {pages} pages have other sizes than at the start")
        pairs = list(zip(addresses, sizes, strict=True))
        return [pairs[at : at + parts] for at in range(0, len(pairs), parts)]


class TokenLakeStorage(HiCacheStorage):  # type: ignore[misc]
    """The pool as a storage backend of HiCache. No method raises after the start; without the pool, lookups are misses
    and pages are not stored."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        """SGLang's arguments of a dynamic backend. Raises `ConfigurationError` for an unknown or invalid setting."""
        self.config = storage_config
        self.settings = read_settings(storage_config.extra_config or {}, os.environ)
        self.counters = PageCounters()
        self._reports = Reports(logger, self.counters, prefix="TokenLake: ")
        self._status = PoolStatus(logger)
        self._sides: dict[str, _Side] = {}
        self._declined: Connection | None = None
        self._refusal = ""
        self._identifying = threading.Lock()
        self._identity: tuple[EngineFacts, str] | None = None
        self._weights = Weights(self._drop_leases)
        self._logical = False
        """True: SGLang's pool of keys and values has no memory; the other pools hold all bytes."""
        self._series: StorageSeries | None = None
        if not watch(self._weights):
            self._refuse("this SGLang does not show when weights change in place")
        if storage_config.enable_storage_metrics:
            names = ("tp_rank", "pp_rank", "dp_rank")
            labels = {"model_name": storage_config.model_name} | {name: getattr(storage_config, name) for name in names}
            try:
                self._series = StorageSeries(self.counters, labels)
            except Exception as error:
                self._reports.failure("making metrics", error)

    @property
    def counts(self) -> PageCounts:
        """A copy of the counts of this rank."""
        return self.counters.read()

    # -- the start

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's hook: the host pool of keys and values. Raises `ConfigurationError` for pages that are too small."""
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is None:
            self._logical = True
            return
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """SGLang's hook: a host pool, among them again that of keys and values."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        if self._refusal:
            return
        try:
            first = torch.arange(int(host_pool.page_size), dtype=torch.int64)
            _, sizes = host_pool.get_page_buffer_meta(first)
            part_bytes = [int(size) for size in sizes]
        except Exception as error:
            self._refuse(f"SGLang gives no places of pages in its host pool {name!r}: {type(error).__name__}: {error}")
            return
        facts = pool_facts(name, host_pool, self.config, part_bytes=part_bytes)
        # The digest of the weights is made by the thread that connects: it may read all files of the model.
        connection = Connection(lambda: self._connect(facts), self._failed, at_once=False, wait_s=0.0)
        counted = name == KV and not (self.config.tp_rank or self.config.pp_rank or self.config.attn_cp_rank)
        kind = PageKind(group_of(name), facts.page_tokens if counted else 0)
        pages = PageStore(kind, connection, self._weights.digest, self.settings, self.counters, self._reports.failure)
        self._sides[name] = _Side(host_pool, facts, pages)
        connection.get()

    def _connect(self, facts: PoolFacts) -> Pool:
        return self.settings.connect(self._layout(facts))

    def _layout(self, facts: PoolFacts) -> OpaqueLayout:
        try:
            with self._identifying:
                if self._identity is None:
                    engine = engine_facts()
                    self._identity = engine, weights_digest_of(engine, self.settings)
                    self._weights.starts_as(self._identity[1])
                engine, digest = self._identity
            return layout_of(engine, facts, digest, self.settings)
        except LayoutRefused as error:
            self._refuse(str(error))
            raise

    def _failed(self, operation: str, error: BaseException) -> None:
        # The reason why the pool does not serve the engine is logged by `_refuse`.
        if not (self._refusal and isinstance(error, LayoutRefused)):
            self._reports.failure(operation, error)

    def _refuse(self, reason: str) -> None:
        """Do not use the pool, log the reason, and tell the daemon."""
        if not self._refusal:
            self._refusal = reason
            self._reports.warn(f"served without the pool: {reason}")
            self._declined = self.settings.decline(reason)

    # -- looking up

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """SGLang's hook: the number of pages, from the first on, that the pool has. They stay leased."""
        try:
            side = self._side(KV)
            if side is None:
                return len(keys) if self._logical and not self._refusal else 0
            found = side.pages.find(keys)
            # Of SGLang's three threads only this one logs the state.
            self._status.update(side.pages.connection.pool, silent=False)
            return found
        except Exception as error:
            self._reports.failure("batch_exists", error)
            return 0

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """SGLang's hook for models with several cache pools: the prefixes that all pools can restore."""
        try:
            return self._find_all(keys, pool_transfers or [])
        except Exception as error:
            self._reports.failure("batch_exists_v2", error)
            self._drop_leases()
            return PoolTransferResult.empty()

    def _find_all(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        pages = self.batch_exists(keys)
        looked_up = []
        for transfer in transfers:
            policy = transfer.hit_policy
            if policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                # A second form of the same pages, which does not bound the prefix. Without a verdict SGLang asks later.
                continue
            name, prefix = str(transfer.name), keys[:pages]
            side = self._side(name)
            found, lease = side.pages.find_each(prefix) if side else ([False] * pages, None)
            window = max(1, len(transfer.keys or ())) if policy == PoolHitPolicy.TRAILING_PAGES else 0
            looked_up.append((side, SidePool(name, found, window), lease))
        lengths, longest = restorable(pages, [each for _, each, _ in looked_up])
        length = lengths[-1] if lengths else 0
        for side, each, lease in looked_up:
            if side is not None and lease is not None:
                side.pages.keep(keys[:pages], each.found, lease, needed(each, length))
        hits = {KV: pages} if pages else {}
        return PoolTransferResult(length, hits | longest, lengths)

    # -- loading and storing

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """SGLang's hook: load pages of keys and values into its host memory."""
        return self._guarded("batch_get_v1", KV, keys, host_indices, PageStore.load)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """SGLang's hook: store pages of keys and values from its host memory."""
        first = len(getattr(extra_info, "prefix_keys", None) or ())
        return self._guarded("batch_set_v1", KV, keys, host_indices, functools.partial(PageStore.save, first=first))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """SGLang's hook: load pages of several cache pools into its host memory."""
        return {
            each.name: self._guarded("batch_get_v2", str(each.name), each.keys or [], each.host_indices, PageStore.load)
            for each in transfers
        }

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """SGLang's hook: store pages of several cache pools from its host memory."""
        return {
            each.name: self._guarded("batch_set_v2", str(each.name), each.keys or [], each.host_indices, PageStore.save)
            for each in transfers
        }

    def _guarded(
        self,
        hook: str,
        name: str,
        keys: list[str],
        host_indices: Any,
        operation: Callable[[PageStore, Sequence[str], Sequence[Parts]], list[bool]],
    ) -> list[bool]:
        try:
            if self._logical and name == KV:
                return [True] * len(keys)
            side = self._side(name)
            if side is None or not keys:
                return [False] * len(keys)
            return operation(side.pages, keys, side.places(host_indices, len(keys)))
        except Exception as error:
            self._reports.failure(hook, error)
            return [False] * len(keys)

    def _side(self, name: str) -> _Side | None:
        """The host pool of that name; None: there is none, or the pool does not serve the engine."""
        if self._refusal:
            if self._declined is not None:
                self._declined.get()
            return None
        return self._sides.get(name)

    def _drop_leases(self) -> None:
        for side in list(self._sides.values()):
            side.pages.leases.clear()

    # -- the rest of SGLang's interface

    def get_stats(self) -> Any:
        """SGLang's hook after a step, where it collects metrics: adds the growth of the counts to its metrics page."""
        try:
            if self._series is not None:
                self._series.publish()
        except Exception as error:
            self._reports.failure("get_stats", error)
        return None

    def clear(self) -> None:
        """SGLang's hook that empties the storage. The pool belongs to all engines, and keeps its pages: an operator
        removes them with `tokenlake evict`."""
        self._reports.warn("the pool is shared: SGLang's request to clear the storage has no effect")

    def close(self) -> None:
        """Release all leases, and leave the session. Idempotent."""
        for side in list(self._sides.values()):
            try:
                side.pages.close()
            except Exception as error:
                self._reports.failure("closing the pool", error)
        if self._declined is not None:
            self._declined.close()

    # SGLang does not call these with `interface_v1`; its base class demands them.

    def exists(self, key: str) -> bool:
        """Whether the pool has a page."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Not used with `interface_v1`: a miss."""
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Not used with `interface_v1`: misses."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not used with `interface_v1`: nothing is stored."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not used with `interface_v1`: nothing is stored."""
        return False
