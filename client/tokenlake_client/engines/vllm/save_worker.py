"""Stores segments from vLLM's blocks, on a rank, in a background thread. Imports no engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey, WriteId
from tokenlake.wire import Code
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.common.reports import Counters
from tokenlake_client.engines.vllm.counters import Counts
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A job that stores segments from the blocks of one request."""

    job: int
    request: str
    keys: tuple[bytes, ...]
    parts: Sequence[Part]
    """The blocks of the segments that are stored."""
    tokens: Sequence[int]
    """The number of tokens of each key's segment."""
    pool: Callable[[], Pool | None]
    """Returns the pool, and may wait. Called in the background."""
    ready: Callable[[], None]
    """Returns once the blocks hold the results of the step. Called in the background."""
    first: int = 0
    """The index of the first segment in its prompt."""
    write: int = 0
    """The number of the reservation whose slots the ranks fill, each rank its own shards; 0: this rank fills whole
    segments, and reserves the slots itself."""
    incarnation: int = 0
    """The incarnation of the daemon that granted the reservation of the slots."""
    mask: int = 1
    """The bit mask of the shards that this rank fills."""
    shard: slice = field(default_factory=lambda: slice(None))
    """The bytes of a slot that are passed to the copies."""
    hints: Hints | None = None
    contents: tuple[bytes, ...] = ()
    marked: bool = False
    """True: the segments have in-flight markers, which are removed where the segments are not stored."""
    since: float = 0.0
    """The time in seconds, by `time.monotonic`, at which the job was submitted; set by `SaveWriter.submit`."""


class BlocksTaken(Exception):
    """The job ends, because vLLM has given its blocks to another request."""


class SaveWriter:
    """Executes save jobs in their order, in a thread of its own. A job may read its blocks until it counts as `done`,
    or until `take_back` has returned for it. All methods are for one thread."""

    def __init__(
        self,
        copy: Any,
        counters: Counters[Counts],
        report: Callable[[str, BaseException], None],
        *,
        queue: int,
        patience_s: float,
        ended: Callable[[Save, int, float], None] = lambda save, nbytes, seconds: None,
    ) -> None:
        """`copy`: see `copies`. `queue`: the largest number of jobs that wait. `patience_s`: the time since its
        submission for which a job waits while the pool refuses writes. `ended` is called, in any thread, with each job
        when it reads no block any more, the bytes that it copied and the seconds that it took."""
        self._copy = copy
        self._counters = counters
        self._report = report
        self._patience_s = patience_s
        self._ended = ended
        self._queue: BackgroundQueue[Save] = BackgroundQueue(self._execute, "tokenlake-save", queue)
        self._copying = threading.Lock()
        """Held by the thread that stores segments while it copies one segment out of its blocks."""
        self._taken: frozenset[int] = frozenset()
        """The numbers of the jobs whose blocks vLLM took back and that may not have ended. Only the thread that calls
        the methods writes it."""
        self._lost: deque[tuple[bytes, ...]] = deque(maxlen=queue)
        """The keys of jobs that were given up, whose in-flight markers the background thread is to remove."""
        self._last = 0

    @property
    def done(self) -> int:
        """The number of the newest job such that this job and all earlier ones read no block any more."""
        oldest = self._queue.oldest()
        return oldest.job - 1 if oldest is not None else self._last

    def submit(self, save: Save) -> None:
        """Store the segments of `save` in the background."""
        self._last = max(self._last, save.job)
        if not self._queue.submit(replace(save, since=time.monotonic())):
            self._give_up(save)

    def skip(self, job: int) -> None:
        """Count the save jobs up to number `job` as done, for a rank that does not execute them."""
        self._last = max(self._last, job)

    def take_back(self, jobs: Collection[int]) -> None:
        """Give up these jobs: their blocks are not read after this call. Waits for the copy of one segment at most."""
        if not jobs:
            return
        done = self.done
        self._taken = frozenset(job for job in self._taken.union(jobs) if job > done)
        for save in self._queue.withdraw(lambda save: save.job in jobs):
            self._give_up(save)
        with self._copying:
            # The copy that was under way has ended, and each later copy sees that the blocks were taken back.
            pass

    def drain(self, timeout: float) -> None:
        """Execute the waiting jobs, for at most `timeout` seconds, and give up the others: no block is read after this
        call, until the next job is submitted."""
        if not self.flush(timeout):
            self.take_back(range(self.done + 1, self._last + 1))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all save jobs are done; False when `timeout` seconds were not enough."""
        return self._queue.flush(timeout)

    def close(self, timeout: float) -> None:
        """Execute the waiting save jobs, for at most `timeout` seconds, and end the thread that stores."""
        self._queue.close(timeout)

    def _execute(self, save: Save) -> None:
        started = time.perf_counter()
        pool, nbytes = None, 0
        try:
            pool = save.pool()
            if pool is None:
                self._count_lost(save)
            else:
                save.ready()
                nbytes = self._save(save, pool)
        except Exception as error:
            self._drop(save)
            if not isinstance(error, BlocksTaken):
                self._report("storing segments", error)
        while pool is not None and self._lost:
            pool.engine.mark_in_flight([SegmentKey(key) for key in self._lost.popleft()], 0.0)
        seconds = time.perf_counter() - started
        self._counters.add(save_seconds=seconds)
        self._ended(save, nbytes, seconds)

    def _save(self, save: Save, pool: Pool) -> int:
        nbytes = 0

        def fill(part: Part, slot: NDArray[np.uint8]) -> None:
            nonlocal nbytes
            with self._copying:
                if save.job in self._taken:
                    raise BlocksTaken
                nbytes += self._copy.to_slot(slot[save.shard], part)

        codes = self._fill_reserved(save, pool, fill) if save.write else self._store(save, pool, fill)
        tokens = [save.tokens[part.segment] for part in save.parts]
        stored = sum(
            count for count, code in zip(tokens, codes, strict=True) if code in (Code.COMMITTED, Code.RESERVED)
        )
        self._counters.add(tokens_stored=stored, tokens_not_stored=sum(tokens) - stored)
        refused = [
            SegmentKey(save.keys[part.segment])
            for part, code in zip(save.parts, codes, strict=True)
            if Code(code).refused
        ]
        if refused and save.marked:
            pool.engine.mark_in_flight(refused, 0.0)
        return nbytes

    def _store(self, save: Save, pool: Pool, fill: Callable[[Part, NDArray[np.uint8]], None]) -> bytes:
        """Store whole segments. Returns a `Code` for each part."""
        # While the pool refuses writes, the jobs of a full queue together wait no longer than one of them.
        patience = max(0.0, self._patience_s - (time.monotonic() - save.since))
        return pool.store_all(
            [SegmentKey(save.keys[part.segment]) for part in save.parts],
            lambda at, slot: fill(save.parts[at], slot),
            save.first,
            patience,
            request=save.request,
            hints=save.hints,
            contents=save.contents,
        )

    def _fill_reserved(self, save: Save, pool: Pool, fill: Callable[[Part, NDArray[np.uint8]], None]) -> bytes:
        """Fill this rank's shards of the reserved slots. Returns a `Code` for each part."""
        by_segment = {part.segment: part for part in save.parts}
        write = pool.engine.attach_write(WriteId(save.write))
        try:
            if write.incarnation != save.incarnation:
                raise Unreachable("the daemon has restarted, so the reserved slots no longer exist")
            if any(index not in by_segment for index, _ in write.slots):
                # All ranks find the same: vLLM has given up the first blocks of a segment.
                raise BlocksTaken
            for index, slot in write.slots:
                fill(by_segment[index], slot)
        except BaseException:
            write.abort()
            raise
        try:
            codes = write.commit(save.mask)
        finally:
            write.leave()
        # The codes end with the last segment that was reserved: the pool has the others already, or refused them.
        known = codes.ljust(len(save.keys), bytes([Code.EXISTS]))
        return bytes(known[part.segment] for part in save.parts)

    def _give_up(self, save: Save) -> None:
        self._drop(save)
        self._ended(save, 0, 0.0)

    def _drop(self, save: Save) -> None:
        """Count the segments of a job that is not executed, and let no other engine wait for them."""
        self._count_lost(save)
        if save.marked:
            self._lost.append(save.keys)

    def _count_lost(self, save: Save) -> None:
        self._counters.add(tokens_not_stored=sum(save.tokens))
