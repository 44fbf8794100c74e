"""vLLM's ranks on engines of 16 and more, without vLLM: the workers of all ranks store and load prompts of caches with
the shapes of real models, and engines of other tensor-parallel sizes read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake_client.engines.vllm.copies import HostCopy
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.known.blocks import BlockCache, block_views, stack_layers
from tokenlake_client.engines.vllm.known.ranks import rank_shards
from tokenlake_client.engines.vllm.known.step_plan import LoadPlan, SavePlan, StepPlan
from tokenlake_client.engines.vllm.known.worker import WorkerSide
from tokenlake_client.engines.vllm.session import RankSession
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.testing import MemoryDaemon, MemoryPool

TIMEOUT_S = 30.0
LAYERS, BLOCK, SEGMENT, SEGMENTS = 8, 16, 32, 2
BLOCKS = SEGMENTS * SEGMENT // BLOCK


class Model(NamedTuple):
    """The shape of a model's cache, with 8 layers and segments of 32 tokens, so that the test stays small."""

    kv_heads: int
    head_dim: int

    @property
    def layout(self) -> Layout:
        return Layout(
            model_id="m",
            weights_digest="d",
            dtype="bfloat16",
            layers=LAYERS,
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            position="rope",
            segment_tokens=SEGMENT,
        )


LLAMA_70B, LLAMA_2_7B, QWEN_32B, PHI_4, HEADS_64 = (
    Model(8, 128),
    Model(32, 128),
    Model(40, 128),
    Model(10, 128),
    Model(64, 64),
)


class Engine:
    """The ranks of one engine and the connection of its scheduler's side. A rank's cache is one tensor of [layers,
    blocks, heads, tokens, 2 * head dim]."""

    def __init__(self, model: Model, size: int, daemon: MemoryDaemon) -> None:
        self.layout = model.layout
        self.pool = MemoryPool(self.layout, daemon)
        shape = LAYERS, BLOCKS, max(1, model.kv_heads // size), BLOCK, 2 * model.head_dim
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(size)]
        self.failed: list[str] = []
        self.ranks = [self._rank(rank, size) for rank in range(size)]

    def _rank(self, rank: int, size: int) -> WorkerSide:
        shards = rank_shards(self.layout, rank, size)
        stacks = stack_layers(list(self.caches[rank].unbind(0)), BLOCKS, block_views("FLASH_ATTN"))
        session = RankSession(
            lambda number: MemoryPool(self.layout, self.pool.daemon, session=self.pool.engine.session), self._report
        )
        copy = HostCopy(BlockCache(self.layout, shards, stacks))
        # A rank joins the session within the deadline of a call, also on a busy machine.
        settings = EngineSettings(segment_tokens=SEGMENT, call_ms=1e3 * TIMEOUT_S)
        return WorkerSide(session, copy, shards, settings, BLOCK, EngineCounters(), self._report, self.failed.append)

    def _report(self, operation: str, error: BaseException) -> None:
        self.failed.append(f"{operation}: {error}")

    def compute(self, heads: torch.Tensor) -> None:
        """Fill the caches of all ranks with `heads` [layers, blocks, KV heads, tokens, 2 * head dim]."""
        for rank, cache in enumerate(self.caches):
            cache.copy_(heads[:, :, self._own(rank)])

    def cached(self) -> torch.Tensor:
        """The keys and values of all KV heads, from the caches of the ranks; copies of a head are equal."""
        found = torch.zeros(*self.caches[0].shape[:2], self.layout.kv_heads, *self.caches[0].shape[3:]).bfloat16()
        for rank, cache in enumerate(self.caches):
            found[:, :, self._own(rank)] = cache
        assert all(torch.equal(cache, found[:, :, self._own(rank)]) for rank, cache in enumerate(self.caches))
        return found

    def _own(self, rank: int) -> slice:
        heads, size = self.layout.kv_heads, len(self.ranks)
        first = rank * heads // size
        return slice(first, first + max(1, heads // size))

    def store(self, keys: list[SegmentKey], order: list[int]) -> None:
        """A step that completed both segments: the ranks store them, one after the other in this `order`."""
        shared = rank_shards(self.layout, 0, len(self.ranks)).writers > 1
        reservation = self.pool.engine.reserve(keys) if shared else None
        save = SavePlan(
            1,
            "r",
            0,
            tuple(map(bytes, keys)),
            tuple(range(BLOCKS)),
            write=int(reservation.id) if reservation else 0,
            incarnation=self.pool.engine.incarnation,
        )
        for rank in order:
            side = self.ranks[rank]
            side.begin(self._step(saves=(save,)))
            side.save()
            assert side.flush(TIMEOUT_S)
            assert side.report().done == 1, "vLLM keeps the blocks of the request until all ranks are done"
        if reservation is not None:
            reservation.release()

    def load(self, keys: list[SegmentKey]) -> int:
        """All ranks load what the pool has of `keys`. Returns the number of segments."""
        with self.pool.match(keys) as lease:
            blocks = tuple(range(lease.hits * SEGMENT // BLOCK))
            ids = tuple(map(int, lease.ids))
            plan = LoadPlan("r", ids, lease.incarnation, 0, lease.hits * SEGMENT, blocks, local=True)
            for side in self.ranks if lease.hits else ():
                side.begin(self._step(idle=True, loads=(plan,)))
                side.load()
                assert (side.errors(), side.finished()[1]) == (set(), {"r"})
            return lease.hits

    def _step(self, **fields: Any) -> StepPlan:
        return StepPlan(1, int(self.pool.engine.session), self.pool.engine.incarnation, **fields)

    def close(self) -> None:
        for side in self.ranks:
            side.close(TIMEOUT_S)
        self.pool.close()
        assert self.failed == []


@pytest.fixture
def daemon() -> Iterator[MemoryDaemon]:
    made = MemoryDaemon(memory=512 << 20)
    yield made
    made.stop()


def keys(name: str) -> list[SegmentKey]:
    return [SegmentKey(f"{name} {number}".encode().ljust(32, b"\0")) for number in range(SEGMENTS)]


@pytest.mark.parametrize(
    ("model", "size", "readers"),
    [
        (LLAMA_70B, 16, (1, 8, 32)),
        (LLAMA_70B, 64, (2, 16)),
        (LLAMA_2_7B, 32, (1, 16)),
        (QWEN_32B, 40, (1, 5, 8)),
        (HEADS_64, 64, (1, 16)),
        (PHI_4, 10, (5, 2)),
        (LLAMA_2_7B, 1, (16,)),
    ],
)
def test_engines_of_other_sizes_load(daemon: MemoryDaemon, model: Model, size: int, readers: tuple[int, ...]) -> None:
    """What all ranks stored, in their order and in the reverse one. Of the ranks that hold a head, the first stores
    it."""
    torch.manual_seed(size)
    with contextlib.ExitStack() as ending:

        def started(ranks: int) -> Engine:
            engine = Engine(model, ranks, daemon)
            ending.callback(engine.close)
            return engine

        writer = started(size)
        others = [started(ranks) for ranks in (*readers, size)]
        for turn, order in enumerate((list(range(size)), list(range(size))[::-1])):
            computed = torch.randn(LAYERS, BLOCKS, model.kv_heads, BLOCK, 2 * model.head_dim).bfloat16()
            writer.compute(computed)
            prompt = keys(f"{turn}")
            writer.store(prompt, order)
            for reader in others:
                assert reader.load(prompt) == SEGMENTS
                assert torch.equal(reader.cached(), computed)


def test_ranks_store_beside_segments_that_the_pool_has(daemon: MemoryDaemon) -> None:
    """The last segment of the prompt is not reserved, because another engine has stored it."""
    writer, other = Engine(PHI_4, 10, daemon), Engine(PHI_4, 1, daemon)
    computed = torch.randn(LAYERS, BLOCKS, 10, BLOCK, 2 * PHI_4.head_dim).bfloat16()
    for engine in (writer, other):
        engine.compute(computed)
    other.pool.store_all(keys("p")[1:], lambda index, slot: slot.fill(1))
    writer.store(keys("p"), list(range(10)))
    assert other.load(keys("p")) == SEGMENTS
    for engine in (writer, other):
        engine.close()


def test_a_rank_that_stores_nothing(daemon: MemoryDaemon) -> None:
    engine, reader = Engine(LLAMA_70B, 16, daemon), Engine(LLAMA_70B, 1, daemon)
    engine.store(keys("p"), [rank for rank in range(16) if rank != 6])
    assert reader.load(keys("p")) == 0
    engine.store(keys("p"), list(range(0, 16, 2)))
    assert reader.load(keys("p")) == SEGMENTS
    engine.close()
    reader.close()
