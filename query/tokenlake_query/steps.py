"""One query of an engine under way: what it waits for, and the merging of what has come.

::

                      +--> local segments ------> computed here --------+
    Query of a layer -+--> Ask to node B -------> Result ---------------+--> merged, float32 --> Answered
                      +--> Ask to node C --x                            |
                             broken, LOST, or half the deadline gone:   |
                             brought here ------> computed here --------+
                             or not to be had: the part is LOST
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial as bind

import numpy as np
from numpy.typing import NDArray

from tokenlake.attention import Partial, Stored, merge
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake_query.segments import Segments
from tokenlake_query.timer import Timer
from tokenlake_query.views import Share, View
from tokenlake_query.work import Task, Worker

__all__ = ["Part", "Round", "Step", "Tools"]

PATIENCE = 0.5
"""Share of the deadline after which what a peer did not answer is brought here."""
LATEST = 0.95
"""Share of the deadline after which nothing is waited for any more: the answer must arrive within it."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What rounds are made with."""

    worker: Worker
    timer: Timer
    fetching: Executor
    """Threads that may wait for the daemon."""


@dataclass(frozen=True, slots=True)
class Part:
    """The queries of one view in a step."""

    view: View
    rows: slice


@dataclass(frozen=True, slots=True)
class Step:
    """What `Query` of a buffer means now. The arrays lie in the buffer, which the engine shares."""

    number: int
    dtype: str
    parts: tuple[Part, ...]
    queries: Stored
    outputs: NDArray[np.float32]
    sums: NDArray[np.float32]


class Round:
    """One `Query`. `begin` once; `void` when another one of the buffer takes its place. Never waits, but for the lock
    in which results are merged. Once it is over it holds neither views nor the buffer, whoever still holds it."""

    def __init__(self, step: Step, query: wire.Query, tools: Tools, answer: Callable[[wire.Answered], None]) -> None:
        self._step: Step | None = step
        """None once it is over."""
        self._query = query
        self._tools = tools
        self._answer = answer
        self._lock = threading.Lock()
        now = time.monotonic()
        self._patient_until = now + PATIENCE * query.deadline_s
        self._until = now + LATEST * query.deadline_s
        self._codes = bytearray([Code.LOCAL]) * len(step.parts)
        self._awaited: list[set[Hashable]] = [set() for _ in step.parts]
        self._left = 1
        """Answers to come, and `begin` while it asks: whoever is asked may answer before it has counted what was
        sent."""
        self._begun = [False] * len(step.parts)
        """Is there anything in the outputs to merge with?"""
        self._sent_bytes = 0
        self._received_bytes = 0

    def begin(self) -> None:
        """Ask everybody, then compute what is here."""
        step = self._step
        assert step is not None
        tasks: list[Task] = []
        asks: dict[int, _Ask] = {}
        gone: list[tuple[int, Share]] = []
        for number, part in enumerate(step.parts):
            view = part.view
            segments, shares = view.holding
            if view.lost:
                self._codes[number] = Code.LOST
                continue
            if segments:
                self._await(number, None)
                tasks.append(self._task(step, number, segments, None))
            elif not shares:
                self._put(step, number, None)
            for share in shares:
                self._await(number, share)
                if share.asker.answers:
                    asks.setdefault(id(share.asker), _Ask(self)).add(number, share)
                else:
                    gone.append((number, share))
        for ask in asks.values():
            self._sent_bytes += ask.send(step, self._query.layer)
        for number, share in gone:
            self.replace(number, share)
        if asks:
            self._tools.timer.at(self._patient_until, bind(self._impatient, list(asks.values())))
        self._tools.timer.at(self._until, self._expire)
        if tasks:
            # Last: this thread would keep the interpreter from the one that computes.
            self._tools.worker.submit(tasks)
        with self._lock:
            self._left -= 1
            self._finish_if_done()

    def void(self) -> None:
        """Nobody wants the answer, and the buffer belongs to another round."""
        with self._lock:
            self._step = None

    def wanted(self) -> bool:
        """Is an answer still to be given?"""
        return self._step is not None

    def received(self, nbytes: int) -> None:
        """Of results, over the network."""
        with self._lock:
            self._received_bytes += nbytes

    def put(self, number: int, source: Hashable, partial: Partial | None) -> None:
        """What `source` has to say on part `number`; ignored when it is not waited for any more. The arrays may change
        afterwards. None: it has nothing, and nobody else has."""
        with self._lock:
            step = self._step
            if step is None or source not in self._awaited[number]:
                return
            if partial is None:
                self._lose(number)
            else:
                self._put(step, number, partial)
                self._awaited[number].discard(source)
                self._left -= 1
            self._finish_if_done()

    def replace(self, number: int, share: Share) -> None:
        """`share` is not answered by who had it: bring it here, in a thread that may wait."""
        if self._step is not None and share in self._awaited[number]:
            self._tools.fetching.submit(self._bring, number, share)

    # -- inside

    def _await(self, number: int, source: Hashable) -> None:
        self._awaited[number].add(source)
        self._left += 1

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

    def _put(self, step: Step, number: int, partial: Partial | None) -> None:
        rows = step.parts[number].rows
        outputs, sums = step.outputs[rows], step.sums[rows]
        if partial is None:
            outputs[:], sums[:] = 0, -np.inf
        elif self._begun[number]:
            outputs[:], sums[:] = merge([Partial(outputs, sums), partial])
        else:
            outputs[:], sums[:] = partial
        self._begun[number] = True

    def _bring(self, number: int, share: Share) -> None:
        step = self._step
        if step is None:
            return
        segments = step.parts[number].view.bring(share, self._until)
        with self._lock:
            # It may have come after all.
            if self._step is None or share not in self._awaited[number]:
                return
            if segments is not None:
                brought = ("brought", share)
                self._awaited[number].remove(share)
                self._awaited[number].add(brought)
        if segments is None:
            self.put(number, share, None)
        else:
            self._tools.worker.submit([self._task(step, number, segments, brought)])

    def _impatient(self, asks: Sequence[_Ask]) -> None:
        for ask in asks:
            unanswered = [(number, share) for number, share in ask.parts if share in self._awaited[number]]
            if unanswered and self.wanted():
                unanswered[0][1].asker.let_deadline_pass()
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
        self._left -= len(self._awaited[number])
        self._awaited[number].clear()

    def _finish_if_done(self) -> None:
        if self._left or self._step is None:
            return
        self._step = None
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
    """The parts of one round that one peer is asked about: a `Question`."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self.parts: list[tuple[int, Share]] = []

    def add(self, number: int, share: Share) -> None:
        self.parts.append((number, share))

    def send(self, step: Step, layer: int) -> int:
        """Straight from the engine's buffer; how many bytes."""
        parts = [step.parts[number] for number, _ in self.parts]
        queries = [step.queries[part.rows].reshape(-1).view(np.uint8).data for part in parts]
        tokens = [part.rows.stop - part.rows.start for part in parts]
        views = [share.view for _, share in self.parts]
        shape = parts[0].view.attention.shape
        asker = self.parts[0][1].asker
        return asker.ask(self, layer, shape, step.dtype, list(zip(views, tokens, strict=True)), queries)

    def wants(self) -> bool:
        return self._round.wanted()

    def received(self, nbytes: int) -> None:
        self._round.received(nbytes)

    def arrived(self, index: int, partial: Partial) -> None:
        self._round.put(*self.parts[index], partial)

    def missing(self, index: int) -> None:
        self._round.replace(*self.parts[index])
