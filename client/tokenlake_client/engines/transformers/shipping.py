"""Mode `ship`: batches whose known prefixes are attended where they lie, on this node or on others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenlake.identity import SegmentKey
from tokenlake_client.engines.base import NOBODY, QueryPool
from tokenlake_client.engines.transformers.attention import QueryShape
from tokenlake_client.engines.transformers.cache import CacheShape, RoomyCache, RoomyLayer, allocate
from tokenlake_client.engines.transformers.counters import Counters
from tokenlake_client.engines.transformers.measured import Measured
from tokenlake_client.engines.transformers.options import EngineOptions
from tokenlake_client.engines.transformers.prefill import PartialLoad, compute, load
from tokenlake_client.engines.transformers.rows import Row
from tokenlake_client.engines.transformers.shipment import Shipment
from tokenlake_client.engines.transformers.shipped import SharedPrefix, ShippedCache, ShippedLayer
from tokenlake_client.engines.transformers.slots import LayerPair
from tokenlake_client.engines.transformers.writer import Writer, task_of
from tokenlake_client.match import MatchOptions

__all__ = ["Shipping", "shipped_cache"]

Report = Callable[[str, BaseException], None]


class Shipping:
    """Begins the shipments of one model."""

    def __init__(
        self,
        model: Any,
        shapes: tuple[CacheShape, QueryShape],
        options: EngineOptions,
        writer: Writer,
        counters: Counters,
        measured: Measured,
        failed: Report,
        pool_failed: Report,
    ) -> None:
        """`failed` and `pool_failed` are told of errors: of the query engine, and of the pool."""
        self._model = model
        self._cache_shape, self._query_shape = shapes
        self._options = options
        self._writer = writer
        self._counters = counters
        self._measured = measured
        self._failed = failed
        self._pool_failed = pool_failed

    def begin(self, pool: QueryPool, rows: Sequence[Row]) -> Shipment | None:
        """Open a view of what the pool has of each row (at least the last token stays to compute), and set the row's
        `shared`. Rows that begin with the same segments share one. None where no row has one."""
        started = time.perf_counter()
        shipment = Shipment(
            self._model,
            pool,
            self._query_shape,
            self._counters,
            self._measured,
            self._options.query_deadline,
            lambda prefix: self._recover(pool, prefix),
            self._failed,
        )
        opened: dict[tuple[SegmentKey, ...], SharedPrefix] = {}
        for row in rows:
            if not self._open(pool, row, opened):
                break
        for prefix in dict.fromkeys(opened.values()):
            shipment.add(prefix)
        self._counters.add(pool_seconds=time.perf_counter() - started)
        return shipment if opened else None

    def _open(
        self,
        pool: QueryPool,
        row: Row,
        opened: dict[tuple[SegmentKey, ...], SharedPrefix],
    ) -> bool:
        """False where something failed: further rows would only cost time. `opened`: by what was found, and by what was
        wanted."""
        size = pool.layout.segment_tokens
        wanted = tuple(row.wanted(size))
        if not wanted or wanted in opened:
            # Matched again it might be found shorter: the open view takes part of what the session may lease.
            row.shared = opened.get(wanted)
            return True
        try:
            row.give_back()
            lease = pool.match(wanted, MatchOptions(request=row.name, hints=row.hints, prompt_tokens=len(row.tokens)))
        except Exception as error:
            self._pool_failed("reading segments", error)
            return False
        found, row.found = wanted[: lease.hits], lease.hits
        if not found or found in opened:
            lease.release()
            row.shared = opened.get(found)
            return True
        began = time.perf_counter()
        try:
            view = pool.open_view(lease, self._query_shape.heads, self._query_shape.scale)
        except Exception as error:
            lease.release()
            self._failed("attending where the cache lies", error)
            return False
        if not view.hits:
            view.close()
            return True
        elsewhere = [node for node in view.nodes[: view.hits] if node != pool.node]
        self._measured.opened(elsewhere, time.perf_counter() - began)
        row.shared = opened[found] = opened[wanted] = SharedPrefix(
            row.tokens[: view.hits * size], found[: view.hits], view, elsewhere=elsewhere
        )
        return True

    def _recover(self, pool: QueryPool, prefix: SharedPrefix) -> None:
        """Bring a prefix here: what the pool still has, then what the model computes. Raises what the model raises."""
        if prefix.view is not None:
            prefix.view.close()
            prefix.view = None
        size = pool.layout.segment_tokens
        storage = allocate(self._cache_shape, 1, len(prefix.tokens))
        layers = [(keys[0], values[0]) for keys, values in storage]
        try:
            found = len(prefix.keys)
            prefix.loaded = load(pool, prefix.keys, layers, self._options.window, self._measured, NOBODY, found)
        except PartialLoad as error:
            prefix.loaded = error.tokens
            self._pool_failed("reading segments", error.__cause__ or error)
        cache = RoomyCache([RoomyLayer(keys, values, prefix.loaded) for keys, values in storage])
        compute(self._model, prefix.tokens, cache, self._options.prefill_chunk, self._measured)
        prefix.local = storage
        first = prefix.loaded // size
        if first < len(prefix.keys):
            self._writer.submit(task_of(pool, pool.layout, prefix.keys[first:], first, layers))


def shipped_cache(rows: Sequence[Row], storage: Sequence[LayerPair], before: int, length: int) -> ShippedCache:
    """The cache of `rows`, of whose padded tokens `storage` holds those from `before` on; up to `length` they are
    valid."""
    shared: dict[int, tuple[SharedPrefix, list[int]]] = {}
    for index, row in enumerate(rows):
        if row.shared is not None:
            shared.setdefault(id(row.shared), (row.shared, []))[1].append(index)
    layers = [ShippedLayer(keys, values, length - before, before) for keys, values in storage]
    return ShippedCache(layers, list(shared.values()), [row.padding + row.start for row in rows])
