"""The side of the connector on a rank, behind vLLM's OffloadingConnector: executes the jobs of the manager in the
background. Imports no engine.

A job may touch vLLM's blocks until it is reported by `take_finished`, or until `wait` has returned for it. vLLM takes
every job for a success, so a failed load is reported by `take_failed` too, and its request is computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.wire import Code
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.vllm.adapters import LoadedAdapters
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.offloading.chunks import ChunkPart, chunk_parts, whole_chunks
from tokenlake_client.engines.vllm.offloading.jobs import LoadJob, Member, StoreJob
from tokenlake_client.engines.vllm.offloading.lookup import WINDOW, runs
from tokenlake_client.engines.vllm.offloading.pool import ChunkRankPool
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings


class BlockRange(NamedTuple):
    """The blocks of a job as vLLM gives them (`chunks`)."""

    blocks: Sequence[int]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


class Finished(NamedTuple):
    """A job that a rank has ended."""

    job: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The part of each segment that a rank reads and writes."""

    shard: int
    """The index of the rank's shard."""
    group_ids: tuple[int, ...]
    """The numbers of the cache groups, in the order in which vLLM counts them in jobs."""
    group_tokens: tuple[int, ...]
    """The number of tokens of a block of each group."""
    chunk_blocks: int
    """The number of blocks of a chunk."""


class Pages(Protocol):
    """Copies chunks between a rank's shard of a slot and vLLM's blocks."""

    def to_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """Fill `shard` with a whole chunk; returns its bytes. The copy is complete on return."""
        ...

    def from_slot(self, shard: NDArray[np.uint8], part: ChunkPart) -> int:
        """Fill the blocks of `part`; returns their bytes. The copy is complete on return."""
        ...

    def computed(self) -> Callable[[], None]:
        """To be called in the thread that runs the step. Returns a function that a background thread calls before it
        reads or writes blocks."""
        ...


class _Taken(Exception):
    """The job ends, because vLLM has given its blocks to another request."""


J = TypeVar("J", LoadJob, StoreJob)


@dataclass(frozen=True, slots=True)
class _Task(Generic[J]):
    number: int
    job: J
    parts: list[ChunkPart]
    ready: Callable[[], None]


class ChunkWorker:
    """Executes jobs in two background threads, one for loads and one for stores. All methods are for one thread."""

    def __init__(
        self,
        pages: Pages | None,
        place: RankPlace,
        settings: EngineSettings,
        join: Callable[[int, bytes], ChunkRankPool],
        counters: EngineCounters,
        report: Callable[[str, BaseException], None],
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """`pages`: None where the rank cannot read and write vLLM's cache: it stores nothing, and its loads fail.
        `join(session, layout)` opens a connection in a session. `report` is called with the operation that failed and
        its error. `adapters`: the LoRA adapters that vLLM has loaded on this rank."""
        self._pages = pages
        self._adapters = adapters or LoadedAdapters(lambda line: None)
        self._place = place
        self._settings = settings
        self._join = join
        self._counters = counters
        self._report = report
        self._layout = b""
        self._session: RankSession[ChunkRankPool] = RankSession(self._open, report)
        self._loads: BackgroundQueue[_Task[LoadJob]] = BackgroundQueue(self._load, "tokenlake-load")
        self._stores: BackgroundQueue[_Task[StoreJob]] = BackgroundQueue(
            self._store, "tokenlake-save", settings.write_queue
        )
        self._reading, self._writing = threading.Lock(), threading.Lock()
        """Held by the thread of the stores, or the loads, while it copies one chunk."""
        self._taken: frozenset[int] = frozenset()
        """The jobs that have not ended and whose blocks vLLM took back. Only the thread that calls the methods writes
        it."""
        self._unfinished: set[int] = set()
        """The jobs that were submitted and whose end `take_finished` has not returned. For the thread that calls the
        methods."""
        self._lock = threading.Lock()
        """Guards the outcomes, which the background threads add."""
        self._finished: list[Finished] = []
        self._failed: dict[int, str] = {}
        self._reported: set[str] = set()

    def submit_store(self, number: int, blocks: BlockRange, job: StoreJob) -> None:
        """Store chunks in the background. Never raises."""
        self._unfinished.add(number)
        try:
            parts = whole_chunks(self._parts(job.groups, blocks), self._place.chunk_blocks)
            # An adapter may be loaded again before the chunks are stored, so the check belongs to the step.
            if self._pages is not None and parts and self._adapters.may_store(job.adapter):
                task = _Task(number, job, parts, self._pages.computed())
                if self._stores.submit(task):
                    return
        except Exception as error:
            self._report("storing segments", error)
        self._lost(job)
        self._end(number, 0, 0.0)

    def submit_load(self, number: int, job: LoadJob, blocks: BlockRange) -> None:
        """Load chunks in the background. Never raises."""
        self._unfinished.add(number)
        try:
            if self._pages is not None:
                parts = self._parts(job.groups, blocks)
                if self._loads.submit(_Task(number, job, parts, self._pages.computed())):
                    return
        except Exception as error:
            self._report("loading segments", error)
        self._fail(number, job)
        self._end(number, 0, 0.0)

    def take_finished(self) -> list[Finished]:
        """The jobs that ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
            self._reported.update(self._failed.pop(one.job) for one in finished if one.job in self._failed)
        self._unfinished.difference_update(one.job for one in finished)
        return finished

    def take_failed(self) -> set[str]:
        """The requests of the loads that failed, of those that `take_finished` has returned, since the last call: their
        blocks hold no valid cache."""
        with self._lock:
            failed, self._reported = self._reported, set()
        return failed

    def wait(self, jobs: Collection[int]) -> None:
        """Give these jobs up: their blocks are not touched after this call. Waits for the copy of one chunk at most."""
        if not jobs:
            return
        self._taken = frozenset(self._taken.union(jobs) & self._unfinished)
        for store in self._stores.withdraw(lambda task: task.number in jobs):
            self._lost(store.job)
            self._end(store.number, 0, 0.0)
        for load in self._loads.withdraw(lambda task: task.number in jobs):
            self._fail(load.number, load.job)
            self._end(load.number, 0, 0.0)
        for copying in (self._reading, self._writing):
            with copying:
                # The copy that was under way has ended, and each later copy sees that the blocks were taken back.
                pass

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all chunks are stored; False when `timeout` seconds were not enough."""
        return self._stores.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Store the waiting chunks, for at most `timeout` seconds, and leave the session."""
        self._stores.close(timeout)
        self._loads.close(timeout, drain=False)
        self._session.close()

    def _open(self, session: int) -> ChunkRankPool:
        return self._join(session, self._layout)

    def _parts(self, groups: Sequence[int], blocks: BlockRange) -> list[ChunkPart]:
        place = self._place
        return chunk_parts(groups, place.group_ids, *blocks, place.chunk_blocks)

    def _member(self, member: Member) -> ChunkRankPool | None:
        if member.layout:
            self._layout = member.layout
        return self._session.get(member.session, member.incarnation, self._settings.deadlines.connect_s)

    def _load(self, task: _Task[LoadJob]) -> None:
        started, nbytes = time.perf_counter(), 0
        try:
            nbytes = self._load_parts(task)
        except Exception as error:
            self._fail(task.number, task.job)
            if not isinstance(error, _Taken):
                self._report("loading segments", error)
        seconds = time.perf_counter() - started
        self._counters.add(load_seconds=seconds)
        self._end(task.number, nbytes, seconds)

    def _load_parts(self, task: _Task[LoadJob]) -> int:
        job, pages = task.job, self._pages
        pool = self._member(job.member)
        if pool is None or pages is None or -1 in job.segments:
            raise Unreachable("the rank has no connection to the daemon that has the segments")
        if not self._adapters.may_load(job.adapter):
            raise _Taken
        task.ready()
        by_segment = {job.segments[part.chunk]: part for part in task.parts}
        lease = pool.attach(*map(LeaseId, job.leases), request=job.request)
        nbytes = 0
        try:
            if lease.incarnation != job.member.incarnation:
                raise Unreachable("the daemon has restarted, so the leased segments no longer exist")
            for start, stop in runs(sorted(by_segment), WINDOW):
                arrays = lease.fetch(start, stop)
                if len(arrays) < stop - start:
                    raise Unreachable(f"{stop - start - len(arrays)} segments were lost after the lookup")
                for index, array in enumerate(arrays, start):
                    with self._writing:
                        if task.number in self._taken:
                            raise _Taken
                        nbytes += pages.from_slot(self._shard(array, job.member), by_segment[index])
        finally:
            lease.release()
        tokens = sum(len(part.blocks) * self._place.group_tokens[part.group] for part in task.parts)
        self._counters.add(tokens_loaded=tokens)
        return nbytes

    def _store(self, task: _Task[StoreJob]) -> None:
        started, nbytes = time.perf_counter(), 0
        try:
            nbytes = self._store_parts(task)
        except Exception as error:
            self._lost(task.job)
            if not isinstance(error, _Taken):
                self._report("storing segments", error)
        seconds = time.perf_counter() - started
        self._counters.add(save_seconds=seconds)
        self._end(task.number, nbytes, seconds)

    def _store_parts(self, task: _Task[StoreJob]) -> int:
        job, pages = task.job, self._pages
        pool = self._member(job.member)
        if pool is None or pages is None:
            raise Unreachable("the rank has no connection to the daemon")
        task.ready()
        filled = 0

        def fill(part: ChunkPart, slot: NDArray[np.uint8]) -> None:
            nonlocal filled
            with self._reading:
                if task.number in self._taken:
                    raise _Taken
                filled += pages.to_slot(self._shard(slot, job.member), part)

        codes = self._write(pool, task, fill) if job.write else self._write_whole(pool, task, fill)
        stored = [code in (Code.COMMITTED, Code.RESERVED) for code in codes]
        tokens = [self._chunk_tokens(part.group) for part in task.parts]
        self._counters.add(
            tokens_stored=sum(count for count, done in zip(tokens, stored, strict=True) if done),
            tokens_not_stored=sum(count for count, done in zip(tokens, stored, strict=True) if not done),
        )
        return filled

    def _write_whole(
        self, pool: ChunkRankPool, task: _Task[StoreJob], fill: Callable[[ChunkPart, NDArray[np.uint8]], None]
    ) -> bytes:
        """Store whole segments, because this rank alone fills them. Returns a `Code` for each part."""
        job, parts = task.job, task.parts
        keys = [SegmentKey(job.keys[part.chunk]) for part in parts]
        patience = self._settings.write_patience_s
        return pool.store_all(
            keys, lambda at, slot: fill(parts[at], slot), 0, patience, request=job.request, hints=job.hints
        )

    def _write(
        self, pool: ChunkRankPool, task: _Task[StoreJob], fill: Callable[[ChunkPart, NDArray[np.uint8]], None]
    ) -> bytes:
        """Fill this rank's shard of the slots that the manager reserved. Returns a `Code` for each part."""
        by_key = {part.chunk: part for part in task.parts}
        write = pool.attach_write(WriteId(task.job.write))
        try:
            if write.incarnation != task.job.member.incarnation:
                raise Unreachable("the daemon has restarted, so the reserved slots no longer exist")
            if any(index not in by_key for index, _ in write.slots):
                # All ranks find the same: a chunk whose first blocks vLLM has given up has no part.
                raise _Taken
            for index, slot in write.slots:
                fill(by_key[index], slot)
        except BaseException:
            write.abort()
            raise
        codes = write.commit(1 << self._place.shard)
        write.leave()
        return bytes(codes[part.chunk] for part in task.parts)

    def _shard(self, segment: NDArray[np.uint8], member: Member) -> NDArray[np.uint8]:
        size = member.shard_bytes
        return segment[self._place.shard * size : (self._place.shard + 1) * size]

    def _chunk_tokens(self, group: int) -> int:
        return self._place.group_tokens[group] * self._place.chunk_blocks

    def _lost(self, job: StoreJob) -> None:
        at = {group: position for position, group in enumerate(self._place.group_ids)}
        self._counters.add(tokens_not_stored=sum(self._chunk_tokens(at.get(group, 0)) for group in job.groups))

    def _fail(self, number: int, job: LoadJob) -> None:
        self._counters.add(loads_failed=1)
        with self._lock:
            self._failed[number] = job.request

    def _end(self, number: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._finished.append(Finished(number, nbytes, seconds))
