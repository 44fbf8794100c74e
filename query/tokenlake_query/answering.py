"""The answering side between query engines: attention for another node over segments that lie here."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial as bind
from typing import NamedTuple

import numpy as np

from tokenlake.attention import AttentionShape, Partial, Stored, from_float32, stored_dtype
from tokenlake.errors import LayoutRefused, LimitReached, ProtocolRefused, TokenLakeError
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import split_keys
from tokenlake_query.connection import Connection
from tokenlake_query.segments import Pools, Segments, open_here
from tokenlake_query.tally import Tally
from tokenlake_query.work import Attention, Task, Worker

__all__ = ["Answerer"]

log = logging.getLogger(__name__)

MAX_VIEWS = 1 << 16
MAX_PENDING_BYTES = 512 << 20
"""Queries of one connection that wait to be computed; more stay in the socket. One ask may always come."""


MAX_UNSENT_BYTES = 64 << 20
"""Results that the asker has not taken; beyond that no more of its queries are read."""


class _Served(NamedTuple):
    attention: Attention
    segments: Segments


class Answerer:
    """A connection of another node's query engine. Its views die with it."""

    def __init__(
        self,
        sock: socket.socket,
        node: str,
        pools: Pools,
        worker: Worker,
        opening: Executor,
        tally: Tally,
    ) -> None:
        self._pools = pools
        self._worker = worker
        self._opening = opening
        self._tally = tally
        self._lock = threading.Lock()
        self._views: dict[int, _Served | None] = {}
        """None while it is opened."""
        self._room = threading.Condition()
        self._pending_bytes = 0
        self._spare: list[bytearray] = []
        self._connection = Connection(sock, f"asker {node}")
        self._connection.serve(self._handle, self._ended)

    def _handle(self, body: bytes) -> None:
        message = decode(wire.ask_decoder, body)
        if isinstance(message, wire.Ask):
            self._ask(message)
        elif isinstance(message, wire.OpenView):
            if len(self._views) >= MAX_VIEWS:
                self._refuse(message.view, LimitReached(f"a query engine has at most {MAX_VIEWS} views open here"))
                return
            if message.view in self._views:
                raise ProtocolRefused(f"view {message.view} is open already")
            with self._lock:
                self._views[message.view] = None
            self._opening.submit(self._open, message)
        else:
            with self._lock:
                for view in message.views:
                    self._forget(view)

    def _open(self, message: wire.OpenView) -> None:
        try:
            layout = Layout.decode(message.layout)
            shape = AttentionShape.of(layout, message.heads, message.scale)
            keys = split_keys(message.keys)
            if len(set(keys)) < len(keys):
                raise ProtocolRefused("a key is named twice; expected each once")
            segments = open_here(self._pools.get(message.tenant, layout), keys)
        except (TokenLakeError, ValueError) as error:
            with self._lock:
                self._views.pop(message.view, None)
            self._refuse(message.view, error)
            return
        with self._lock:
            # Unless it was closed meanwhile.
            if message.view in self._views:
                self._views[message.view] = _Served(Attention(layout, shape), segments)
                self._tally.add(views=1)
        hits = len(segments)
        codes = bytes([Code.LOCAL]) * hits + bytes([Code.MISSING]) * (len(keys) - hits)
        self._connection.send(wire.Viewed(message.view, hits, codes))

    def _forget(self, view: int) -> None:
        """Under the lock."""
        if self._views.pop(view, None) is not None:
            self._tally.add(views=-1)

    def _refuse(self, view: int, error: Exception) -> None:
        kind = type(error).__name__ if isinstance(error, TokenLakeError) else ProtocolRefused.__name__
        self._connection.send(wire.Refused(view, kind, str(error)))

    def _ask(self, ask: wire.Ask) -> None:
        views = [self._views.get(view) for view, _ in ask.parts]
        served = [self._fitting(one, ask) for one in views if one is not None]
        if len(served) < len(views):
            # Closed while it was asked about.
            self._connection.reader.skip(ask.nbytes)
            self._connection.send(wire.Result(ask.number, ask.layer, bytes([Code.LOST]) * len(views), 0))
            return
        item = stored_dtype(ask.dtype).itemsize
        sizes = [
            tokens * one.attention.shape.q_heads * one.attention.shape.key_dim * item
            for (_, tokens), one in zip(ask.parts, served, strict=True)
        ]
        if sum(sizes) != ask.nbytes or not all(sizes) or not sizes:
            raise ProtocolRefused(f"{ask.nbytes} bytes of queries; expected {sum(sizes)}")
        self._connection.wait_unsent(MAX_UNSENT_BYTES)
        buffer = self._take(ask.nbytes)
        self._connection.reader.into(memoryview(buffer)[: ask.nbytes])
        answer = _Answer(ask, len(served), lambda result, payload: self._answer(buffer, result, payload))
        tasks = []
        start = 0
        for number, ((view, tokens), one, size) in enumerate(zip(ask.parts, served, sizes, strict=True)):
            shape = one.attention.shape
            queries: Stored = np.frombuffer(buffer, stored_dtype(ask.dtype), size // item, start)
            start += size
            tasks.append(
                Task(
                    one.attention,
                    ask.layer,
                    one.segments,
                    queries.reshape(tokens, shape.q_heads, shape.key_dim),
                    bind(self._is_wanted, view),
                    answer.taker(number),
                )
            )
        self._worker.submit(tasks)

    @staticmethod
    def _fitting(one: _Served, ask: wire.Ask) -> _Served:
        layout = one.attention.layout
        if ask.layer >= layout.layers or ask.dtype != layout.dtype:
            raise LayoutRefused(
                f"queries of {ask.dtype} for layer {ask.layer}; "
                f"expected {layout.dtype} for layers 0 to {layout.layers - 1}"
            )
        return one

    def _is_wanted(self, view: int) -> bool:
        return self._connection.open and view in self._views

    def _take(self, nbytes: int) -> bytearray:
        with self._room:
            self._room.wait_for(lambda: not self._pending_bytes or self._pending_bytes + nbytes <= MAX_PENDING_BYTES)
            for index, spare in enumerate(self._spare):
                if len(spare) >= nbytes:
                    buffer = self._spare.pop(index)
                    break
            else:
                # Instead of a smaller one, so that there are never more than were needed at a time.
                self._spare[:1] = []
                buffer = bytearray(nbytes)
            self._pending_bytes += len(buffer)
            return buffer

    def _answer(self, buffer: bytearray, result: wire.Result, payload: list[memoryview]) -> None:
        self._tally.add(results=1)
        self._connection.send(result, payload)
        with self._room:
            self._pending_bytes -= len(buffer)
            self._spare.append(buffer)
            self._room.notify()

    def _ended(self) -> None:
        with self._lock:
            for view in list(self._views):
                self._forget(view)
        self._tally.add(connections=-1)


class _Answer:
    """Results of the parts of one `Ask`, all from the computing thread."""

    def __init__(self, ask: wire.Ask, parts: int, send: Callable[[wire.Result, list[memoryview]], None]) -> None:
        self._ask = ask
        self._send = send
        self._left = parts
        self._partials: list[Partial | None] = [None] * parts

    def taker(self, number: int) -> Callable[[Partial | None], None]:
        def take(partial: Partial | None) -> None:
            self._partials[number] = partial
            self._left -= 1
            if not self._left:
                self._reply()

        return take

    def _reply(self) -> None:
        codes = bytes(Code.LOST if partial is None else Code.LOCAL for partial in self._partials)
        there = [partial for partial in self._partials if partial is not None]
        outputs = [from_float32(partial.out, self._ask.dtype) for partial in there]
        payload = [_bytes_of(array) for array in [*outputs, *(partial.lse for partial in there)]]
        nbytes = sum(map(len, payload))
        self._send(wire.Result(self._ask.number, self._ask.layer, codes, nbytes), payload)


def _bytes_of(array: Stored) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
