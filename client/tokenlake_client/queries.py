"""Attention over segments in place, computed by the query engine of this node.

::

    lease = pool.match(keys)
    queries = pool.queries
    with queries.open_view(lease, heads, scale) as view, queries.init_query([(view, tokens)]) as buffer:
        buffer.queries[...] = ...               # for each step and layer
        ticket = queries.query(buffer, layer)   # the engine computes attention over its own new tokens meanwhile
        answer = ticket.wait()                  # valid until the next query with this buffer
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tokenlake.attention.dtypes import stored_dtype
from tokenlake.errors import DeadlinePassed, LayoutRefused, LimitReached, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.layout import Layout
from tokenlake.opaque_layout import understood
from tokenlake.wire import HEADER_BYTES, Code, engine, pack_frame
from tokenlake.wire import query as wire
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import join_keys
from tokenlake_client.arguments import seconds
from tokenlake_client.lease import Lease
from tokenlake_client.pool_state import PoolState
from tokenlake_client.query_link import Expected, QueryLink
from tokenlake_client.query_memory import QueryMemory
from tokenlake_client.refusals import error_of

log = logging.getLogger(__name__)

VIEW_S = 1.5
"""Default deadline of `open_view` in seconds: longer than the query engine waits for those of other nodes."""
QUERY_S = 2.0
"""Default deadline of `query` in seconds: attention of one layer over the segments of all views."""
LEAST_BYTES = 64 << 10
FREE_BUFFERS = 8
"""Limit of the closed buffers whose memory is kept for later batches; the memory of further ones is freed."""


class Answer(NamedTuple):
    """The result of one query. Both arrays lie in the buffer, and are valid until the next query with it or until it is
    closed."""

    output: NDArray[np.float32]
    """The attention of each query token: [tokens, heads, value dim], normalised over the segments of the token's
    view."""
    sums: NDArray[np.float32]
    """The log-sum-exp of each query token and head, [tokens, heads]: natural logarithm of the sum of the exponentials
    of the logits."""
    codes: bytes
    """One `Code` per part of the buffer: LOCAL (computed) or LOST. The rows of a LOST part in the arrays are
    undefined."""
    sent_bytes: int
    """Bytes of queries that the query engine sent to other nodes for this answer."""
    received_bytes: int
    """Bytes of attention and log-sum-exps that the query engine received from other nodes for this answer."""

    @property
    def lost(self) -> list[int]:
        """Indices of the buffer's parts (a view and its query tokens) whose result is LOST."""
        return [part for part, code in enumerate(self.codes) if code != Code.LOCAL]


class View:
    """A sequence of segments. Every query of the view attends to all their tokens. The view owns the lease and releases
    it when it is closed. Thread-safe."""

    def __init__(
        self, link: QueryLink, lease: Lease, number: int, heads: int, viewed: wire.Viewed, nodes: Sequence[str]
    ) -> None:
        """Made by `Queries.open_view`."""
        self.lease = lease
        self.heads = heads
        self.hits = viewed.hits
        """Number of segments, from the first of the lease on, that the view's queries attend to."""
        self.codes = viewed.codes
        """One `Code` per segment of the lease: LOCAL, REMOTE or MISSING."""
        self.nodes = nodes
        """The name of the node that had each segment of the lease when the view was opened."""
        self.number = number
        self.link = link
        self.queried = False
        """True if a query buffer was made for this view."""
        self._open = True

    @property
    def alive(self) -> bool:
        """False once the view is closed or its query engine is gone: all further queries of the view are LOST."""
        return self._open and self.link.alive

    def close(self) -> None:
        """Close the view and release its lease. Idempotent; never raises."""
        if self._open:
            self._open = False
            _tell(self.link, wire.CloseView((self.number,)))
            if self.queried:
                self.lease.used(0, self.hits)
            self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class QueryBuffer:
    """Queries and results of one batch, for all layers and all steps with the same parts. One ticket at a time; for one
    thread.

    The engine may access the arrays before `Queries.query` and after `Ticket.wait`. Between the two calls the query
    engine owns the buffer. When a part was LOST the query engine may still write into the memory. Therefore all further
    queries of this buffer are LOST too, and the memory is not reused."""

    def __init__(self, owner: Queries, memory: QueryMemory | None, parts: Sequence[tuple[View, int]], dtype: str):
        """Made by `Queries.init_query`. `memory` None: all queries of the buffer are LOST."""
        self._owner = owner
        self._memory = memory
        self.parts = tuple((view.number, tokens) for view, tokens in parts)
        self.link = parts[0][0].link
        self.step = next(owner.numbers)
        self.attempt = 0
        self.spent = memory is None
        """True: all further queries of the buffer are LOST."""
        self.newest: Expected | None = None
        """The awaited answer to the buffer's newest query. Until it arrives, in time or late, the query engine may
        write into the buffer's memory."""
        tokens, heads = sum(tokens for _, tokens in parts), parts[0][0].heads
        self.offsets, self.nbytes = owner.geometry(tokens, heads, dtype)
        layout, of_queries = owner.layout, stored_dtype(dtype)
        self.queries: NDArray[np.generic]
        """[tokens of all parts in order, heads, key dim]: float32, float16, or uint16 that holds the bits of
        bfloat16. The engine writes them before each query, with position encoding and not scaled."""
        shapes = ((tokens, heads, layout.key_dim), (tokens, heads, layout.value_dim), (tokens, heads))
        dtypes = (of_queries, np.dtype(np.float32), np.dtype(np.float32))
        if memory is None:
            arrays = [np.zeros(shape, kind) for shape, kind in zip(shapes, dtypes, strict=True)]
        else:
            places = zip(self.offsets, shapes, dtypes, strict=True)
            arrays = [memory.array(offset, shape, kind) for offset, shape, kind in places]
        self.queries, self.output, self.sums = arrays

    @property
    def number(self) -> int:
        """The number that names the buffer's memory in messages to the query engine; 0 where the buffer has no
        memory."""
        return 0 if self._memory is None else self._memory.number

    def close(self) -> None:
        """Return the buffer's memory for other batches: no array of the buffer may be used any more. Idempotent."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            self._owner.give_back(self.link, memory, self.newest, reusable=not self.spent)
        self.spent = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Ticket:
    """A query that was sent to the query engine and whose answer is awaited. For one thread."""

    def __init__(self, buffer: QueryBuffer, expected: Expected | None, deadline_s: float, grace_s: float) -> None:
        """`expected` None: the query was not sent. `grace_s`: how much longer than `deadline_s` to wait, because the
        query engine answers at the deadline, and the answer takes time to arrive."""
        self._buffer = buffer
        self._expected = expected
        self._grace_s = grace_s
        self._until = time.monotonic() + deadline_s + grace_s

    def wait(self) -> Answer:
        """Block until the query engine's answer has arrived or the deadline has passed, and return the answer. Never
        raises: parts of the buffer without a result are LOST."""
        buffer, expected = self._buffer, self._expected
        reply = None
        if expected is not None:
            # Wait at least `grace_s`: the answer may have arrived while the engine computed, even if the deadline has
            # passed since.
            reply = buffer.link.wait(expected, max(self._until - time.monotonic(), self._grace_s))
        if isinstance(reply, wire.Answered) and len(reply.codes) == len(buffer.parts):
            buffer.spent = reply.codes.count(Code.LOCAL) < len(reply.codes)
            return Answer(buffer.output, buffer.sums, reply.codes, reply.sent_bytes, reply.received_bytes)
        buffer.spent = True
        return Answer(buffer.output, buffer.sums, bytes([Code.LOST]) * len(buffer.parts), 0, 0)


class Queries:
    """`pool.queries`: views, buffers, and the connection to the query engine. Thread-safe."""

    def __init__(self, state: PoolState) -> None:
        self._layout = state.layout
        self.numbers = itertools.count(1)
        """The source of the numbers that name views, buffers and steps on the connection."""
        self._grants = state.grants
        self._deadlines = state.deadlines
        self._link: QueryLink | None = None
        self._lock = threading.Lock()
        self._free: list[QueryMemory] = []
        self._in_use: list[tuple[QueryMemory, Expected]] = []
        """Memory of closed buffers whose newest query is not answered yet: the query engine may still write there."""

    @property
    def layout(self) -> Layout:
        """The pool's layout. Raises `LayoutRefused` for an opaque one."""
        return understood(self._layout)

    def open_view(self, lease: Lease, heads: int, scale: float, deadline_s: float = VIEW_S) -> View:
        """A view of the first `MAX_KEYS` segments of `lease`, for queries of `heads` heads; logits are `scale` x
        query . key.

        The view takes the lease over. Raises `LayoutRefused` for values that no view can have, `Unreachable` (no query
        engine, or the lease has ended), `DeadlinePassed`, and the refusal of the query engine; the lease stays the
        caller's then.
        """
        understood(self._layout)
        seconds("deadline_s", deadline_s)
        link = self._connected()
        link.check()
        self._sweep(link)
        first = lease.ids[0]
        hits = min(lease.hits, engine.MAX_KEYS)
        placed = self._grants.current(lease.link).call(lambda number: engine.Locate(number, first), engine.Located)
        if len(placed.owners) != hits:
            raise Unreachable(f"the lease of {lease.hits} segments has ended; match again")
        number = next(self.numbers)
        keys = join_keys(lease.keys[:hits])
        message = wire.OpenView(number, "", b"", keys, placed.nodes, placed.owners, heads, scale)
        _check(message)
        expected = link.expect(("view", number))
        link.send(message)
        reply = link.wait(expected, deadline_s + self._deadlines.grace_s)
        if isinstance(reply, wire.Refused):
            raise error_of(reply.kind, reply.reason)
        if not isinstance(reply, wire.Viewed):
            # The view is not closed now: the query engine would then send no answer, and only an answer ends that the
            # link is overdue. `_sweep` closes the view when the late answer has arrived.
            link.check()
            raise DeadlinePassed(f"the query engine opened no view within {deadline_s * 1e3:.0f} ms")
        nodes = [lease.link.node if owner == engine.HERE else placed.nodes[owner] for owner in placed.owners]
        return View(link, lease, number, heads, reply, nodes)

    def init_query(self, parts: Sequence[tuple[View, int]], dtype: str | None = None) -> QueryBuffer:
        """A buffer for the queries of `parts`: (view, number of query tokens) each. All views must have the same number
        of heads. `dtype`: that of the queries, "float32", "bfloat16" or "float16" (default: the layout's).

        Raises `LayoutRefused` for parts that do not fit together or another dtype than the layout's, and `LimitReached`
        for too many parts or tokens. Where a view is not `alive` or the query engine is overdue, all queries of the
        buffer are LOST and no error is raised.
        """
        dtype = self.layout.dtype if dtype is None else dtype
        if dtype != self.layout.dtype:
            raise LayoutRefused(f"queries of {dtype}; expected the layout's {self.layout.dtype}")
        parts = [(view, operator.index(tokens)) for view, tokens in parts]
        if not parts or any(tokens < 1 for _, tokens in parts):
            raise LayoutRefused("a query has no part, or a part without tokens; expected at least one token of each")
        if len(heads := {view.heads for view, _ in parts}) > 1:
            raise LayoutRefused(f"views of {sorted(heads)} heads in one query; expected the same of all")
        if len(parts) > wire.MAX_PARTS:
            raise LimitReached(f"a query of {len(parts)} parts; at most {wire.MAX_PARTS}")
        count = sum(tokens for _, tokens in parts)
        (_, outputs, sums), nbytes = self.geometry(count, parts[0][0].heads, dtype)
        if max(outputs, sums - outputs) > wire.MAX_STEP_BYTES:
            raise LimitReached(
                f"a query of {count} tokens: {max(outputs, sums - outputs)} bytes of queries or outputs; at most "
                f"{wire.MAX_STEP_BYTES}"
            )
        link = parts[0][0].link
        if any(view.link is not link or not view.alive for view, _ in parts):
            return QueryBuffer(self, None, parts, dtype)
        for view, _ in parts:
            view.queried = True
        try:
            link.check()
            self._sweep(link)
            buffer = QueryBuffer(self, self._memory(link, nbytes), parts, dtype)
            link.send(wire.Step(buffer.number, buffer.step, dtype, buffer.parts, *buffer.offsets))  # type: ignore[arg-type]
        except Unreachable:
            return QueryBuffer(self, None, parts, dtype)
        return buffer

    def query(self, buffer: QueryBuffer, layer: int, deadline_s: float = QUERY_S) -> Ticket:
        """Send the queries that are in `buffer.queries` now, for `layer`. Parts without a result after `deadline_s`
        are LOST. Never blocks. Raises `LayoutRefused` for a layer that the layout lacks,
        and `ValueError` for a deadline that is negative or not finite."""
        layer, link = operator.index(layer), buffer.link
        if not 0 <= layer < self.layout.layers:
            raise LayoutRefused(f"layer is {layer}; expected 0 to {self.layout.layers - 1}")
        seconds("deadline_s", deadline_s)
        if buffer.spent:
            return Ticket(buffer, None, 0.0, 0.0)
        buffer.attempt += 1
        try:
            link.check()
            expected = link.expect((buffer.number, buffer.step, layer, buffer.attempt))
            buffer.newest = expected
            link.send(wire.Query(buffer.number, buffer.step, layer, buffer.attempt, deadline_s))
        except Unreachable:
            return Ticket(buffer, None, 0.0, 0.0)
        return Ticket(buffer, expected, deadline_s, self._deadlines.grace_s)

    def close(self) -> None:
        """Called by `Pool.close`. End the connection to the query engine: queries of all views are LOST. Idempotent."""
        with self._lock:
            self._free.clear()
            self._in_use.clear()
            if self._link is not None:
                self._link.close()

    def geometry(self, tokens: int, heads: int, dtype: str) -> tuple[tuple[int, int, int], int]:
        """Byte offsets of the queries, the outputs and the log-sum-exps in a query buffer, and the size of the buffer
        in bytes."""
        size = stored_dtype(dtype).itemsize
        outputs = _aligned(tokens * heads * self.layout.key_dim * size)
        sums = outputs + _aligned(tokens * heads * self.layout.value_dim * 4)
        return (0, outputs, sums), sums + _aligned(tokens * heads * 4)

    def give_back(self, link: QueryLink, memory: QueryMemory, newest: Expected | None, *, reusable: bool) -> None:
        """Take back the memory of a closed buffer. `newest`: the answer to the buffer's newest query; until it arrives
        the memory is not reused. `reusable`: all queries of the buffer were answered without a LOST part."""
        with self._lock:
            if link is not self._link or not link.alive:
                return
            if newest is not None and newest.reply is None:
                self._in_use.append((memory, newest))
                return
            if reusable and len(self._free) < FREE_BUFFERS:
                self._free.append(memory)
                return
        _tell(link, wire.OpenBuffer(memory.number, 0))

    def _sweep(self, link: QueryLink) -> None:
        """Close the views that were opened after their caller had given up, and the memory of closed buffers whose last
        answer has arrived since."""
        # Other threads sweep too.
        with contextlib.suppress(IndexError):
            while True:
                _tell(link, wire.CloseView((link.late_views.popleft(),)))
        with self._lock:
            answered = [memory for memory, newest in self._in_use if newest.reply is not None]
            self._in_use = [(memory, newest) for memory, newest in self._in_use if newest.reply is None]
        for memory in answered:
            _tell(link, wire.OpenBuffer(memory.number, 0))

    def _memory(self, link: QueryLink, nbytes: int) -> QueryMemory:
        """Memory of at least `nbytes` for a query buffer: the smallest free one that is large enough, else a new one.
        Raises `Unreachable`."""
        with self._lock:
            fitting = [memory for memory in self._free if memory.nbytes >= nbytes] if link is self._link else []
            if fitting:
                memory = min(fitting, key=lambda memory: memory.nbytes)
                self._free.remove(memory)
                return memory
        memory = QueryMemory(next(self.numbers), max(LEAST_BYTES, 1 << (nbytes - 1).bit_length()))
        try:
            link.send(wire.OpenBuffer(memory.number, memory.nbytes), memory.descriptor)
        finally:
            memory.close_descriptor()
        return memory

    def _connected(self) -> QueryLink:
        """The connection to the query engine: a new one where there is none or the last one has ended. Raises
        `Unreachable`."""
        with self._lock:
            if self._link is not None and self._link.alive:
                return self._link
            channel_link = self._grants.link
            if self._grants.closed:
                raise Unreachable("the pool was closed")
            pending = channel_link.channel.begin(engine.OpenQuery)
            channel_link.expect(channel_link.wait(pending), engine.QueryOpened)
            if pending.descriptor is None:
                raise ProtocolRefused("the daemon sent no descriptor of a connection to its query engine")
            self._link = QueryLink(socket.socket(fileno=pending.descriptor))
            self._free.clear()
            self._in_use.clear()
            return self._link


def _check(message: wire.OpenView) -> None:
    """Raises `LayoutRefused` for a message that the query engine would not decode: it would end the connection and all
    other views."""
    try:
        frame = pack_frame(message)
        decode(wire.query_decoder, frame[HEADER_BYTES:])
    except (ProtocolRefused, TypeError, OverflowError) as error:
        raise LayoutRefused(f"a view that no query engine can open: {error}") from error
    if len(frame) - HEADER_BYTES > wire.MAX_FRAME:
        raise LayoutRefused(f"a view of {len(message.owners)} segments; its request may take {wire.MAX_FRAME} bytes")


def _tell(link: QueryLink, message: wire.CloseView | wire.OpenBuffer) -> None:
    try:
        link.send(message)
    except TokenLakeError as error:
        log.debug("a message to the query engine was not sent: %s", error)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // wire.ALIGNMENT) * wire.ALIGNMENT
