"""The side of the connector on a rank, behind vLLM's OffloadingConnector. Imports no engine.

vLLM takes each job for a success. A load that fails names its request, so that the connector reports it to vLLM and the
prompt is computed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenlake.errors import Unreachable
from tokenlake_client.engines.common.background import BackgroundQueue
from tokenlake_client.engines.vllm.adapters import LoadedAdapters
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.load_worker import load_parts
from tokenlake_client.engines.vllm.offloading.chunks import chunk_parts, whole_chunks
from tokenlake_client.engines.vllm.offloading.jobs import LoadJob, Member, StoreJob
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.engines.vllm.rank_part import RankPart
from tokenlake_client.engines.vllm.save_worker import BlocksTaken, Save
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.pool import Pool


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


@dataclass(frozen=True, slots=True)
class _Load:
    number: int
    job: LoadJob
    parts: list[Part]
    ready: Callable[[], None]


class ChunkWorker(RankPart):
    """Executes jobs in two background threads, one for loads and one for stores. All methods are for one thread."""

    def __init__(
        self,
        copy: Any,
        place: RankPlace,
        settings: EngineSettings,
        join: Callable[[int, bytes], Pool],
        counters: EngineCounters,
        report: Callable[[str, BaseException], None],
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """As `RankPart`; without `copy` the rank stores nothing, and its loads fail. `join(session, layout)` opens a
        connection in a session."""
        self._layout = b""
        session = RankSession(lambda number: join(number, self._layout), report)
        super().__init__(
            session,
            copy,
            settings,
            counters,
            report,
            adapters,
            lambda save, nbytes, seconds: self._end(save.job, nbytes, seconds),
        )
        self._place = place
        self._join_s = settings.deadlines.connect_s
        self._loads: BackgroundQueue[_Load] = BackgroundQueue(self._load, "tokenlake-load")
        self._writing = threading.Lock()
        """Held by the thread of the loads while it copies one chunk."""
        self._taken: frozenset[int] = frozenset()
        """The loads that have not ended and whose blocks vLLM took back. Only the thread that calls the methods writes
        it."""
        self._loading: set[int] = set()
        """The loads whose end `take_finished` has not returned. For the thread that calls the methods."""
        self._lock = threading.Lock()
        """Guards the outcomes, which the background threads add."""
        self._finished: list[Finished] = []
        self._failed: dict[int, str] = {}
        self._reported: set[str] = set()

    def submit_store(self, number: int, blocks: BlockRange, job: StoreJob) -> None:
        """Store chunks in the background. Never raises."""
        place, member = self._place, job.member
        at = {group: position for position, group in enumerate(place.group_ids)}
        tokens = [place.group_tokens[at.get(group, 0)] * place.chunk_blocks for group in job.groups]
        try:
            parts = whole_chunks(self._parts(job.groups, blocks), place.chunk_blocks)
            # An adapter may be loaded again before the chunks are stored, so the check belongs to the step.
            if self._copy is not None and parts and self._adapters.may_store(job.adapter):
                save = Save(
                    job=number,
                    request=job.request,
                    keys=job.keys,
                    parts=parts,
                    tokens=tokens,
                    pool=lambda: self._joined(member),
                    ready=self._copy.computed(),
                    write=job.write,
                    incarnation=member.incarnation,
                    mask=1 << place.shard,
                    shard=self._shard(member),
                    hints=job.hints,
                )
                self._saves.submit(save)
                return
        except Exception as error:
            self._report("storing segments", error)
        self._counters.add(tokens_not_stored=sum(tokens))
        self._end(number, 0, 0.0)

    def submit_load(self, number: int, job: LoadJob, blocks: BlockRange) -> None:
        """Load chunks in the background. Never raises."""
        self._loading.add(number)
        try:
            if self._copy is not None:
                load = _Load(number, job, self._parts(job.groups, blocks), self._copy.computed())
                if self._loads.submit(load):
                    return
        except Exception as error:
            self._report("loading segments", error)
        self._fail(number, job)

    def take_finished(self) -> list[Finished]:
        """The jobs that ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
            self._reported.update(self._failed.pop(one.job) for one in finished if one.job in self._failed)
        self._loading.difference_update(one.job for one in finished)
        return finished

    def take_failed(self) -> set[str]:
        """The requests of the loads that failed, of those that `take_finished` has returned, since the last call: their
        blocks hold no valid cache."""
        with self._lock:
            failed, self._reported = self._reported, set()
        return failed

    def wait(self, jobs: Collection[int]) -> None:
        """Give these jobs up: their blocks are not touched after this call. Waits for the copy of one chunk at most."""
        self._saves.take_back(jobs)
        self._taken = frozenset(self._taken.union(jobs) & self._loading)
        for load in self._loads.withdraw(lambda load: load.number in jobs):
            self._fail(load.number, load.job)
        with self._writing:
            # The copy that was under way has ended, and each later copy sees that the blocks were taken back.
            pass

    def _end_loads(self, timeout: float) -> None:
        self.wait(self._loading.copy())

    def _parts(self, groups: Sequence[int], blocks: BlockRange) -> list[Part]:
        return chunk_parts(groups, self._place.group_ids, *blocks, self._place.chunk_blocks)

    def _shard(self, member: Member) -> slice:
        return slice(self._place.shard * member.shard_bytes, (self._place.shard + 1) * member.shard_bytes)

    def _joined(self, member: Member) -> Pool:
        """The connection to the session of a job, which is joined if necessary. Raises `Unreachable`."""
        if member.layout:
            self._layout = member.layout
        pool = self._session.get(member.session, member.incarnation, self._join_s)
        if pool is None:
            raise Unreachable("the rank has no connection to the daemon")
        return pool

    def _load(self, load: _Load) -> None:
        started = time.perf_counter()
        try:
            nbytes = self._load_parts(load)
        except Exception as error:
            self._fail(load.number, load.job, time.perf_counter() - started)
            if not isinstance(error, BlocksTaken):
                self._report("loading segments", error)
        else:
            self._end(load.number, nbytes, time.perf_counter() - started)

    def _load_parts(self, load: _Load) -> int:
        job = load.job
        if not load.parts:
            return 0

        @contextlib.contextmanager
        def copying() -> Iterator[None]:
            with self._writing:
                if load.number in self._taken:
                    raise BlocksTaken
                yield
                self._copy.finish()

        if -1 in job.segments:
            raise Unreachable("a segment of the load has no lease")
        pool = self._joined(job.member)
        if not self._adapters.may_load(job.adapter):
            raise BlocksTaken
        load.ready()
        parts = [part._replace(segment=job.segments[part.segment]) for part in load.parts]
        loaded = load_parts(
            pool,
            job.leases,
            job.member.incarnation,
            job.request,
            parts,
            self._copy,
            shard=self._shard(job.member),
            copying=copying,
        )
        if loaded.unfilled:
            raise Unreachable(loaded.unfilled)
        self._counters.add(tokens_loaded=sum(len(part.blocks) * self._place.group_tokens[part.group] for part in parts))
        return loaded.nbytes

    def _fail(self, number: int, job: LoadJob, seconds: float = 0.0) -> None:
        self._counters.add(loads_failed=1)
        with self._lock:
            self._failed[number] = job.request
        self._end(number, 0, seconds)

    def _end(self, number: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._finished.append(Finished(number, nbytes, seconds))
