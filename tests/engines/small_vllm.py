"""The parts of vLLM around the two connectors, without vLLM: requests, blocks with contents that follow from the tokens
before them, and the order of the hooks. Hooks that the connectors guard are guarded alike; an error of any other ends
the test. The blocks of a request that has ended are given to another one, so that a late copy shows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tests.connector.fakes import FakeRequest
from tokenlake.identity import SessionId
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client.deadlines import Deadlines
from tokenlake_client.engines.common.connection import Connection
from tokenlake_client.engines.vllm.copies import HostCopy
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.known.ranks import RankShards
from tokenlake_client.engines.vllm.known.request import RequestEnd, ScheduledPart
from tokenlake_client.engines.vllm.known.scheduler import SchedulerSide
from tokenlake_client.engines.vllm.known.step_plan import StepReport
from tokenlake_client.engines.vllm.known.worker import WorkerSide
from tokenlake_client.engines.vllm.offloading.lookup import Found
from tokenlake_client.engines.vllm.offloading.manager import ChunkManager
from tokenlake_client.engines.vllm.offloading.pages import PageCache, PageTable
from tokenlake_client.engines.vllm.offloading.worker import BlockRange, ChunkWorker, RankPlace
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.testing import MemoryDaemon, MemoryPool

T = TypeVar("T")
U = TypeVar("U")

TIMEOUT_S = 20.0
SEGMENT, BLOCK, BLOCK_BYTES = 8, 4, 32
BLOCKS = 256
FREED = 0xEE
"""The bytes of a block that no request has."""


def expanded(name: str, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that follow from a name."""
    return np.frombuffer(hashlib.shake_128(name.encode()).digest(nbytes), np.uint8)


@dataclass
class Hooks:
    """Guards hooks as the connectors do, and counts what reached the guards."""

    reports: list[str] = field(default_factory=list)

    def call(self, default: T, hook: Callable[[], U]) -> T | U:
        try:
            return hook()
        except Exception as error:
            self.reports.append(f"{type(error).__name__}: {error}")
            return default

    def report(self, operation: str, error: BaseException) -> None:
        self.reports.append(f"{operation}: {type(error).__name__}: {error}")


class _Blocks:
    """vLLM's blocks of a known layout, two to a segment, and the copies of a rank."""

    def __init__(self) -> None:
        self.bytes = np.full((BLOCKS, BLOCK_BYTES), FREED, np.uint8)

    def from_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        rows = slot.reshape(-1, BLOCK_BYTES)
        for at, block in enumerate(part.blocks, part.skip):
            self.bytes[block] = rows[at]
        return len(part.blocks) * BLOCK_BYTES

    def to_slot(self, slot: NDArray[np.uint8], part: Part) -> int:
        rows = slot.reshape(-1, BLOCK_BYTES)
        for at, block in enumerate(part.blocks):
            rows[at] = self.bytes[block]
        return len(part.blocks) * BLOCK_BYTES

    def finish(self) -> None: ...

    def computed(self) -> Callable[[], None]:
        return self.finish

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, last: float) -> float:
        return last - first

    def release_locks(self) -> None: ...

    def take_locks(self) -> None: ...


COPIES = _Blocks
"""The class whose `to_slot` and `from_slot` copy."""


class KnownLayout:
    """vLLM with the connector for known layouts, on one rank."""

    def __init__(self, daemon: MemoryDaemon, deadlines: Deadlines, **settings: Any) -> None:
        self.hooks = Hooks()
        self.layout = OpaqueLayout(
            model_id="m",
            weights_digest="w",
            engine="e 1",
            cache="c",
            shards=1,
            shard_bytes=SEGMENT // BLOCK * BLOCK_BYTES,
            segment_tokens=SEGMENT,
        )
        self.settings = EngineSettings(segment_tokens=SEGMENT, **settings)
        self.pool = MemoryPool(self.layout, daemon, deadlines=deadlines)
        self.connection = Connection(None, self.hooks.report, self.pool)
        self.counters = EngineCounters()
        self.scheduler = SchedulerSide(
            self.connection.get,
            self.settings,
            BLOCK,
            self.counters,
            self.hooks.report,
            segment_bytes=self.layout.segment_bytes,
        )
        self.blocks = _Blocks()
        self._free = list(range(BLOCKS))
        self._cached: dict[bytes, int] = {}
        self._kept: dict[str, list[int]] = {}
        """The blocks of finished requests that the rank still reads."""
        self.joined: list[MemoryPool] = []

        def join(session: int) -> MemoryPool:
            pool = MemoryPool(self.layout, daemon, session=SessionId(session), verify=True, deadlines=deadlines)
            self.joined.append(pool)
            return pool

        self.rank = WorkerSide(
            RankSession(join, self.hooks.report),
            self.blocks,
            RankShards(0, 1, 1, True),
            self.settings,
            BLOCK,
            self.counters,
            self.hooks.report,
            lambda line: None,
        )
        self.loaded = 0
        """Blocks that a load has filled."""

    @staticmethod
    def content(tokens: Sequence[int], block: int) -> NDArray[np.uint8]:
        """The content of a block: it follows from all tokens up to its end."""
        return expanded(str(list(tokens[: (block + 1) * BLOCK])), BLOCK_BYTES)

    def serve(self, name: str, tokens: list[int], local: int, end: RequestEnd) -> None:
        """Serve one request, whose first `local` tokens are in vLLM's own cache."""
        request, hooks, scheduler = FakeRequest(name, tokens), self.hooks, self.scheduler
        hooks.call(None, lambda: scheduler.new_request(request))
        until = time.monotonic() + TIMEOUT_S
        while (external := hooks.call(0, lambda: scheduler.matched(request, local))) is None:
            self._step([], lambda _: [])
            assert time.monotonic() < until, "a request waits for its lookup"
        shared = [self._shared(self.content(tokens, index)) for index in range(local // BLOCK)]
        own = [self._free.pop(0) for _ in range(-(-len(tokens) // BLOCK) - len(shared))]
        blocks = [*shared, *own]
        hooks.call(None, lambda: scheduler.allocated(request, blocks, external))
        computed = local + external
        if external:
            received, invalid = set[str](), set[int]()
            while name not in received:
                more, wrong = self._step([], lambda _: blocks)
                received |= more
                invalid |= wrong
                assert time.monotonic() < until, "a request waits for its load"
            filled = range(local // BLOCK, -(-computed // BLOCK))
            bad = [index for index in filled if blocks[index] in invalid]
            computed = bad[0] * BLOCK if bad else computed
        for index in range(computed // BLOCK):
            # Blocks behind the last whole one are computed.
            assert bytes(self.blocks.bytes[blocks[index]]) == bytes(self.content(tokens, index)), (name, index)
        self.loaded += (computed - local) // BLOCK
        # vLLM computes at least the last token.
        computed = min(computed, len(tokens) - 1)

        def forward() -> None:
            for index in range(computed // BLOCK, len(blocks)):
                self.blocks.bytes[blocks[index]] = self.content(tokens, index)

        part = ScheduledPart(name, computed, len(tokens) - computed, blocks, whole=True)
        self._step([part], lambda _: blocks, forward)
        request.num_computed_tokens = len(tokens)
        keep, _ = hooks.call((False, None), lambda: scheduler.finished(request, blocks, end))
        if keep:
            self._kept[name] = own
        else:
            self._free += own

    def _shared(self, content: NDArray[np.uint8]) -> int:
        """A block of vLLM's own prefix cache, which it keeps."""
        key = bytes(content)
        if key not in self._cached:
            block = self._cached[key] = self._free.pop()
            self.blocks.bytes[block] = content
        return self._cached[key]

    def _step(
        self,
        parts: list[ScheduledPart],
        table: Callable[[str], Sequence[int]],
        forward: Callable[[], None] = lambda: None,
    ) -> tuple[set[str], set[int]]:
        """One step; returns the requests whose loads ended, and the blocks that were not filled."""
        hooks, rank = self.hooks, self.rank
        # An error of this hook ends the test, as it would leave a load out.
        plan = self.scheduler.step(parts, table)
        hooks.call(None, lambda: rank.begin(plan))
        forward()
        hooks.call(None, rank.load)
        hooks.call(None, rank.save)
        freed, received = hooks.call((set[str](), set[str]()), rank.finished)
        errors = hooks.call(set[int](), rank.errors)
        report = hooks.call(StepReport(0), rank.report)
        hooks.call(None, lambda: self.scheduler.worker_output(report, sorted(received), errors))
        for name in freed:
            self._free += self._kept.pop(name)
        return received, errors

    def settle(self) -> None:
        """Steps, until the rank reads no block any more."""
        assert self.rank.flush(TIMEOUT_S)
        until = time.monotonic() + TIMEOUT_S
        while self._kept or self.scheduler._saves.jobs:
            self._step([], lambda _: [])
            assert time.monotonic() < until, "blocks of finished requests are kept"

    def close(self) -> None:
        self.rank.close()
        self.scheduler.close()
        self.connection.close()
        self.pool.close()


GROUPS = (3, 5)
CHUNK_BLOCKS = 2
SHARD_BYTES = 80
"""Two blocks of 10 and 8 bytes, of the first group; the other one's is smaller."""


class _Rank:
    """A rank with a cache of two groups, the first of two tables."""

    def __init__(self, shard: int, worker: Callable[[HostCopy, RankPlace], ChunkWorker]) -> None:
        def table(width: int, used: int) -> PageTable:
            return PageTable(torch.full((BLOCKS, width), -1, dtype=torch.int8), used)

        self.shard = shard
        self.groups = [[table(12, 10), table(8, 8)], [table(24, 20)]]
        copies = HostCopy(PageCache(self.groups, CHUNK_BLOCKS))
        self.worker = worker(copies, RankPlace(shard, GROUPS, (16, 16), CHUNK_BLOCKS))

    def fill(self, key: bytes, position: int, blocks: Sequence[int]) -> None:
        for number, table in enumerate(self.groups[position]):
            table.pages[list(blocks), : table.nbytes] = torch.from_numpy(self._content(key, number, table).copy())

    def holds(self, key: bytes, position: int, blocks: Sequence[int]) -> bool:
        return all(
            bytes(table.pages[list(blocks), : table.nbytes].numpy()) == bytes(self._content(key, number, table))
            for number, table in enumerate(self.groups[position])
        )

    def _content(self, key: bytes, number: int, table: PageTable) -> NDArray[np.int8]:
        name = f"{key.hex()} {number} {self.shard}"
        return expanded(name, CHUNK_BLOCKS * table.nbytes).view(np.int8).reshape(CHUNK_BLOCKS, table.nbytes)


class Opaque:
    """vLLM with its OffloadingConnector on the pool, on as many ranks as there are shards."""

    def __init__(self, daemon: MemoryDaemon, deadlines: Deadlines, shards: int = 1, **settings: Any) -> None:
        self.hooks = Hooks()
        self.layout = OpaqueLayout(
            model_id="m",
            weights_digest="w",
            engine="e 1",
            cache="c",
            shards=shards,
            shard_bytes=SHARD_BYTES,
            segment_tokens=32,
        )
        self.settings = EngineSettings(verify=True, **settings)
        self.pool = MemoryPool(self.layout, daemon, verify=True, deadlines=deadlines)
        self.connection = Connection(None, self.hooks.report, self.pool)
        self.counters = EngineCounters()
        self.manager = ChunkManager(self.settings, self.counters, self.hooks.report, lambda line: None)
        self.manager.counted_group = GROUPS[0]
        self.manager.open(self.connection.get, self.layout)
        self.joined: list[MemoryPool] = []

        def join(session: int, layout: bytes) -> MemoryPool:
            pool = MemoryPool(OpaqueLayout.decode(layout), daemon, session=SessionId(session), deadlines=deadlines)
            self.joined.append(pool)
            return pool

        def worker(copies: HostCopy, place: RankPlace) -> ChunkWorker:
            return ChunkWorker(copies, place, self.settings, join, self.counters, self.hooks.report)

        self.ranks = [_Rank(shard, worker) for shard in range(shards)]
        self._jobs = 0
        self._next = 0
        self.loaded = 0
        """Chunks that a load has filled."""

    def keys(self, chain: int, count: int) -> list[bytes]:
        """The keys of the first chunks of a chain, in both groups."""
        names = [hashlib.sha256(f"{chain} {number}".encode()).digest() for number in range(count)]
        return [name + group.to_bytes(4, "big") for group in GROUPS for name in names]

    def serve(self, name: str, chain: int, count: int, *, gives_up: bool = False) -> None:
        """Serve one request with `count` chunks in each group. `gives_up`: vLLM takes the blocks of its store back."""
        keys, hooks, manager = self.keys(chain, count), self.hooks, self.manager
        hooks.call(None, lambda: manager.new_request(name, None, lambda: 32 * count))
        until = time.monotonic() + TIMEOUT_S
        while True:
            found = [self._find(name, key, keys) for key in keys]
            hooks.call(None, lambda: manager.step_ends([], []))
            if not {Found.RETRY, Found.PENDING} & set(found):
                break
            time.sleep(0.0005)
            assert time.monotonic() < until, "a request waits for its lookup"
        # A chunk is loaded in both groups, up to the first one that is missing in one of them.
        both = [found[at] is found[count + at] is Found.HIT for at in range(count)]
        hits = both.index(False) if False in both else count
        blocks = [[self._block() for _ in range(CHUNK_BLOCKS)] for _ in keys]
        hooks.call(None, lambda: manager.takes(name, 0, 32 * hits))
        computed = 0
        if hits and self._load(name, keys, blocks, hits, count):
            computed = hits
            self.loaded += hits
        for rank in self.ranks:
            for at, key in enumerate(keys):
                if at % count < computed:
                    assert rank.holds(key, at // count, blocks[at]), (name, at)
                else:
                    rank.fill(key, at // count, blocks[at])
        hooks.call(None, lambda: manager.step_ends([name], []))
        self._store(name, keys, blocks, count, computed, gives_up=gives_up)
        hooks.call(None, lambda: manager.finished(name))

    def _find(self, name: str, key: bytes, keys: list[bytes]) -> Found:
        return self.hooks.call(Found.MISS, lambda: self.manager.lookup(name, key, lambda: keys))

    def _load(self, name: str, keys: list[bytes], blocks: list[list[int]], hits: int, count: int) -> bool:
        wanted = [at for at in range(len(keys)) if at % count < hits]
        # No guard of vLLM's or ours is around this one.
        job = self.manager.prepare_load(name, [keys[at] for at in wanted])
        number = self._number()
        flat = [block for at in wanted for block in blocks[at]]
        for rank in self.ranks:
            rank.worker.submit_load(number, job, BlockRange(flat, [hits * CHUNK_BLOCKS] * 2, [0, 0]))
        failed = self._ended(number)
        self.hooks.call(None, lambda: self.manager.complete_load(name))
        if name in failed:
            self.hooks.call(None, lambda: self.manager.load_failed(name))
        return name not in failed

    def _store(
        self, name: str, keys: list[bytes], blocks: list[list[int]], count: int, first: int, *, gives_up: bool
    ) -> None:
        wanted = [at for at in range(len(keys)) if at % count >= first]
        if not wanted:
            return
        asked = [keys[at] for at in wanted]
        planned = self.hooks.call(None, lambda: self.manager.prepare_store(name, asked))
        if planned is None:
            return
        number, job = self._number(), planned[1]
        flat = [block for at in wanted for block in blocks[at]]
        for rank in self.ranks:
            rank.worker.submit_store(number, BlockRange(flat, [(count - first) * CHUNK_BLOCKS] * 2, [0, 0]), job)
        if gives_up:
            for rank in self.ranks:
                rank.worker.wait({number})
                for table in (table for group in rank.groups for table in group):
                    table.pages[flat] = -3
        self._ended(number)
        self.hooks.call(None, lambda: self.manager.complete_store(asked))

    def _ended(self, number: int) -> set[str]:
        """Wait for a job on all ranks; returns the requests whose load failed on one of them."""
        failed: set[str] = set()
        until = time.monotonic() + TIMEOUT_S
        for rank in self.ranks:
            while number not in {one.job for one in rank.worker.take_finished()}:
                assert time.monotonic() < until, "a job does not end"
                time.sleep(0.0005)
            failed |= rank.worker.take_failed()
        return failed

    def _number(self) -> int:
        self._jobs += 1
        return self._jobs

    def _block(self) -> int:
        # Block 0 is vLLM's null block.
        self._next = self._next % (BLOCKS - 1) + 1
        return self._next

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        self.manager.close()
        self.connection.close()
        self.pool.close()
