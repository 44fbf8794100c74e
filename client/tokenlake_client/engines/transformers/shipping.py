"""Mode `ship`: the queries of a batch go to the nodes of its known prefixes.

In each layer the queries are sent first. Attention over the batch's own tokens is computed meanwhile, and both results
are merged.

When the result for a prefix is LOST, the forward pass is *void*: the exception `Void` ends it, the cache is cut to its
length before the pass, and each lost prefix is brought to this engine (the segments that the pool still has are
fetched, the others computed). Then the forward pass is called again with the same arguments. The caller, for example
`generate`, sees one pass that took longer: in between it samples no token and calls no streamer.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from tokenlake.identity import SegmentKey
from tokenlake_client.engines.common.request import UNNAMED
from tokenlake_client.engines.common.span import EngineSpan, engine_span
from tokenlake_client.engines.transformers.attention import QueryShape, attending
from tokenlake_client.engines.transformers.cache import CacheShape, RoomyCache, RoomyLayer, allocate
from tokenlake_client.engines.transformers.partial_attention import Part, attend, attend_own, merge_rows
from tokenlake_client.engines.transformers.parts import Parts
from tokenlake_client.engines.transformers.prefill import PartialLoad, compute, load
from tokenlake_client.engines.transformers.rows import Row
from tokenlake_client.engines.transformers.shipped_cache import SharedPrefix, ShippedCache
from tokenlake_client.engines.transformers.writer import task_of
from tokenlake_client.pool import Pool

T = TypeVar("T")

PAIRS = 1 << 22
"""The number of pairs of a query token and a prefix token (4 Mi) for which one layer's queries get `deadline_s`
seconds; each started 4 Mi pairs add that time to the deadline."""


class Void(Exception):
    """The forward pass is void, because the results for `prefixes` are lost."""

    def __init__(self, prefixes: Sequence[SharedPrefix]) -> None:
        super().__init__(f"{len(prefixes)} prefixes are lost")
        self.prefixes = prefixes


@dataclass(slots=True)
class _Sent:
    """The queries of one layer that were sent to query engines: the prefixes they attend to, and for each prefix the
    rows (prompts) of the batch that have it."""

    prefixes: list[tuple[SharedPrefix, list[int]]]
    ticket: Any
    nbytes: int = 0
    """The bytes of these queries and their results that crossed the network."""


class Shipment:
    """Runs the forward passes of one batch whose known prefixes stay on their nodes. Owns the views of the prefixes
    until `close`. For one thread."""

    def __init__(self, parts: Parts, pool: Pool, recover: Callable[[SharedPrefix], None]) -> None:
        """`recover` must close the view of a prefix and set its `local`; it raises only errors of the model."""
        self._engine = parts
        self._pool = pool
        self._recover = recover
        self._prefixes: list[SharedPrefix] = []
        self._cache: ShippedCache | None = None
        self._buffer: Any = None
        self._parts: list[tuple[Any, int]] = []
        self._span = contextlib.ExitStack()
        self._queries: EngineSpan | None = None
        self._sent: Counter[str] = Counter()

    def trace(self, traceparent: str | None) -> None:
        """Make one span of all queries of the shipment, from now until `close`. `traceparent`: the span above it."""
        if traceparent is not None:
            self._queries = self._span.enter_context(engine_span("tokenlake.query", traceparent))

    def add(self, prefix: SharedPrefix) -> None:
        """Take ownership of the view of `prefix`."""
        self._prefixes.append(prefix)

    def run(self, cache: ShippedCache, forward: Callable[[], T]) -> T:
        """Call `forward`, a forward pass of the model with `cache`, until it is not void. Raises the errors of the
        model."""
        length = cache.get_seq_length()
        while True:
            self._cache = cache
            try:
                with attending(self._engine.model, self):
                    return forward()
            except Void as void:
                lost = void.prefixes
            finally:
                self._cache = None
            cache.shorten(length)
            self._engine.counters.add(steps_void=1)
            self._drop_buffer()
            for prefix in lost:
                self._recover(prefix)

    @contextlib.contextmanager
    def serving(self, cache: ShippedCache) -> Iterator[None]:
        """A context in which all forward passes of the model with `cache` go through `run`, which repeats a pass whose
        results were lost."""
        own = self._engine.model.__dict__.get("forward")
        forward = self._engine.model.forward

        @wraps(forward)
        def shipped(*args: Any, **arguments: Any) -> Any:
            if arguments.get("past_key_values") is not cache:
                return forward(*args, **arguments)
            return self.run(cache, lambda: forward(*args, **arguments))

        self._engine.model.forward = shipped
        try:
            yield
        finally:
            if own is None:
                del self._engine.model.forward
            else:
                self._engine.model.forward = own

    def close(self) -> None:
        """Close the views and release the query memory. Never raises."""
        self._drop_buffer()
        for prefix in self._prefixes:
            self._close_view(prefix)
        if self._queries is not None:
            self._queries.note({"prefixes": len(self._prefixes), **self._sent})
        self._span.close()

    def _close_view(self, prefix: SharedPrefix) -> None:
        view, prefix.view = prefix.view, None
        try:
            if view is not None:
                view.close()
        except Exception as error:
            self._engine.failed("closing a view", error)

    def attend(self, module: Any, query: Any, keys: Any, values: Any, scale: float, others: dict[str, Any]) -> Any:
        """Attention over the rows' prefixes and over the batch's own tokens, merged (see `Attending`). Raises
        `Void`."""
        assert self._cache is not None
        began = time.perf_counter()
        sent = self._send(self._cache, module.layer_idx, query)
        mask = self._cache.mask(query.shape[2], keys.shape[2], query.device)
        own = time.perf_counter()
        whole = attend_own(query, keys, values, scale, mask)
        began += time.perf_counter() - own
        for prefix, rows in self._cache.prefixes:
            if prefix.local is not None:
                whole = merge_rows(whole, rows, _over_local(query[rows], prefix.local[module.layer_idx], scale))
        if sent is not None:
            for rows, part in self._receive(sent, query):
                whole = merge_rows(whole, rows, part)
            self._measure(sent, query.shape[2], time.perf_counter() - began)
        return whole.out

    def _send(self, cache: ShippedCache, layer: int, query: Any) -> _Sent | None:
        """Send the layer's queries of all prompts whose prefix has a view to the query engine. Returns None if there is
        none. Raises `Void` after an error, because their results are missing then."""
        shipped = [(prefix, rows) for prefix, rows in cache.prefixes if prefix.view is not None]
        if not shipped:
            return None
        try:
            count = query.shape[2]
            self._prepare([(prefix.view, len(rows) * count) for prefix, rows in shipped])
            target = _tensor(self._buffer.queries, query.dtype)
            at = 0
            for _, rows in shipped:
                shape = (len(rows), count, *target.shape[1:])
                part = target[at : at + len(rows) * count].view(shape)
                part.copy_((query if rows == list(range(len(query))) else query[rows]).transpose(1, 2))
                at += len(rows) * count
            pairs = sum(count * len(rows) * len(prefix.tokens) for prefix, rows in shipped)
            deadline_s = self._engine.options.query_deadline * (1 + pairs // PAIRS)
            return _Sent(shipped, self._pool.queries.query(self._buffer, layer, deadline_s=deadline_s))
        except Exception as error:
            self._engine.failed("sending queries to a prefix", error)
            raise Void([prefix for prefix, _ in shipped]) from error

    def _receive(self, sent: _Sent, query: Any) -> Iterator[tuple[list[int], Part]]:
        """Wait for the answer, and yield for each prefix its rows and their attention over it. Raises `Void` before the
        first item, and not later."""
        answer = sent.ticket.wait()
        sent.nbytes = answer.sent_bytes + answer.received_bytes
        if self._queries is not None:
            self._sent.update({"queries": 1, "bytes.sent": answer.sent_bytes, "bytes.received": answer.received_bytes})
        self._engine.counters.add(bytes_sent=answer.sent_bytes, bytes_received=answer.received_bytes)
        if answer.lost:
            raise Void([sent.prefixes[part][0] for part in answer.lost])
        output, sums = torch.from_numpy(answer.output), torch.from_numpy(answer.sums)
        count, at = query.shape[2], 0
        for _, rows in sent.prefixes:
            stop = at + len(rows) * count
            out = output[at:stop].view(len(rows), count, *output.shape[1:]).transpose(1, 2)
            lse = sums[at:stop].view(len(rows), count, -1).transpose(1, 2)
            yield rows, Part(out.to(query.device), lse.to(query.device))
            at = stop

    def _measure(self, sent: _Sent, count: int, seconds: float) -> None:
        """Count the queries that were sent to other nodes, and measure their cost: a layer of `count` tokens per row
        took `seconds` longer than attention over its own tokens."""
        elsewhere = [node for prefix, _ in sent.prefixes for node in prefix.elsewhere]
        # `nbytes` is 0 once the query engine has fetched the segments, because their nodes did not answer.
        if elsewhere and sent.nbytes:
            tokens = count * sum(len(rows) * len(set(prefix.elsewhere)) for prefix, rows in sent.prefixes)
            self._engine.counters.add(queries_sent=tokens)
            queries = count * sum(len(rows) for prefix, rows in sent.prefixes if prefix.elsewhere)
            self._engine.measurements.queried(
                elsewhere, self._pool.layout.segment_tokens, queries, sent.nbytes, seconds
            )

    def _prepare(self, parts: list[tuple[Any, int]]) -> None:
        """Set `_buffer` to a query buffer for `parts`, (view, number of query tokens) each. The buffer of the previous
        layer or step is used again if its parts were the same."""
        if self._buffer is None or parts != self._parts or self._buffer.spent:
            self._drop_buffer()
            self._buffer = self._pool.queries.init_query(parts)
            self._parts = parts

    def _drop_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        try:
            if buffer is not None:
                buffer.close()
        except Exception as error:
            self._engine.failed("closing a query buffer", error)


class Shipping:
    """Opens views of the known prefixes of batches, so that queries are sent to them. Serves one model."""

    def __init__(self, parts: Parts, cache: CacheShape, queries: QueryShape) -> None:
        self._engine = parts
        self._cache_shape, self._query_shape = cache, queries

    def begin(self, pool: Pool, rows: Sequence[Row]) -> Shipment | None:
        """Open a view of the known prefix of each row (at least the last token is left to compute), set the row's
        `shared`, and return the shipment that owns the views. Rows with the same prefix share a view. None if no view
        was opened."""
        started = time.perf_counter()
        shipment = Shipment(self._engine, pool, lambda prefix: self._recover(pool, prefix))
        opened: dict[tuple[SegmentKey, ...], SharedPrefix] = {}
        for row in rows:
            if not self._open(pool, row, opened):
                break
        for prefix in dict.fromkeys(opened.values()):
            shipment.add(prefix)
        if opened:
            shipment.trace(rows[0].traceparent)
        self._engine.counters.add(pool_seconds=time.perf_counter() - started)
        return shipment if opened else None

    def _open(
        self,
        pool: Pool,
        row: Row,
        opened: dict[tuple[SegmentKey, ...], SharedPrefix],
    ) -> bool:
        """Find the prefix of `row`, open a view of it and set the row's `shared`. False after an error: further rows
        would probably fail too. `opened`: the prefixes with a view so far, each under the keys that were matched and
        under the keys that were found. Adds the new prefix to it."""
        size = pool.layout.segment_tokens
        matched = tuple(row.keys_to_use(size))
        if not matched or matched in opened:
            # An earlier row had the same keys: its view is shared. A second match could find fewer segments, because
            # the open view uses a part of the session's limit of leases.
            row.shared = opened.get(matched)
            row.release_lease(counted=row.shared is None)
            return True
        try:
            row.release_lease(counted=False)
            lease = pool.match(matched, row.info.match_options())
        except Exception as error:
            self._engine.pool_failed("reading segments", error)
            return False
        found, row.found = matched[: lease.hits], lease.hits
        if not found or found in opened:
            lease.used(0, lease.hits)
            lease.release()
            row.shared = opened.get(found)
            return True
        began = time.perf_counter()
        try:
            view = pool.queries.open_view(lease, self._query_shape.heads, self._query_shape.scale)
        except Exception as error:
            lease.release()
            self._engine.failed("opening a view of a prefix", error)
            return False
        if not view.hits:
            view.close()
            return True
        elsewhere = [node for node in view.nodes[: view.hits] if node != pool.node]
        self._engine.measurements.opened(elsewhere, time.perf_counter() - began)
        row.shared = opened[found] = opened[matched] = SharedPrefix(
            row.tokens[: view.hits * size], found[: view.hits], view, elsewhere=elsewhere
        )
        return True

    def _recover(self, pool: Pool, prefix: SharedPrefix) -> None:
        """Set `prefix.local`: the segments that the pool still has are fetched, the others computed. Raises the errors
        of the model."""
        if prefix.view is not None:
            prefix.view.close()
            prefix.view = None
        size = pool.layout.segment_tokens
        storage = allocate(self._cache_shape, 1, len(prefix.tokens))
        copy = self._engine.copier.bind(pool.layout, [(keys[0], values[0]) for keys, values in storage])
        try:
            found = len(prefix.keys)
            prefix.loaded = load(
                pool, prefix.keys, copy, self._engine.options.window, self._engine.measurements, UNNAMED, found
            )
        except PartialLoad as error:
            prefix.loaded = error.tokens
            self._engine.pool_failed("reading segments", error.__cause__ or error)
        cache = RoomyCache([RoomyLayer(keys, values, prefix.loaded) for keys, values in storage])
        compute(self._engine, prefix.tokens, cache)
        prefix.local = storage
        first = prefix.loaded // size
        if first < len(prefix.keys):
            self._engine.writer.submit(task_of(pool, pool.layout, prefix.keys[first:], first, copy))


def _over_local(query: Any, pair: tuple[Any, Any], scale: float) -> Part:
    """Attention of several rows (prompts) of the batch over one prefix whose keys and values are in this engine,
    computed as that of one row with the queries of all rows."""
    rows, heads, tokens, dim = query.shape
    folded = query.transpose(0, 1).reshape(1, heads, rows * tokens, dim)
    out, lse = attend(folded, *pair, scale)
    return Part(
        out.view(heads, rows, tokens, -1).transpose(0, 1),
        lse.view(heads, rows, tokens).transpose(0, 1),
    )


def _tensor(array: Any, dtype: Any) -> Any:
    """The memory of a numpy array as a tensor of `dtype`; numpy holds bfloat16 as uint16."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
