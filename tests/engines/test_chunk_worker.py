"""Jobs of a rank behind vLLM's OffloadingConnector, and the copies of its pages, without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engines.chunk_pool import layout_of
from tokenlake.identity import SegmentKey, SessionId
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.engines.vllm.copies import HostCopy
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.offloading.chunks import (
    blocks_per_chunk,
    chunk_parts,
    parse_key,
    whole_chunks,
)
from tokenlake_client.engines.vllm.offloading.jobs import NOWHERE, LoadJob, Member, StoreJob
from tokenlake_client.engines.vllm.offloading.pages import PageCache, PageTable
from tokenlake_client.engines.vllm.offloading.worker import BlockRange, ChunkWorker, RankPlace
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.lease import Lease
from tokenlake_client.match import MatchOptions
from tokenlake_client.testing import MemoryPool

TIMEOUT_S = 10.0
BLOCKS, SIZE = 16, 2
GROUPS = (3, 5)
"""The numbers of two cache groups, in vLLM's order."""
KEYS = [SegmentKey(bytes([number]) * 32) for number in range(3)]
MATCH = MatchOptions(independent=True)


def test_a_key_of_vllm_names_hash_and_group() -> None:
    assert parse_key(bytes(range(32)) + (258).to_bytes(4, "big")) == (258, bytes(range(32)))


def test_chunks_have_about_as_many_tokens_as_a_segment() -> None:
    assert [blocks_per_chunk(blocks, 256) for blocks in ([16], [128, 128], [96], [544], [16, 32])] == [16, 2, 2, 1, 1]


def test_blocks_of_a_job_by_chunk() -> None:
    # Group 3: two chunks, the first from its second block on, the last ends after its first. Group 5: one whole chunk.
    parts = chunk_parts([3, 3, 5], GROUPS, [7, 8, 4, 6], [2, 2], [5, 0], SIZE)
    assert parts == [Part(0, 0, 1, (7,)), Part(1, 0, 0, (8,)), Part(2, 1, 0, (4, 6))]
    assert whole_chunks(parts, SIZE) == [Part(2, 1, 0, (4, 6))]
    assert whole_chunks(chunk_parts([3], GROUPS, [0, 9], [2, 0], [0, 0], SIZE), SIZE) == []


@pytest.mark.parametrize(
    ("keys", "sizes", "indices"),
    [([3], [4, 0], [0, 0]), ([3, 3], [2, 0], [0, 0]), ([4], [2, 0], [0, 0]), ([5], [2, 0], [0, 0])],
)
def test_keys_and_blocks_that_do_not_fit_are_refused(keys: list[int], sizes: list[int], indices: list[int]) -> None:
    """Also a chunk of another group than its blocks."""
    with pytest.raises(ValueError, match="group"):
        chunk_parts(keys, GROUPS, [1, 2, 3, 4], sizes, indices, SIZE)


class Scene:
    """A daemon, the manager's connection to it, and what the manager has leased."""

    def __init__(self, shards: int = 1) -> None:
        self.layout = layout_of(shards, 48)
        self.pool = MemoryPool(self.layout)
        self.leases: list[Lease] = []
        self.member = Member(int(self.pool.engine.session), self.pool.engine.incarnation, self.layout.encode(), 48)

    def join(self, session: int, layout: bytes) -> MemoryPool:
        return MemoryPool(OpaqueLayout.decode(layout), self.pool.daemon, session=SessionId(session))

    def stored(self) -> dict[int, NDArray[np.uint8]]:
        """The contents of the stored segments, by the index of the key."""
        with self.pool.match(KEYS, MATCH) as lease:
            return dict(zip(map(KEYS.index, lease.keys), [array.copy() for array in lease.fetch()], strict=True))


class Rank:
    """A rank with a cache of two groups: the first has two tables, whose pages are padded, the second has one."""

    def __init__(self, pools: Scene, shard: int = 0, *, served: bool = True, seed: int = 0, **settings: Any) -> None:
        source = torch.Generator().manual_seed(seed)

        def table(width: int, used: int) -> PageTable:
            pages = torch.randint(-100, 100, (BLOCKS, width), dtype=torch.int8, generator=source)
            return PageTable(pages, used)

        self.groups = [[table(12, 10), table(8, 8)], [table(24, 20)]]
        self.counters = EngineCounters()
        self.reports: list[str] = []
        pages = HostCopy(PageCache(self.groups, SIZE))
        self.gate = threading.Event()
        self.gate.set()
        self.pages = _Gated(pages, self.gate)
        self.worker = ChunkWorker(
            self.pages if served else None,
            RankPlace(shard, GROUPS, (16, 16), SIZE),
            EngineSettings(**settings),
            pools.join,
            self.counters,
            lambda operation, error: self.reports.append(f"{operation}: {error}"),
        )

    def contents(self, group: int, blocks: list[int]) -> list[NDArray[np.int8]]:
        return [table.pages[blocks, : table.nbytes].numpy().copy() for table in self.groups[group]]

    def clear(self) -> None:
        for group in self.groups:
            for table in group:
                table.pages.zero_()

    def finished(self, *jobs: int) -> set[str]:
        """Wait for the jobs. Returns the failed requests."""
        until, ended = time.monotonic() + TIMEOUT_S, set[int]()
        while not ended >= set(jobs):
            ended.update(one.job for one in self.worker.take_finished())
            assert time.monotonic() < until
            time.sleep(0.001)
        return self.worker.take_failed()


class _Gated:
    """Copies that wait for an event."""

    def __init__(self, pages: HostCopy, gate: threading.Event) -> None:
        self._pages, self._gate = pages, gate
        self.ready = pages.computed()
        self.copying = threading.Event()
        self.calls: list[str] = []

    def to_slot(self, shard: Any, part: Part) -> int:
        self.copying.set()
        assert self._gate.wait(TIMEOUT_S)
        return self._pages.to_slot(shard, part)

    def from_slot(self, shard: Any, part: Part) -> int:
        assert self._gate.wait(TIMEOUT_S)
        return self._pages.from_slot(shard, part)

    def finish(self) -> None:
        self._pages.finish()

    def computed(self) -> Callable[[], None]:
        return self.ready

    def release_locks(self) -> None:
        self.calls.append("release")

    def take_locks(self) -> None:
        self.calls.append("take")


STORED = BlockRange([1, 2, 3, 4, 9, 8], [4, 2], [0, 0])
"""Two chunks of group 3, and one of group 5."""


@pytest.fixture
def pools() -> Scene:
    return Scene()


def store(pools: Scene, write: int = 0) -> StoreJob:
    return StoreJob(pools.member, "r", tuple(map(bytes, KEYS)), (3, 3, 5), write)


def load(pools: Scene, segments: tuple[int, ...] = (0, 1, 2)) -> LoadJob:
    lease = pools.pool.match(KEYS, MATCH)
    pools.leases.append(lease)
    return LoadJob(pools.member, "r", tuple(map(int, lease.ids)), segments, (3, 3, 5))


def test_what_was_stored_is_loaded_into_other_blocks(pools: Scene) -> None:
    rank = Rank(pools)
    expected = rank.contents(0, [1, 2, 3, 4]) + rank.contents(1, [9, 8])
    rank.worker.submit_store(1, STORED, store(pools))
    assert rank.finished(1) == set()
    rank.clear()
    rank.worker.submit_load(2, load(pools), BlockRange([11, 5, 6, 7, 2, 1], [4, 2], [0, 0]))
    assert rank.finished(2) == set()
    loaded = rank.contents(0, [11, 5, 6, 7]) + rank.contents(1, [2, 1])
    assert all(np.array_equal(one, other) for one, other in zip(expected, loaded, strict=True))
    assert not rank.groups[0][0].pages[[0, 1, 2, 3]].any(), "no other block is written"
    counts = rank.counters.read()
    assert (counts.tokens_stored, counts.tokens_loaded, counts.failures) == (96, 96, 0)


@pytest.mark.parametrize("count", [2, 16, 64])
def test_each_rank_has_its_own_shard(count: int) -> None:
    """The ranks store in any order, and each loads what it stored."""
    pools = Scene(count)
    ranks = [Rank(pools, shard, seed=shard) for shard in range(count)]
    expected = [rank.contents(0, [1, 2, 3, 4]) + rank.contents(1, [9, 8]) for rank in ranks]
    reservation = pools.pool.engine.reserve(KEYS)
    for rank in ranks[1::2] + ranks[::2]:
        assert not pools.stored()
        rank.worker.submit_store(1, STORED, store(pools, int(reservation.id)))
        assert rank.finished(1) == set()
    reservation.release()
    assert set(pools.stored()) == {0, 1, 2}
    job = load(pools)
    for rank, contents in zip(ranks, expected, strict=True):
        rank.clear()
        rank.worker.submit_load(2, job, STORED)
        assert rank.finished(2) == set()
        loaded = rank.contents(0, [1, 2, 3, 4]) + rank.contents(1, [9, 8])
        assert all(np.array_equal(one, other) for one, other in zip(contents, loaded, strict=True))
        assert rank.reports == []
        rank.worker.close(TIMEOUT_S)


def test_a_chunk_whose_first_block_was_given_up_is_not_stored(pools: Scene) -> None:
    rank = Rank(pools)
    rank.worker.submit_store(1, BlockRange([2, 3, 4, 9, 8], [3, 2], [1, 0]), store(pools))
    rank.finished(1)
    assert set(pools.stored()) == {1, 2}


@pytest.mark.parametrize("fault", ["no daemon", "another daemon", "lost", "not leased", "no session", "unserved"])
def test_a_load_that_fails_is_named(pools: Scene, fault: str) -> None:
    rank = Rank(pools)
    rank.worker.submit_store(1, STORED, store(pools))
    rank.finished(1)
    job = load(pools, (0, -1, 2) if fault == "not leased" else (0, 1, 2))
    if fault == "no daemon":
        pools.pool.daemon.stop()
    elif fault == "another daemon":
        job = replace(job, member=replace(job.member, incarnation=2))
    elif fault == "lost":
        pools.leases[0].release()
    elif fault == "no session":
        job = LoadJob(NOWHERE, "r", (), (-1, -1, -1), job.groups)
    elif fault == "unserved":
        rank = Rank(pools, served=False)
    rank.worker.submit_load(2, job, STORED)
    assert rank.finished(2) == {"r"}
    assert rank.worker.take_failed() == set()
    assert rank.counters.read().loads_failed == 1


def test_a_rank_that_cannot_serve_ends_its_jobs(pools: Scene) -> None:
    rank = Rank(pools, served=False)
    rank.worker.submit_store(1, STORED, store(pools))
    assert rank.finished(1) == set()
    assert not pools.stored()
    assert rank.counters.read().tokens_not_stored == 96


def test_blocks_that_vllm_takes_back_are_not_read(pools: Scene) -> None:
    rank = Rank(pools)
    rank.gate.clear()
    for number in (1, 2):
        rank.worker.submit_store(number, STORED, store(pools))
    rank.worker.submit_load(3, load(pools), STORED)
    waiting = threading.Thread(target=rank.worker.wait, args=({1, 2, 3},))
    waiting.start()
    rank.gate.set()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    rank.clear()
    rank.finished(1, 2, 3)
    # At most one copy was under way when the blocks were taken back.
    assert sum(segment.any() for segment in pools.stored().values()) <= 1


def test_blocks_that_vllm_took_back_are_not_read(pools: Scene) -> None:
    """Before, a job that was between two copies did not notice it if vLLM took back the blocks of another job next."""
    rank = Rank(pools)
    begun, goes_on = threading.Event(), threading.Event()

    def ready() -> None:
        begun.set()
        assert goes_on.wait(TIMEOUT_S)

    rank.pages.ready = ready
    rank.worker.submit_store(1, STORED, store(pools))
    assert begun.wait(TIMEOUT_S)
    rank.worker.wait({1})
    rank.worker.wait({2})
    rank.clear()
    goes_on.set()
    rank.finished(1)
    assert not any(segment.any() for segment in pools.stored().values())
    assert rank.counters.read().tokens_stored == 0


@pytest.mark.parametrize("timeout", [TIMEOUT_S, 0.0])
def test_an_engine_that_sleeps_uses_no_block(pools: Scene, timeout: float) -> None:
    """What is not stored in time is given up."""
    rank = Rank(pools)
    if not timeout:
        rank.gate.clear()
    for number in (1, 2):
        rank.worker.submit_store(number, STORED, store(pools))
    assert rank.pages.copying.wait(TIMEOUT_S)
    sleeping = threading.Thread(target=rank.worker.sleep, args=(timeout,))
    sleeping.start()
    ended = {1, 2}
    if not timeout:
        rank.finished(2)
        ended = {1}
    rank.gate.set()
    sleeping.join(TIMEOUT_S)
    assert not sleeping.is_alive()
    assert rank.pages.calls == ["release"]
    rank.clear()
    rank.finished(*ended)
    stored = pools.stored().values()
    assert sum(segment.any() for segment in stored) == 3 if timeout else len(stored) <= 1
    rank.worker.wake()
    assert rank.pages.calls == ["release", "take"]
    rank.worker.submit_store(3, STORED, store(pools))
    assert rank.finished(3) == set()
    assert len(pools.stored()) == 3


def test_jobs_beyond_the_queue_are_given_up(pools: Scene) -> None:
    rank = Rank(pools, write_queue=1)
    rank.gate.clear()
    for number in range(4):
        rank.worker.submit_store(number, STORED, store(pools))
    rank.gate.set()
    assert rank.finished(0, 1, 2, 3) == set()
    assert rank.worker.flush(TIMEOUT_S)
    assert rank.counters.read().tokens_not_stored >= 96


def test_a_job_that_does_not_fit_is_reported_and_ends(pools: Scene) -> None:
    rank = Rank(pools)
    rank.worker.submit_store(1, BlockRange([1], [1, 0], [0, 0]), store(pools))
    rank.worker.submit_load(2, load(pools), BlockRange([1], [1, 0], [0, 0]))
    assert rank.finished(1, 2) == {"r"}
    assert len(rank.reports) == 2
