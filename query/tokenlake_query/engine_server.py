"""Serves an engine: opens its views (`views.py`), maps the memory that it shares with this process, and runs a round
(`rounds.py`) for each of its queries."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable
from functools import partial as bind

import numpy as np

from tokenlake.attention import Stored, stored_dtype
from tokenlake.errors import LayoutRefused, LimitReached, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake.wire.frames import decode
from tokenlake_client.mapped_memory import MappedMemory
from tokenlake_query.connection import Connection
from tokenlake_query.counters import Counters
from tokenlake_query.pace import Pace, TenantPace
from tokenlake_query.rounds import Part, Round, Step, Threads
from tokenlake_query.tenant_limits import TenantLimits
from tokenlake_query.tenant_threads import TenantThreads
from tokenlake_query.views import View, ViewOpener

MAX_VIEWS = 1 << 14
MAX_BUFFERS = 256
MAX_UNSENT_BYTES = 16 << 20
"""A connection is closed when its engine leaves more than this of its answers unread."""
READ_UNSENT_BYTES = 64 << 10
"""No further requests are read while more of the answers wait to be sent."""


class _SharedMemory:
    """A memfd of the engine, mapped by this process. The engine writes queries into it; this process writes outputs and
    log-sum-exps. Unmapped when the last array over it is gone."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Takes `descriptor` over. Raises ProtocolRefused unless it is sealed against shrinking: an access beyond the
        end of a file that shrank would kill this process. Raises LimitReached when the memory cannot be mapped."""
        try:
            try:
                sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            except OSError:
                sealed = 0
            size = os.fstat(descriptor).st_size
            if not sealed or size < nbytes:
                raise ProtocolRefused(
                    f"a buffer of {size} bytes, {'sealed' if sealed else 'not sealed'} against shrinking; "
                    f"expected a sealed memfd of at least {nbytes} bytes"
                )
            # Not `mmap.mmap`, which keeps a descriptor: an engine's buffers would take the descriptors of all others.
            self._bytes = np.asarray(MappedMemory(descriptor, nbytes, write=True))
        except OSError as error:
            raise LimitReached(f"a buffer of {nbytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self.nbytes = nbytes

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Stored:
        """An array over the memory from byte `offset` on, without a copy. Raises ProtocolRefused if `offset` is no
        multiple of `wire.ALIGNMENT` or the array does not fit into the memory."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset % wire.ALIGNMENT or offset + nbytes > self.nbytes:
            raise ProtocolRefused(
                f"{nbytes} bytes at {offset} of a buffer of {self.nbytes}; "
                f"expected a multiple of {wire.ALIGNMENT} that fits"
            )
        return np.ndarray(shape, dtype, self._bytes.data, offset)


class _Buffer:
    """One buffer of queries that the engine shares with this process (`wire.OpenBuffer`): its memory, the step that its
    queries refer to, and the work on its newest query. Only the reading thread uses it."""

    def __init__(self, memory: _SharedMemory) -> None:
        self.memory = memory
        self.step: Step | None = None
        self.round: Round | None = None

    def cancel(self) -> None:
        """End the work on the buffer's newest query, if there is any, so that nothing more is written into the
        memory."""
        if self.round is not None:
            self.round.cancel()
            self.round = None


class EngineServer:
    """The query engine's side of one connection of an engine. Its views, its buffers and its queries under way end with
    the connection."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        opener: ViewOpener,
        opening: TenantThreads,
        threads: Threads,
        limits: TenantLimits,
        pace: Pace,
        counters: Counters,
        on_end: Callable[[], None],
    ) -> None:
        """`sock`: the engine's connection, which this object owns from now on. `opening`: threads that may block while
        they open a view. `limits`, `pace`: of all tenants. `on_end` is called once when the connection has ended."""
        self._on_end = on_end
        self._opener = opener
        self._opening = opening
        self._threads = threads
        self._counters = counters
        self._buffers: dict[int, _Buffer] = {}
        self._lock = threading.Lock()
        self._views: dict[int, View | None] = {}
        """The engine's open views, by the number that the engine gave each; the value is None while the view is being
        opened."""
        self._limits = limits
        self._segments: dict[int, int] = {}
        """The number of segments with which each view is counted in `limits`."""
        self._connection = Connection(
            sock,
            name,
            MAX_UNSENT_BYTES,
            TenantPace(pace, threads.tenant),
            lambda nbytes: limits.add(threads.tenant, frame_bytes=nbytes),
        )
        counters.add(connections=1)
        self._connection.serve(self._handle, self._ended)

    def _handle(self, body: bytes) -> None:
        # An engine that does not read its answers is not read from: refusals of its requests would fill memory.
        self._connection.wait_unsent(READ_UNSENT_BYTES)
        message = decode(wire.query_decoder, body)
        try:
            if isinstance(message, wire.OpenBuffer):
                self._open_buffer(message)
            elif isinstance(message, wire.Query):
                self._query(message)
            elif isinstance(message, wire.Step):
                self._set_step(message)
            elif isinstance(message, wire.OpenView):
                self._open_view(message)
            else:
                self._close_views(message.views)
        except TokenLakeError as error:
            if isinstance(message, wire.OpenBuffer) and not isinstance(error, LimitReached):
                raise
            self._refuse(message.view if isinstance(message, wire.OpenView) else 0, error)
            if isinstance(message, wire.Query):
                # Only this query is LOST; the refusal does not name it.
                query = message.buffer, message.step, message.layer, message.attempt
                self._connection.send(wire.Answered(*query, b"", 0, 0))

    def _refuse(self, view: int, error: TokenLakeError) -> None:
        self._connection.send(wire.Refused(view, type(error).__name__, str(error)))

    # -- buffers and steps

    def _open_buffer(self, message: wire.OpenBuffer) -> None:
        old = self._buffers.pop(message.buffer, None)
        if old is not None:
            old.cancel()
            self._count_buffer(old.memory.nbytes, -1)
        if not message.nbytes:
            return
        memory = _SharedMemory(self._connection.reader.descriptor(), message.nbytes)
        if len(self._buffers) >= MAX_BUFFERS:
            raise LimitReached(f"an engine shares at most {MAX_BUFFERS} buffers")
        self._count_buffer(message.nbytes, 1)
        self._buffers[message.buffer] = _Buffer(memory)

    def _count_buffer(self, nbytes: int, count: int) -> None:
        self._limits.add(self._threads.tenant, buffers=count, buffer_bytes=count * nbytes)

    def _set_step(self, message: wire.Step) -> None:
        buffer = self._buffers.get(message.buffer)
        if buffer is None:
            raise ProtocolRefused(f"buffer {message.buffer} is not open; open it before its step")
        buffer.cancel()
        # The buffer's old step is removed before the new one is checked: after a refused step no query may use the old
        # one.
        buffer.step = None
        layout = self._opener.layout
        if message.dtype != layout.dtype:
            raise LayoutRefused(f"queries of {message.dtype}; expected the layout's {layout.dtype}")
        views = [self._view(number) for number, _ in message.parts]
        heads = {view.attention.shape.q_heads for view in views}
        if len(heads) != 1 or not all(tokens for _, tokens in message.parts):
            raise LayoutRefused(
                f"a step of {len(views)} parts with {sorted(heads)} heads; expected at least one part, at least one "
                "token in each, and one number of heads"
            )
        nbytes = views[0].attention.step_bytes(sum(tokens for _, tokens in message.parts))
        if nbytes > wire.MAX_STEP_BYTES:
            raise LimitReached(f"a step of {nbytes} bytes of queries or outputs; at most {wire.MAX_STEP_BYTES}")
        shape = views[0].attention.shape
        parts: list[Part] = []
        end = 0
        for view, (_, tokens) in zip(views, message.parts, strict=True):
            parts.append(Part(view, slice(end, end + tokens)))
            end += tokens
        array, single = buffer.memory.array, np.dtype(np.float32)
        queries = array(message.queries, (end, shape.q_heads, shape.key_dim), stored_dtype(message.dtype))
        buffer.step = Step(
            message.step,
            message.dtype,
            tuple(parts),
            queries,
            array(message.outputs, (end, shape.q_heads, shape.value_dim), single),
            array(message.sums, (end, shape.q_heads), single),
        )

    def _view(self, number: int) -> View:
        view = self._views.get(number)
        if view is None:
            raise ProtocolRefused(f"view {number} is not open; expected an open view")
        return view

    def _query(self, message: wire.Query) -> None:
        buffer = self._buffers.get(message.buffer)
        if buffer is None or buffer.step is None or buffer.step.number != message.step:
            raise ProtocolRefused(f"buffer {message.buffer} has no step {message.step}")
        layers = self._opener.layout.layers
        if message.layer >= layers:
            raise LayoutRefused(f"layer {message.layer}; expected 0 to {layers - 1}")
        buffer.cancel()
        buffer.round = Round(buffer.step, message, self._threads, self._answer)
        buffer.round.begin()

    def _answer(self, answered: wire.Answered) -> None:
        self._counters.add(answers=1, lost_parts=answered.codes.count(Code.LOST))
        self._connection.send(answered)

    # -- views

    def _open_view(self, message: wire.OpenView) -> None:
        if len(self._views) >= MAX_VIEWS:
            raise LimitReached(f"an engine has at most {MAX_VIEWS} views open")
        if message.view in self._views:
            raise ProtocolRefused(f"view {message.view} is open already")
        segments = len(message.keys) // KEY_BYTES
        self._limits.add(self._threads.tenant, views=1, segments=segments)
        with self._lock:
            self._views[message.view] = None
            self._segments[message.view] = segments
        try:
            self._opening.submit(self._threads.tenant, bind(self._open, message), len(message.keys))
        except LimitReached:
            with self._lock:
                self._forget(message.view)
            raise

    def _forget(self, number: int) -> View | None:
        """Remove a view, and return it if it was open. The caller holds the lock."""
        if number not in self._views:
            return None
        self._limits.add(self._threads.tenant, views=-1, segments=-self._segments.pop(number))
        return self._views.pop(number)

    def _open(self, message: wire.OpenView) -> None:
        try:
            view, codes = self._opener.open(message)
        except Exception as error:
            with self._lock:
                self._forget(message.view)
            if isinstance(error, TokenLakeError):
                self._refuse(message.view, error)
                return
            self._refuse(message.view, Unreachable(f"the query engine failed to open the view: {type(error).__name__}"))
            raise
        with self._lock:
            closed = message.view not in self._views
            if not closed:
                self._views[message.view] = view
                self._counters.add(views=1)
        if closed:
            view.close()
        # The answer is sent even if the engine closed the view meanwhile: it shows the engine that this process is
        # alive.
        local, shares = view.placement
        hits = len(local) + sum(len(share.keys) for share in shares)
        self._connection.send(wire.Viewed(message.view, hits, codes))

    def _close_views(self, numbers: tuple[int, ...]) -> None:
        with self._lock:
            closed = {view for view in map(self._forget, numbers) if view is not None}
        for view in closed:
            self._counters.add(views=-1)
            view.close()
        # A step of which one part attends to the closed view serves no further query. It would keep the segments of the
        # view leased, so it is removed.
        for buffer in self._buffers.values():
            if buffer.step is not None and any(part.view in closed for part in buffer.step.parts):
                buffer.step = None

    def _ended(self) -> None:
        for buffer in self._buffers.values():
            buffer.cancel()
            self._count_buffer(buffer.memory.nbytes, -1)
        self._buffers.clear()
        self._close_views(tuple(self._views))
        self._counters.add(connections=-1)
        self._on_end()
