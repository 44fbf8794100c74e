"""Serves the query engine of another node: computes attention of its queries over segments in this node's arena. Each
tenant has a connection of its own (`peer_client`)."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial as bind
from typing import NamedTuple

import numpy as np

from tokenlake.attention import Partial, Stored, from_float32, stored_dtype
from tokenlake.errors import LayoutRefused, LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.keys import KEY_BYTES
from tokenlake.layout import Layout
from tokenlake.opaque_layout import decode_layout, understood
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import split_keys
from tokenlake_query.compute_thread import Attention, ComputeThread, Task
from tokenlake_query.connection import Connection
from tokenlake_query.counters import Counters
from tokenlake_query.pace import Pace, TenantPace
from tokenlake_query.query_buffers import QueryBuffers
from tokenlake_query.segments import Pools, Segments, open_local
from tokenlake_query.tenant_limits import TenantLimits
from tokenlake_query.tenant_threads import TenantThreads

log = logging.getLogger(__name__)

MAX_VIEWS = 1 << 16
PART_BYTES = 4 << 10
"""Bytes that are counted for the objects of one part of a request."""
MAX_UNSENT_BYTES = 64 << 20
"""Limit of the bytes of results that wait for the other side to read them. While more wait, no further queries are read
from its connection."""


class _Opening(NamedTuple):
    """A view whose segments are not leased yet."""

    tenant: str
    keys: int
    """The number of segments with which the view is counted in the limits of its tenant."""


class _OpenView(NamedTuple):
    tenant: str
    keys: int
    attention: Attention
    segments: Segments


class PeerServer:
    """This query engine's side of one connection of another node's query engine. The views that were opened over it are
    closed with the connection."""

    def __init__(
        self,
        sock: socket.socket,
        node: str,
        pools: Pools,
        compute: ComputeThread,
        opening: TenantThreads,
        limits: TenantLimits,
        pace: Pace,
        counters: Counters,
        keys: RecordKeys | None = None,
    ) -> None:
        """`sock`: the other query engine's connection, which this object owns from now on. `keys`: the keys of its
        records; None if they are not encrypted. `opening`: threads that may block while they open a view. `limits`,
        `pace`: those of all tenants. The processor time of the connection is counted for the tenant of the view that
        was opened last."""
        self._pools = pools
        self._compute = compute
        self._opening = opening
        self._counters = counters
        self._lock = threading.Lock()
        self._limits = limits
        self._pace = TenantPace(pace, "")
        self._views: dict[int, _Opening | _OpenView] = {}
        """The other node's views by their number."""
        self._buffers = QueryBuffers()
        self._connection = Connection(
            sock,
            f"query engine of {node}",
            pace=self._pace,
            keep=lambda nbytes: limits.add(f"node {node}", frame_bytes=nbytes),
            keys=keys,
        )
        counters.add(connections=1)
        self._connection.serve(self._handle, self._ended)

    def _handle(self, body: bytes) -> None:
        message = decode(wire.ask_decoder, body)
        if isinstance(message, wire.Ask):
            self._ask(message)
        elif isinstance(message, wire.OpenView):
            if len(self._views) >= MAX_VIEWS:
                self._refuse(message.view, LimitReached(f"at most {MAX_VIEWS} views are open for one query engine"))
                return
            if message.view in self._views:
                raise ProtocolRefused(f"view {message.view} is open already")
            keys = len(message.keys) // KEY_BYTES
            self._pace.tenant = message.tenant
            try:
                self._limits.add(message.tenant, views=1, segments=keys)
                with self._lock:
                    self._views[message.view] = _Opening(message.tenant, keys)
                self._opening.submit(message.tenant, bind(self._open, message), len(message.keys))
            except LimitReached as error:
                with self._lock:
                    self._close_view(message.view)
                self._refuse(message.view, error)
        else:
            with self._lock:
                for view in message.views:
                    self._close_view(view)

    # -- views

    def _open(self, message: wire.OpenView) -> None:
        try:
            layout = understood(decode_layout(message.layout))
            attention = Attention.of(layout, message.heads, message.scale)
            keys = split_keys(message.keys)
            if len(set(keys)) < len(keys):
                raise ProtocolRefused("a key is named twice; expected each once")
            segments = open_local(self._pools.get(message.tenant, layout), keys)
        except Exception as error:
            with self._lock:
                self._close_view(message.view)
            self._refuse(message.view, error)
            if isinstance(error, TokenLakeError | ValueError):
                return
            raise
        with self._lock:
            # The peer may have closed the view while this thread leased its segments.
            requested = self._views.get(message.view)
            if requested is not None:
                self._views[message.view] = _OpenView(requested.tenant, requested.keys, attention, segments)
                self._counters.add(views=1)
        hits = len(segments)
        codes = bytes([Code.LOCAL]) * hits + bytes([Code.MISSING]) * (len(keys) - hits)
        self._connection.send(wire.Viewed(message.view, hits, codes))

    def _close_view(self, view: int) -> None:
        """Forget the view with that number and release its segments. The caller holds the lock."""
        closed = self._views.pop(view, None)
        if closed is not None:
            self._limits.add(closed.tenant, views=-1, segments=-closed.keys)
            if isinstance(closed, _OpenView):
                self._counters.add(views=-1)

    def _refuse(self, view: int, error: Exception) -> None:
        kind = type(error).__name__ if isinstance(error, TokenLakeError) else ProtocolRefused.__name__
        self._connection.send(wire.Refused(view, kind, str(error)))

    # -- queries

    def _ask(self, ask: wire.Ask) -> None:
        views = [self._views.get(view) for view, _ in ask.parts]
        opened = [view for view in views if isinstance(view, _OpenView)]
        for view in opened:
            _check_fits(view.attention.layout, ask)
        if len(opened) < len(views) or _too_large(ask, opened):
            # A view of the request was closed while the request was under way, or its results would take too much
            # memory: every part is answered LOST.
            self._connection.reader.skip(ask.nbytes)
            self._connection.send(wire.Result(ask.number, ask.layer, bytes([Code.LOST]) * len(views), 0))
            return
        item = stored_dtype(ask.dtype).itemsize
        sizes = [
            tokens * view.attention.shape.q_heads * view.attention.shape.key_dim * item
            for (_, tokens), view in zip(ask.parts, opened, strict=True)
        ]
        if sum(sizes) != ask.nbytes or not all(sizes) or not sizes:
            raise ProtocolRefused(f"{ask.nbytes} bytes of queries; expected {sum(sizes)}")
        self._connection.wait_unsent(MAX_UNSENT_BYTES)
        counted = len(opened) * PART_BYTES
        buffer = self._buffers.take(ask.nbytes, counted)
        self._connection.reader.into(memoryview(buffer)[: ask.nbytes])
        collector = _ResultCollector(ask, len(opened), bind(self._send, buffer, counted))
        tasks = []
        start = 0
        for index, ((number, tokens), view, size) in enumerate(zip(ask.parts, opened, sizes, strict=True)):
            shape = view.attention.shape
            queries: Stored = np.frombuffer(buffer, stored_dtype(ask.dtype), size // item, start)
            start += size
            tasks.append(
                Task(
                    view.attention,
                    ask.layer,
                    view.segments,
                    queries.reshape(tokens, shape.q_heads, shape.key_dim),
                    bind(self._wanted, number),
                    bind(collector.put, index),
                    self._spent,
                )
            )
        self._compute.submit(tasks, opened[0].tenant)

    def _spent(self, ns: int) -> None:
        self._counters.add(result_ns=ns)

    def _wanted(self, view: int) -> bool:
        return self._connection.open and view in self._views

    def _send(self, buffer: bytearray, counted: int, result: wire.Result, payload: list[memoryview]) -> None:
        self._counters.add(results=1, result_bytes=result.nbytes)
        self._connection.send(result, payload)
        self._buffers.give_back(buffer, counted)

    def _ended(self) -> None:
        with self._lock:
            for view in list(self._views):
                self._close_view(view)
        self._counters.add(connections=-1)


class _ResultCollector:
    """Collects the attention for the parts of one request (`Ask`) of another node, and sends all together. Called in
    the computing thread alone."""

    def __init__(self, ask: wire.Ask, parts: int, send: Callable[[wire.Result, list[memoryview]], None]) -> None:
        self._ask = ask
        self._send = send
        self._remaining = parts
        self._partials: list[Partial | None] = [None] * parts

    def put(self, index: int, partial: Partial | None) -> None:
        """Record the attention for part `index` of the request; None: the part is LOST. Called once per part."""
        self._partials[index] = partial
        self._remaining -= 1
        if self._remaining:
            return
        codes = bytes(Code.LOST if partial is None else Code.LOCAL for partial in self._partials)
        computed = [partial for partial in self._partials if partial is not None]
        outputs = [from_float32(partial.out, self._ask.dtype) for partial in computed]
        payload = [_bytes_of(array) for array in [*outputs, *(partial.lse for partial in computed)]]
        nbytes = sum(map(len, payload))
        self._send(wire.Result(self._ask.number, self._ask.layer, codes, nbytes), payload)


def _check_fits(layout: Layout, ask: wire.Ask) -> None:
    if ask.layer >= layout.layers or ask.dtype != layout.dtype:
        raise LayoutRefused(
            f"queries of {ask.dtype} for layer {ask.layer}; expected {layout.dtype} for layers 0 to {layout.layers - 1}"
        )


def _too_large(ask: wire.Ask, views: Sequence[_OpenView]) -> bool:
    nbytes = sum(view.attention.step_bytes(tokens) for view, (_, tokens) in zip(views, ask.parts, strict=True))
    return nbytes > wire.MAX_STEP_BYTES


def _bytes_of(array: Stored) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
