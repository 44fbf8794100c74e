"""An engine of 16 ranks, each a process of its own, at a real daemon: the ranks commit their shards in any order, and
one of them dies."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import msgspec
import pytest

from tests.robustness.live import LAYOUT, EngineProcess, Prompt, accounted, daemons, match, wait_until
from tokenlake.wire import Code
from tokenlake_client.engines.vllm.known.ranks import RankShards, rank_shards
from tokenlake_client.write import Reservation
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live

RANKS, SEGMENTS = 16, 3
HEADS = (8, 32, 64)
"""KV heads of the model: two ranks hold each head, each rank two heads, each rank four."""


class Fleet:
    """The scheduler of an engine in this process, and its ranks."""

    def __init__(self, cluster: Cluster, kv_heads: int, ending: contextlib.ExitStack) -> None:
        self.node: Node = cluster.nodes[0]
        self.layout = msgspec.structs.replace(LAYOUT, kv_heads=kv_heads)
        self.pool = ending.enter_context(cluster.connect(0, self.layout))
        self.reader = ending.enter_context(cluster.connect(0, self.layout))
        self.shards = [rank_shards(self.layout, rank, RANKS) for rank in range(RANKS)]
        self.ranks = [ending.enter_context(self.start()) for _ in range(RANKS)]

    def start(self) -> EngineProcess:
        """Start a rank that joins the session of the scheduler."""
        return EngineProcess(self.node.socket, int(self.pool.engine.session), kv_heads=self.layout.kv_heads)

    def writers(self, draw: random.Random) -> list[tuple[EngineProcess, RankShards]]:
        """The ranks that store, in any order, each with its shards."""
        storing = [pair for pair in zip(self.ranks, self.shards, strict=True) if pair[1].writes]
        draw.shuffle(storing)
        return storing

    def reserve(self, prompt: Prompt) -> Reservation:
        return self.pool.engine.reserve(self.pool.prefix(prompt.tokens).keys)

    def hits(self, prompt: Prompt) -> int:
        """The segments of the prompt that another engine finds; their bytes are right."""
        with match(self.reader, prompt) as lease:
            arrays = lease.fetch()
            assert prompt.wrong(arrays, layout=self.layout) == 0
            return len(arrays)


@pytest.fixture(params=HEADS, ids=lambda heads: f"{heads} heads")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with contextlib.ExitStack() as ending:
        yield Fleet(ending.enter_context(daemons(memory="32MiB", region_size="4MiB")), request.param, ending)


def store(fleet: Fleet, seed: int) -> Prompt:
    """Let all ranks that store fill and commit a prompt, in any order."""
    draw, prompt = random.Random(seed), Prompt(seed, SEGMENTS)
    reservation = fleet.reserve(prompt)
    assert reservation.codes == bytes([Code.RESERVED] * SEGMENTS)
    storing = fleet.writers(draw)
    for rank, _ in storing:
        rank.ask("attach_write", write=reservation.id, seed=seed, segments=SEGMENTS)
    draw.shuffle(storing)
    for number, (rank, own) in enumerate(storing, 1):
        codes = rank.ask("commit", shards=[own.first, own.stop])["codes"]
        last = number == len(storing)
        assert codes == [Code.COMMITTED if last else Code.RESERVED] * SEGMENTS
        assert fleet.hits(prompt) == SEGMENTS * last, "a segment is READY before all its shards are in"
    reservation.release()
    return prompt


def test_ranks_commit_in_any_order_and_all_read(fleet: Fleet) -> None:
    """Each rank reads the whole lease, also those that store nothing."""
    prompts = [store(fleet, seed) for seed in range(2)]
    with match(fleet.pool, prompts[0]) as lease:
        for rank in fleet.ranks:
            rank.begin("attach", lease=[int(each) for each in lease.ids], seed=0, segments=SEGMENTS)
        assert [rank.finish() for rank in fleet.ranks] == [{"hits": SEGMENTS, "wrong": 0}] * RANKS
        for rank in fleet.ranks[1:]:
            rank.ask("release")
    assert not accounted(fleet.node), "one rank still reads"
    fleet.ranks[0].kill()
    wait_until(lambda: accounted(fleet.node), "the lease ends with its last rank")
    assert [fleet.hits(prompt) for prompt in prompts] == [SEGMENTS] * 2


@pytest.mark.parametrize("at", ["before its commit", "after its commit"])
def test_a_rank_dies(fleet: Fleet, at: str) -> None:
    """The segments of a rank that died before its commit are never READY, and their slots come back. Those of one that
    died behind it are READY once all others have committed. Later prompts need a rank in its place."""
    draw, prompt = random.Random(7), Prompt(7, SEGMENTS)
    reservation = fleet.reserve(prompt)
    (victim, own), *others = fleet.writers(draw)
    for rank, _ in [(victim, own), *others]:
        rank.ask("attach_write", write=reservation.id, seed=7, segments=SEGMENTS)
    if at == "after its commit":
        assert victim.ask("commit", shards=[own.first, own.stop])["codes"] == [Code.RESERVED] * SEGMENTS
    victim.kill()
    codes = [rank.ask("commit", shards=[shards.first, shards.stop])["codes"] for rank, shards in others]
    assert codes[:-1] == [[Code.RESERVED] * SEGMENTS] * (len(others) - 1)
    whole = codes[-1] == [Code.COMMITTED] * SEGMENTS
    assert whole == (at == "after its commit")
    reservation.release()
    wait_until(lambda: accounted(fleet.node), "the slots of the write come back")
    assert fleet.hits(prompt) == SEGMENTS * whole

    with fleet.start() as again:
        fleet.ranks[fleet.ranks.index(victim)] = again
        assert fleet.hits(store(fleet, 8)) == SEGMENTS
        if not whole:
            assert fleet.hits(store(fleet, 7)) == SEGMENTS
