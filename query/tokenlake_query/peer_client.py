"""Connections to the query engines of other nodes: one per node and tenant, dialled when first needed.

Each tenant has connections of its own, because a connection that is full of one tenant's queries, or whose peer is
overdue after one tenant's deadline, must not delay the queries of another tenant.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from tokenlake.attention import LSE_BYTES, AttentionShape, Partial, as_float32, stored_dtype
from tokenlake.errors import DeadlinePassed, ProtocolRefused, Unreachable
from tokenlake.wire import HEADER_BYTES, Code
from tokenlake.wire import query as wire
from tokenlake.wire.fields import RecordKeys
from tokenlake.wire.frames import decode
from tokenlake.wire.liveness import Liveness
from tokenlake_client.refusals import error_of
from tokenlake_query.connection import Connection
from tokenlake_query.counters import Counters

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Limits of the pause after a failed dial of a node. The pause doubles with each failure."""


class ResultHandler(Protocol):
    """Takes the results of one `PeerClient.ask`, that is of queries that were sent to another node. Called in the
    reading thread of the connection, or in the thread that finds the connection closed when it sends."""

    def wanted(self) -> bool:
        """False when the results are not needed any more; they are then dropped."""

    def received(self, nbytes: int) -> None:
        """Count `nbytes` bytes of a received result, including its frame."""

    def arrived(self, index: int, partial: Partial) -> None:
        """Take the attention for part `index` of the request (the queries of one view). The arrays are borrowed for the
        call."""

    def missing(self, index: int) -> None:
        """Record that part `index` of the request (the queries of one view) has no result: the peer answered LOST, or
        the connection ended."""


class _Asked(NamedTuple):
    handler: ResultHandler
    shape: AttentionShape
    dtype: str
    tokens: tuple[int, ...]


class PeerClient:
    """A connection to the query engine of another node, `node`. Thread-safe; calls never block."""

    def __init__(self, sock: socket.socket, node: str, counters: Counters, keys: RecordKeys | None = None) -> None:
        """Takes `sock` over. `keys`: of its records; None if it is plain."""
        self.node = node
        self._connection = Connection(sock, f"query engine of {node}", keys=keys)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._liveness = Liveness()
        self._opening: dict[int, Future[bytes]] = {}
        self._asked: dict[int, _Asked] = {}
        self._scratch = memoryview(bytearray())
        self._counters = counters
        self._connection.serve(self._handle, self._ended)

    @property
    def usable(self) -> bool:
        """True while the connection to the peer is open and the peer owes no overdue answer."""
        return self._connection.open and not self._liveness.overdue

    @property
    def open(self) -> bool:
        """False once the end of the connection to the peer was noticed."""
        return self._connection.open

    def deadline_missed(self) -> None:
        """Report that the peer missed the deadline of an answer. If it still owes any answer, it counts as overdue
        until it sends something."""
        with self._lock:
            if self._asked or self._opening:
                self._liveness.deadline_missed()

    def open_view(self, message: Callable[[int], wire.OpenView]) -> tuple[int, Future[bytes]]:
        """Choose a number for a new view and send `message(number)`. Returns the number, and a future of one code byte
        per key, which fails with the error of a refusal or with Unreachable."""
        number = next(self._numbers)
        opening: Future[bytes] = Future()
        with self._lock:
            self._opening[number] = opening
        self._connection.send(message(number))
        if not self._connection.open:
            self._ended()
        return number, opening

    def close_view(self, view: int) -> None:
        """Tell the peer that no more queries of `view` will be sent."""
        self._connection.send(wire.CloseView((view,)))

    def ask(
        self,
        handler: ResultHandler,
        layer: int,
        shape: AttentionShape,
        dtype: str,
        parts: Sequence[tuple[int, int]],
        queries: Sequence[memoryview],
    ) -> int:
        """Send the `queries` of `parts`, each of which is (number of a view at the peer, number of query tokens).
        Returns the number of bytes of the request. `handler` gets the result of every part exactly once, possibly
        before this returns. `queries` are borrowed until they were sent (`Connection.send`)."""
        number = next(self._numbers)
        with self._lock:
            self._asked[number] = _Asked(handler, shape, dtype, tuple(tokens for _, tokens in parts))
        nbytes = sum(map(len, queries))
        ask = wire.Ask(number, layer, dtype, tuple(parts), nbytes)  # type: ignore[arg-type]
        sent = self._connection.send(ask, queries)
        if not self._connection.open:
            self._ended()
        return sent

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    # -- the reading thread

    def _handle(self, body: bytes) -> None:
        message = decode(wire.ask_reply_decoder, body)
        if isinstance(message, wire.Result):
            self._result(message, HEADER_BYTES + len(body))
            return
        with self._lock:
            self._liveness.heard(time.monotonic())
            opening = self._opening.pop(message.view, None)
        if isinstance(message, wire.Refused):
            if opening is None:
                raise Unreachable(f"{self.node} refused: {message.reason}")
            opening.set_exception(error_of(message.kind, message.reason, Unreachable))
        elif opening is not None:
            opening.set_result(message.codes)

    def _result(self, result: wire.Result, frame: int) -> None:
        with self._lock:
            asked = self._asked.get(result.number)
        if asked is None or len(result.codes) != len(asked.tokens):
            raise ProtocolRefused(f"result {result.number} fits no open request; expected one code per part of one")
        shape, stored = asked.shape, stored_dtype(asked.dtype)
        answered = [
            tokens if code == Code.LOCAL else 0 for code, tokens in zip(result.codes, asked.tokens, strict=True)
        ]
        outputs = sum(answered) * shape.q_heads * shape.value_dim * stored.itemsize
        expected = outputs + sum(answered) * shape.q_heads * LSE_BYTES
        if result.nbytes != expected:
            raise ProtocolRefused(
                f"a result of {result.nbytes} bytes for {sum(answered)} query tokens; expected {expected}"
            )
        if len(self._scratch) < result.nbytes:
            self._scratch = memoryview(bytearray(result.nbytes))
        payload = self._scratch[: result.nbytes]
        self._connection.reader.into(payload)
        with self._lock:
            # The request is removed only after its payload was read: if the connection ends before that, `_ended`
            # still reports the parts of the request as missing.
            self._liveness.heard(time.monotonic())
            if self._asked.pop(result.number, None) is None:
                return
        if not asked.handler.wanted():
            self._counters.add(late_results=1)
            return
        asked.handler.received(frame + result.nbytes)
        outs = np.frombuffer(payload[:outputs], stored).reshape(-1, shape.q_heads, shape.value_dim)
        lses = np.frombuffer(payload[outputs:], np.float32).reshape(-1, shape.q_heads)
        start = 0
        for index, (tokens, code) in enumerate(zip(asked.tokens, result.codes, strict=True)):
            if code != Code.LOCAL:
                asked.handler.missing(index)
                continue
            rows = slice(start, start + tokens)
            start += tokens
            asked.handler.arrived(index, Partial(as_float32(outs[rows], asked.dtype), lses[rows]))

    def _ended(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, {}
            opening, self._opening = self._opening, {}
        for future in opening.values():
            future.set_exception(Unreachable(f"the connection to the query engine of {self.node} broke"))
        for unanswered in asked.values():
            for index in range(len(unanswered.tokens)):
                unanswered.handler.missing(index)


class _Failure(NamedTuple):
    """The newest attempt to connect to a node's query engine that failed."""

    reason: str
    pause_s: float
    until: float
    """Monotonic seconds before which the node is not dialled again."""


class PeerClients:
    """The connections to the query engines of other nodes, one `PeerClient` per node and tenant. `dial(node, tenant)`
    asks the daemon for a connection; its answer must be passed to `connected` or `unreached`."""

    def __init__(self, dial: Callable[[str, str], None], counters: Counters) -> None:
        self._dial = dial
        self._counters = counters
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], PeerClient] = {}
        self._dialling: dict[tuple[str, str], Future[PeerClient]] = {}
        self._failures: dict[str, _Failure] = {}
        """By node, the failed dials since the last connection to it."""

    def get(self, node: str, tenant: str) -> Future[PeerClient]:
        """A future of the connection to `node` for queries of `tenant`, which is dialled if none is open. The future
        fails with Unreachable if the daemon cannot dial. It has failed already, with DeadlinePassed if the peer is
        overdue, and with Unreachable after a failed dial: the node is then dialled again for later callers, with
        growing pauses."""
        name = node, tenant
        with self._lock:
            failure = self._failures.get(node)
            future = self._dialling.get(name)
            if future is not None and failure is None:
                return future
            dials = future is None
            future = Future()
            client = self._clients.get(name)
            if client is not None and client.usable:
                future.set_result(client)
                return future
            if client is not None and client.open:
                future.set_exception(DeadlinePassed(f"the query engine of {node} missed a deadline"))
                return future
            if failure is None:
                self._dialling[name] = future
            else:
                future.set_exception(Unreachable(f"no query engine of {node}: {failure.reason}"))
                dials = dials and time.monotonic() >= failure.until
                if dials:
                    self._dialling[name] = Future()
        if dials:
            self._dial(node, tenant)
        return future

    def connected(self, node: str, tenant: str, sock: socket.socket, keys: RecordKeys | None = None) -> None:
        """Take the connection to the query engine of `node` that the daemon has dialled for `tenant`; this object owns
        `sock` from now on. `keys`: of its records; None if it is plain."""
        client = PeerClient(sock, node, self._counters, keys)
        with self._lock:
            self._clients[node, tenant] = client
            self._failures.pop(node, None)
            future = self._dialling.pop((node, tenant), None)
        if future is not None:
            future.set_result(client)

    def unreached(self, node: str, tenant: str, reason: str) -> None:
        """Record that the daemon could not dial the query engine of `node` for `tenant`: the callers that wait for the
        connection get Unreachable."""
        with self._lock:
            failure, now = self._failures.get(node), time.monotonic()
            if failure is None or now >= failure.until:
                pause = FIRST_PAUSE_S if failure is None else min(2 * failure.pause_s, LONGEST_PAUSE_S)
                self._failures[node] = _Failure(reason, pause, now + pause)
            future = self._dialling.pop((node, tenant), None)
        if future is not None:
            future.set_exception(Unreachable(f"no query engine of {node}: {reason}"))
