"""The asking side between query engines: one connection per node, dialled when first needed."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from tokenlake import errors
from tokenlake.attention import LSE_BYTES, AttentionShape, Partial, as_float32, stored_dtype
from tokenlake.errors import DeadlinePassed, ProtocolRefused, Refused, TokenLakeError, Unreachable
from tokenlake.wire import HEADER_BYTES, Code
from tokenlake.wire import query as wire
from tokenlake.wire.frames import decode
from tokenlake_query.connection import Connection
from tokenlake_query.tally import Tally

__all__ = ["Asker", "Peers", "Question"]

log = logging.getLogger(__name__)


class Question(Protocol):
    """Who asks, and takes the answer; called in the reading thread of the connection."""

    def wants(self) -> bool:
        """Is it still waited for?"""

    def received(self, nbytes: int) -> None:
        """A result of so many bytes, its frame included."""

    def arrived(self, index: int, partial: Partial) -> None:
        """Part `index` of those that were asked about; the arrays are the caller's and change afterwards."""

    def missing(self, index: int) -> None:
        """Part `index` will not be answered."""


class _Asked(NamedTuple):
    question: Question
    shape: AttentionShape
    dtype: str
    tokens: tuple[int, ...]


class Asker:
    """A connection to the query engine of `node`. From any thread; never waits."""

    def __init__(self, sock: socket.socket, node: str, tally: Tally) -> None:
        self.node = node
        self._overdue = False
        """It let a deadline pass, and still owes an answer: whatever it says next ends that."""
        self._connection = Connection(sock, f"query engine of {node}")
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._opening: dict[int, Future[bytes]] = {}
        self._asked: dict[int, _Asked] = {}
        self._scratch = memoryview(bytearray())
        self._tally = tally
        self._connection.serve(self._handle, self._ended)

    @property
    def answers(self) -> bool:
        """Worth asking: connected and not overdue."""
        return self._connection.open and not self._overdue

    @property
    def open(self) -> bool:
        """Connected, as far as anybody noticed."""
        return self._connection.open

    def let_deadline_pass(self) -> None:
        """It has not answered in time: it is not asked until it says anything."""
        with self._lock:
            self._overdue = bool(self._asked or self._opening)

    def open_view(self, message: Callable[[int], wire.OpenView]) -> tuple[int, Future[bytes]]:
        """Its number there, and one code per key."""
        number = next(self._numbers)
        opened: Future[bytes] = Future()
        with self._lock:
            self._opening[number] = opened
        self._connection.send(message(number))
        if not self._connection.open:
            self._ended()
        return number, opened

    def close_view(self, view: int) -> None:
        """It will not be asked about again."""
        self._connection.send(wire.CloseView((view,)))

    def ask(
        self,
        question: Question,
        layer: int,
        shape: AttentionShape,
        dtype: str,
        parts: Sequence[tuple[int, int]],
        queries: Sequence[memoryview],
    ) -> int:
        """Send the `queries` of `parts` (view there, tokens); how many bytes that is. `question` is told of every part,
        once each."""
        number = next(self._numbers)
        with self._lock:
            self._asked[number] = _Asked(question, shape, dtype, tuple(tokens for _, tokens in parts))
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
            self._overdue = False
            opened = self._opening.pop(message.view, None)
        if isinstance(message, wire.Refused):
            if opened is None:
                raise Unreachable(f"{self.node} refused: {message.reason}")
            opened.set_exception(_as_error(message))
        elif opened is not None:
            opened.set_result(message.codes)

    def _result(self, result: wire.Result, frame: int) -> None:
        with self._lock:
            asked = self._asked.get(result.number)
        if asked is None or len(result.codes) != len(asked.tokens):
            raise ProtocolRefused(f"a result {result.number} that was not asked for")
        shape, stored = asked.shape, stored_dtype(asked.dtype)
        there = [tokens if code == Code.LOCAL else 0 for code, tokens in zip(result.codes, asked.tokens, strict=True)]
        outputs = sum(there) * shape.q_heads * shape.value_dim * stored.itemsize
        if result.nbytes != outputs + sum(there) * shape.q_heads * LSE_BYTES:
            raise ProtocolRefused(f"a result of {result.nbytes} bytes for {sum(there)} query tokens")
        if len(self._scratch) < result.nbytes:
            self._scratch = memoryview(bytearray(result.nbytes))
        payload = self._scratch[: result.nbytes]
        self._connection.reader.into(payload)
        with self._lock:
            # Only now: a connection that ends before tells that it is missing.
            self._overdue = False
            if self._asked.pop(result.number, None) is None:
                return
        if not asked.question.wants():
            self._tally.add(late_results=1)
            return
        asked.question.received(frame + result.nbytes)
        outs = np.frombuffer(payload[:outputs], stored).reshape(-1, shape.q_heads, shape.value_dim)
        lses = np.frombuffer(payload[outputs:], np.float32).reshape(-1, shape.q_heads)
        start = 0
        for index, (tokens, code) in enumerate(zip(asked.tokens, result.codes, strict=True)):
            if code != Code.LOCAL:
                asked.question.missing(index)
                continue
            rows = slice(start, start + tokens)
            start += tokens
            asked.question.arrived(index, Partial(as_float32(outs[rows], asked.dtype), lses[rows]))

    def _ended(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, {}
            opening, self._opening = self._opening, {}
        for future in opening.values():
            future.set_exception(Unreachable(f"the connection to the query engine of {self.node} broke"))
        for left in asked.values():
            for index in range(len(left.tokens)):
                left.question.missing(index)


class Peers:
    """Askers by node. `dial` asks the daemon for a connection; `connected` and `unreached` are its answers."""

    def __init__(self, dial: Callable[[str], None], tally: Tally) -> None:
        self._dial = dial
        self._tally = tally
        self._lock = threading.Lock()
        self._askers: dict[str, Asker] = {}
        self._dialling: dict[str, Future[Asker]] = {}

    def get(self, node: str) -> Future[Asker]:
        """A connection; another one after the last broke. Fails with Unreachable, at once for one that is overdue."""
        with self._lock:
            future = self._dialling.get(node)
            if future is not None:
                return future
            future = Future()
            asker = self._askers.get(node)
            if asker is not None and asker.answers:
                future.set_result(asker)
                return future
            if asker is not None and asker.open:
                future.set_exception(DeadlinePassed(f"the query engine of {node} still owes an answer"))
                return future
            self._dialling[node] = future
        self._dial(node)
        return future

    def connected(self, node: str, sock: socket.socket) -> None:
        """The daemon made a connection."""
        asker = Asker(sock, node, self._tally)
        with self._lock:
            self._askers[node] = asker
            future = self._dialling.pop(node, None)
        if future is not None:
            future.set_result(asker)

    def unreached(self, node: str, reason: str) -> None:
        """The daemon could not."""
        with self._lock:
            future = self._dialling.pop(node, None)
        if future is not None:
            future.set_exception(Unreachable(f"no query engine of {node}: {reason}"))


def _as_error(refused: wire.Refused) -> TokenLakeError:
    kind = getattr(errors, refused.kind, None)
    return kind(refused.reason) if isinstance(kind, type) and issubclass(kind, Refused) else Unreachable(refused.reason)
