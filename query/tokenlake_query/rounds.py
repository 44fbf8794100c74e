"""A round: one query of an engine, from its requests to peers until its results are merged or its deadline passes.

::

                      +--> local segments ------> computed here --------+
    Query of a layer -+--> Ask to node B -------> Result ---------------+--> merged, float32 --> Answered
                      +--> Ask to node C --x                            |
                             broken, LOST, or half the deadline gone:   |
                             fetched -----------> computed here --------+
                             or cannot be fetched: the part is LOST
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial as bind

import numpy as np
from numpy.typing import NDArray

from tokenlake.attention import Partial, Stored, merge
from tokenlake.errors import LimitReached
from tokenlake.timers import Timer
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake_query.compute_thread import ComputeThread, Task
from tokenlake_query.segments import Segments
from tokenlake_query.tenant_threads import TenantThreads
from tokenlake_query.timer_thread import TimerThread
from tokenlake_query.views import Share, View

PEER_SHARE = 0.5
"""Fraction of a query's deadline within which peers must answer. If a peer has not, the segments that it should have
attended to are fetched, and this process attends to them."""
FETCH_BYTES = 256
"""Memory of a fetch that waits for a thread; an estimate."""
ROUND_SHARE = 0.95
"""Fraction of a query's deadline after which its round ends, so that the answer reaches the engine within the
deadline."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads that work on queries of all tenants, and the tenant for whose queries they are used."""

    tenant: str
    compute: ComputeThread
    timer: TimerThread
    fetching: TenantThreads
    """Threads that fetch segments from other nodes; they may block while they wait for the daemon."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a query: the queries that attend to one view. They are the `rows` of the arrays in the engine's
    memory."""

    view: View
    rows: slice


@dataclass(frozen=True, slots=True)
class Step:
    """The setting of an engine's query buffer for all following queries (`wire.Step`): the parts, each the queries over
    one view, and the arrays in the memory that the engine shares."""

    number: int
    dtype: str
    parts: tuple[Part, ...]
    queries: Stored
    outputs: NDArray[np.float32]
    sums: NDArray[np.float32]


class Round:
    """The work on one `wire.Query`. Call `begin` once, and `cancel` when the buffer is closed or gets another round.

    Thread-safe. No call blocks, except for the lock under which results are merged. A round that is over refers to
    neither views nor the buffer, although a peer's request may still refer to the round."""

    def __init__(
        self, step: Step, query: wire.Query, threads: Threads, answer: Callable[[wire.Answered], None]
    ) -> None:
        """`answer` is called once with the codes of all parts, unless the round is cancelled."""
        self._step: Step | None = step
        """The parts and arrays of the query; None once the work on it is over, because it was answered or cancelled."""
        self._query = query
        self._threads = threads
        self._answer = answer
        self._lock = threading.Lock()
        now = time.monotonic()
        self._peers_until = now + PEER_SHARE * query.deadline_s
        self._until = now + ROUND_SHARE * query.deadline_s
        self._codes = bytearray([Code.LOCAL]) * len(step.parts)
        self._awaited: list[set[Hashable]] = [set() for _ in step.parts]
        """For each part of the query, the sources whose results are still to come: None for the local segments, a
        `Share` for a peer, ("fetched", share) for a share that was fetched and is computed by this process."""
        self._remaining = 1
        """Number of results of the query that are still to come, plus one while `begin` runs, so that a fast answer of
        a peer does not end the work before `begin` has counted the bytes that it sent."""
        self._begun = [False] * len(step.parts)
        """For each part of the query, True if its outputs hold a result already, with which the next one is merged."""
        self._sent_bytes = 0
        self._received_bytes = 0
        self._timed: list[Timer] = []
        """Timers that are cancelled when the round is over."""

    def begin(self) -> None:
        """Start the work on the query: ask the peers, then compute over the local segments."""
        step = self._step
        assert step is not None
        tasks: list[Task] = []
        asks: dict[int, _Ask] = {}
        unusable: list[tuple[int, Share]] = []
        for number, part in enumerate(step.parts):
            view = part.view
            local, shares = view.placement
            if view.lost:
                self._codes[number] = Code.LOST
                continue
            if local:
                self._await(number, None)
                tasks.append(self._task(step, number, local, None))
            elif not shares:
                self._merge(step, number, None)
            for share in shares:
                self._await(number, share)
                if share.peer.usable:
                    asks.setdefault(id(share.peer), _Ask(self)).add(number, share)
                else:
                    unusable.append((number, share))
        for ask in asks.values():
            self._sent_bytes += ask.send(step, self._query.layer)
        for number, share in unusable:
            self.replace(number, share)
        if asks:
            late = self._threads.timer.at(self._peers_until, bind(self._replace_late, list(asks.values())))
            self._timed.append(late)
        self._timed.append(self._threads.timer.at(self._until, self._expire))
        if tasks:
            # The local work is submitted last: from here on the computing thread competes with this one for the
            # interpreter lock.
            self._threads.compute.submit(tasks, self._threads.tenant)
        with self._lock:
            self._remaining -= 1
            self._finish_if_done()

    def cancel(self) -> None:
        """End the work on the query without an answer, because the engine closed its buffer or uses it for another
        query."""
        with self._lock:
            self._end()

    def wanted(self) -> bool:
        """False once the query was answered or cancelled."""
        return self._step is not None

    def received(self, nbytes: int) -> None:
        """Count `nbytes` bytes of results that peers sent for the query."""
        with self._lock:
            self._received_bytes += nbytes

    def put(self, number: int, source: Hashable, partial: Partial | None) -> None:
        """Merge the result of `source` (this node or a peer) into the outputs of part `number` of the query; None: the
        part is LOST. Ignored when the work on the query is over or no longer waits for `source`. The arrays are
        borrowed for the call."""
        with self._lock:
            step = self._step
            if step is None or source not in self._awaited[number]:
                return
            if partial is None:
                self._lose(number)
            else:
                self._merge(step, number, partial)
                self._awaited[number].discard(source)
                self._remaining -= 1
            self._finish_if_done()

    def replace(self, number: int, share: Share) -> None:
        """Fetch the segments of `share` to this node in a thread that may block, because the query engine that has them
        does not answer for part `number` of the query."""
        if self._step is not None and share in self._awaited[number]:
            try:
                self._threads.fetching.submit(self._threads.tenant, bind(self._fetch, number, share), FETCH_BYTES)
            except LimitReached:
                self.put(number, share, None)

    # -- inside

    def _await(self, number: int, source: Hashable) -> None:
        self._awaited[number].add(source)
        self._remaining += 1

    def _task(self, step: Step, number: int, segments: Segments, source: Hashable) -> Task:
        part = step.parts[number]
        return Task(
            part.view.attention,
            self._query.layer,
            segments,
            step.queries[part.rows],
            self.wanted,
            bind(self.put, number, source),
        )

    def _merge(self, step: Step, number: int, partial: Partial | None) -> None:
        """Merge `partial` into the outputs of part `number` of the query; None stands for attention over no
        segments."""
        rows = step.parts[number].rows
        outputs, sums = step.outputs[rows], step.sums[rows]
        if partial is None:
            outputs[:], sums[:] = 0, -np.inf
        elif self._begun[number]:
            outputs[:], sums[:] = merge([Partial(outputs, sums), partial])
        else:
            outputs[:], sums[:] = partial
        self._begun[number] = True

    def _fetch(self, number: int, share: Share) -> None:
        step = self._step
        if step is None:
            return
        segments = step.parts[number].view.fetch(share, self._until)
        fetched = ("fetched", share)
        with self._lock:
            # If the peer answered while its segments were fetched, they need not be computed here.
            if self._step is None or share not in self._awaited[number]:
                return
            if segments is not None:
                self._awaited[number].remove(share)
                self._awaited[number].add(fetched)
        if segments is None:
            self.put(number, share, None)
        else:
            self._threads.compute.submit([self._task(step, number, segments, fetched)], self._threads.tenant)

    def _replace_late(self, asks: Sequence[_Ask]) -> None:
        """Fetch the shares of `asks` that have no answer yet. Called when `PEER_SHARE` of the deadline has passed."""
        for ask in asks:
            unanswered = [(number, share) for number, share in ask.parts if share in self._awaited[number]]
            if unanswered and self.wanted():
                unanswered[0][1].peer.deadline_missed()
                for number, share in unanswered:
                    self.replace(number, share)

    def _expire(self) -> None:
        with self._lock:
            if self._step is not None:
                for number, awaited in enumerate(self._awaited):
                    if awaited:
                        self._lose(number)
                self._finish_if_done()

    def _lose(self, number: int) -> None:
        self._codes[number] = Code.LOST
        self._remaining -= len(self._awaited[number])
        self._awaited[number].clear()

    def _end(self) -> None:
        """End the work on the query. The caller holds the lock."""
        self._step = None
        for timed in self._timed:
            self._threads.timer.cancel(timed)
        self._timed.clear()

    def _finish_if_done(self) -> None:
        if self._remaining or self._step is None:
            return
        self._end()
        query = self._query
        self._answer(
            wire.Answered(
                query.buffer,
                query.step,
                query.layer,
                query.attempt,
                bytes(self._codes),
                self._sent_bytes,
                self._received_bytes,
            )
        )


class _Ask:
    """The request of one query to one peer, with the parts of the query that the peer is asked about. Takes the
    results, as a `ResultHandler`."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self.parts: list[tuple[int, Share]] = []

    def add(self, number: int, share: Share) -> None:
        self.parts.append((number, share))

    def send(self, step: Step, layer: int) -> int:
        """Send the queries of one layer to the peer, straight from the memory that the engine shares. Returns the
        number of bytes."""
        parts = [step.parts[number] for number, _ in self.parts]
        queries = [step.queries[part.rows].reshape(-1).view(np.uint8).data for part in parts]
        tokens = [part.rows.stop - part.rows.start for part in parts]
        views = [share.view for _, share in self.parts]
        shape = parts[0].view.attention.shape
        peer = self.parts[0][1].peer
        return peer.ask(self, layer, shape, step.dtype, list(zip(views, tokens, strict=True)), queries)

    def wanted(self) -> bool:
        return self._round.wanted()

    def received(self, nbytes: int) -> None:
        self._round.received(nbytes)

    def arrived(self, index: int, partial: Partial) -> None:
        self._round.put(*self.parts[index], partial)

    def missing(self, index: int) -> None:
        self._round.replace(*self.parts[index])
