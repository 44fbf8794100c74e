"""The side of an engine: its buffers, views and steps, and a round per query."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Executor

import numpy as np

from tokenlake.attention import stored_dtype
from tokenlake.errors import LayoutRefused, LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake.wire.frames import decode
from tokenlake_query.buffers import SharedBuffer
from tokenlake_query.connection import Connection
from tokenlake_query.opening import Opener
from tokenlake_query.steps import Part, Round, Step, Tools
from tokenlake_query.tally import Tally
from tokenlake_query.views import View

__all__ = ["EngineSide"]

MAX_VIEWS = 1 << 14
MAX_BUFFERS = 256


class _Buffer:
    """A buffer, what `Query` of it means, and the one under way. Of the reading thread."""

    def __init__(self, memory: SharedBuffer) -> None:
        self.memory = memory
        self.step: Step | None = None
        self.round: Round | None = None

    def void(self) -> None:
        if self.round is not None:
            self.round.void()
            self.round = None


class EngineSide:
    """A connection of an engine. What it opened is closed with it."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        opener: Opener,
        opening: Executor,
        tools: Tools,
        tally: Tally,
    ) -> None:
        self._opener = opener
        self._opening = opening
        self._tools = tools
        self._tally = tally
        self._buffers: dict[int, _Buffer] = {}
        self._lock = threading.Lock()
        self._views: dict[int, View | None] = {}
        """None while it is opened."""
        self._connection = Connection(sock, name)
        self._connection.serve(self._handle, self._ended)

    def _handle(self, body: bytes) -> None:
        message = decode(wire.query_decoder, body)
        if isinstance(message, wire.OpenBuffer):
            self._open_buffer(message)
            return
        try:
            if isinstance(message, wire.Query):
                self._query(message)
            elif isinstance(message, wire.Step):
                self._set_step(message)
            elif isinstance(message, wire.OpenView):
                self._open_view(message)
            else:
                self._close_views(message.views)
        except TokenLakeError as error:
            self._refuse(message.view if isinstance(message, wire.OpenView) else 0, error)

    def _refuse(self, view: int, error: TokenLakeError) -> None:
        self._connection.send(wire.Refused(view, type(error).__name__, str(error)))

    # -- buffers and steps

    def _open_buffer(self, message: wire.OpenBuffer) -> None:
        old = self._buffers.pop(message.buffer, None)
        if old is not None:
            old.void()
        if not message.nbytes:
            return
        descriptor = self._connection.reader.descriptor()
        memory = SharedBuffer(descriptor, message.nbytes)
        if len(self._buffers) >= MAX_BUFFERS:
            raise LimitReached(f"an engine shares at most {MAX_BUFFERS} buffers")
        self._buffers[message.buffer] = _Buffer(memory)

    def _set_step(self, message: wire.Step) -> None:
        buffer = self._buffers.get(message.buffer)
        if buffer is None:
            raise ProtocolRefused(f"buffer {message.buffer} is not open")
        buffer.void()
        # What is refused leaves no step that a query could mean.
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
        shape = views[0].attention.shape
        parts: list[Part] = []
        end = 0
        for view, (_, tokens) in zip(views, message.parts, strict=True):
            parts.append(Part(view, slice(end, end + tokens)))
            end += tokens
        array, single = buffer.memory.array, np.dtype(np.float32)
        buffer.step = Step(
            message.step,
            message.dtype,
            tuple(parts),
            array(message.queries, (end, shape.q_heads, shape.key_dim), stored_dtype(message.dtype)),
            array(message.outputs, (end, shape.q_heads, shape.value_dim), single),
            array(message.sums, (end, shape.q_heads), single),
        )

    def _view(self, number: int) -> View:
        view = self._views.get(number)
        if view is None:
            raise ProtocolRefused(f"view {number} is not open")
        return view

    def _query(self, message: wire.Query) -> None:
        buffer = self._buffers.get(message.buffer)
        if buffer is None or buffer.step is None or buffer.step.number != message.step:
            raise ProtocolRefused(f"buffer {message.buffer} has no step {message.step}")
        layers = self._opener.layout.layers
        if message.layer >= layers:
            raise LayoutRefused(f"layer {message.layer}; expected 0 to {layers - 1}")
        buffer.void()
        buffer.round = Round(buffer.step, message, self._tools, self._answer)
        buffer.round.begin()

    def _answer(self, answered: wire.Answered) -> None:
        self._tally.add(answers=1, lost_parts=answered.codes.count(Code.LOST))
        self._connection.send(answered)

    # -- views

    def _open_view(self, message: wire.OpenView) -> None:
        if len(self._views) >= MAX_VIEWS:
            raise LimitReached(f"an engine has at most {MAX_VIEWS} views open")
        if message.view in self._views:
            raise ProtocolRefused(f"view {message.view} is open already")
        with self._lock:
            self._views[message.view] = None
        self._opening.submit(self._open, message)

    def _open(self, message: wire.OpenView) -> None:
        try:
            view, codes = self._opener.open(message)
        except TokenLakeError as error:
            with self._lock:
                self._views.pop(message.view, None)
            self._refuse(message.view, error)
            return
        with self._lock:
            closed = message.view not in self._views
            if not closed:
                self._views[message.view] = view
                self._tally.add(views=1)
        if closed:
            view.close()
        # Also then: whoever waited too long learns that this process lives.
        segments, shares = view.holding
        hits = len(segments) + sum(len(share.keys) for share in shares)
        self._connection.send(wire.Viewed(message.view, hits, codes))

    def _close_views(self, numbers: tuple[int, ...]) -> None:
        with self._lock:
            views = [self._views.pop(number, None) for number in numbers]
        for view in views:
            if view is not None:
                self._tally.add(views=-1)
                view.close()
        # A step with one of them means nothing any more, and would keep its segments leased.
        for buffer in self._buffers.values():
            if buffer.step is not None and any(part.view in views for part in buffer.step.parts):
                buffer.step = None

    def _ended(self) -> None:
        for buffer in self._buffers.values():
            buffer.void()
        self._buffers.clear()
        self._close_views(tuple(self._views))
        self._tally.add(connections=-1)
