"""The tokens that a daemon counts for what an engine did with a lease."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.robustness.live import (
    LAYOUT,
    PATIENT,
    PATIENT_S,
    SEGMENT_TOKENS,
    EngineProcess,
    Prompt,
    daemons,
    match,
    store,
    wait_told,
    wait_until,
)
from tokenlake.identity import SegmentKey
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake_client import Lease, MatchOptions, Pool
from tokenlake_client.match import DEFAULT_MATCH
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live
SIZE = SEGMENT_TOKENS
STORED = Prompt(1, 6)
ASKED = Prompt(1, 8)
"""A prompt of which the pool has the first 6 segments."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(2) as cluster:
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, STORED)
        wait_told(cluster)
        yield cluster


@contextlib.contextmanager
def counted(cluster: Cluster, expected: dict[str, int]) -> Iterator[None]:
    """Waits until the tokens have grown by `expected`, given in segments or as a sum of them and of single tokens."""
    before = cluster.tokens()

    def growth() -> dict[str, int]:
        now = cluster.tokens()
        return {name: now[name] - before.get(name, 0) for name in now if now[name] > before.get(name, 0)}

    yield
    gc.collect()
    grown: dict[str, int] = {}

    def reached() -> bool:
        grown.clear()
        grown.update(growth())
        return grown == expected

    with contextlib.suppress(AssertionError):
        wait_until(reached, "the tokens are counted", 10.0)
    assert grown == expected
    assert grown["asked"] == sum(grown.values()) - grown["asked"]


def asked(pool: Pool, options: MatchOptions = DEFAULT_MATCH) -> Lease:
    return pool.match(pool.prefix(ASKED.tokens).keys, options, deadline_s=PATIENT_S)


def fetched(lease: Lease) -> None:
    assert len(lease.fetch(0, 4)) == 4


def copied(lease: Lease) -> None:
    assert lease.copy_into([np.zeros(LAYOUT.segment_bytes, np.uint8) for _ in range(4)]) == 4


def attended(lease: Lease) -> None:
    lease.used(0, 4)


@pytest.mark.parametrize("read", [fetched, copied, attended])
def test_segments_that_were_read_are_supplied(cluster: Cluster, read: Callable[[Lease], None]) -> None:
    expected = {"asked": 8 * SIZE, "local": 4 * SIZE, "skipped": 2 * SIZE, "never_stored": 2 * SIZE}
    with cluster.connect(0, LAYOUT) as pool, counted(cluster, expected):
        with asked(pool) as lease:
            read(lease)
        pool.match([]).release()


def test_tokens_of_other_nodes(cluster: Cluster) -> None:
    """Those that were fetched, and those that queries attended to where they are."""
    expected = {"asked": 8 * SIZE, "fetched": 2 * SIZE, "shipped": 4 * SIZE, "never_stored": 2 * SIZE}
    with cluster.connect(1, LAYOUT) as pool, counted(cluster, expected), asked(pool) as lease:
        assert len(lease.fetch(0, 2)) == 2
        lease.used(0, 6)


@pytest.mark.parametrize(
    ("had", "local", "skipped", "missed"), [(3, 6 * SIZE - 5, 2, 2 * SIZE), (7 * SIZE + 2, 0, 0, SIZE - 2)]
)
def test_tokens_that_the_engine_had(cluster: Cluster, had: int, local: int, skipped: int, missed: int) -> None:
    """They are not supplied, also where their segment was read, and not missing, also where the pool lacks them."""
    expected = {"asked": 8 * SIZE + 3, "engine_had": had, "local": local, "skipped": skipped, "never_stored": missed}
    expected = {name: tokens for name, tokens in expected.items() if tokens} | {"too_short": 3}
    options = MatchOptions(prompt_tokens=8 * SIZE + 3)
    with cluster.connect(0, LAYOUT) as pool, counted(cluster, expected), asked(pool, options) as lease:
        lease.fetch()
        lease.takes(had, max(had, 6 * SIZE - 2))


def test_a_lease_without_segments_has_an_account(cluster: Cluster) -> None:
    """Whether it is released or not."""
    prompt = Prompt(99, 3)
    with cluster.connect(0, LAYOUT) as pool:
        for had in (0, SIZE + 1):
            rest = {"asked": 3 * SIZE, "engine_had": had, "never_stored": 3 * SIZE - had}
            with counted(cluster, {name: tokens for name, tokens in rest.items() if tokens}):
                lease = match(pool, prompt)
                lease.takes(had, had)
                if had:
                    lease.release()
                del lease
                pool.match([]).release()
        leases = 'tokenlake_map_entries{map="leases"}'
        wait_until(lambda: cluster.nodes[0].metrics()[leases] == 0, "the leases have ended")


def test_a_match_that_is_given_up_or_repeated_does_not_count(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        expected = {"asked": 8 * SIZE, "local": 6 * SIZE, "never_stored": 2 * SIZE}
        with counted(cluster, expected):
            keys = pool.prefix(ASKED.tokens).keys
            pool.engine.begin_match(keys, deadline_s=PATIENT_S).cancel()
            pool.engine.begin_match(pool.prefix(Prompt(98, 2).tokens).keys, deadline_s=PATIENT_S).cancel()
            first = asked(pool)
            with asked(pool) as lease:
                first.release(counted=False)
                lease.fetch()
            pool.match([]).release()
        leases = 'tokenlake_map_entries{map="leases"}'
        wait_until(lambda: cluster.nodes[0].metrics()[leases] == 0, "the leases have ended")


def test_two_processes_of_an_engine(cluster: Cluster) -> None:
    """A segment counts as read once, if any process has read it."""
    expected = {"asked": 8 * SIZE, "engine_had": SIZE, "local": 4 * SIZE, "skipped": SIZE, "never_stored": 2 * SIZE}
    socket = cluster.nodes[0].socket
    with (
        cluster.connect(0, LAYOUT) as pool,
        Pool.connect(socket, LAYOUT, session=pool.engine.session, deadlines=PATIENT) as rank,
        Pool.connect(socket, LAYOUT, session=pool.engine.session, deadlines=PATIENT) as other,
        counted(cluster, expected),
        asked(pool) as lease,
    ):
        for each in (rank, other):
            with each.engine.attach(*lease.ids) as attached:
                attached.fetch(1, 5)
        lease.takes(SIZE, 6 * SIZE)


def test_tokens_of_an_engine_that_was_killed(cluster: Cluster) -> None:
    expected = {"asked": 6 * SIZE, "unreported": 6 * SIZE}
    with counted(cluster, expected), EngineProcess(cluster.nodes[0].socket) as engine:
        assert engine.ask("match", seed=1, segments=6)["hits"] == 6
        engine.kill()


def test_keys_of_several_cache_groups(cluster: Cluster) -> None:
    """Only those of the first group count tokens."""
    layout = OpaqueLayout(
        model_id="test",
        weights_digest="00",
        engine="vllm 0",
        cache="groups",
        shards=1,
        shard_bytes=4096,
        segment_tokens=SIZE,
    )
    with Pool.connect(cluster.nodes[0].socket, layout, deadlines=PATIENT) as pool:
        engine_keys = [(group, bytes([at]) * 32) for group in range(2) for at in range(5)]
        keys: list[SegmentKey] = pool.opaque_keys(engine_keys)
        stored = [*keys[:4], *keys[5:9]]
        pool.store_all(stored, lambda index, slot: slot.fill(index), patience=PATIENT_S)
        expected = {"asked": 5 * SIZE + 2, "engine_had": 5, "local": 4 * SIZE - 5, "evicted": SIZE, "too_short": 2}
        options = MatchOptions(independent=True, counted_keys=5, prompt_tokens=5 * SIZE + 2)
        with counted(cluster, expected), pool.match(keys, options, deadline_s=PATIENT_S) as lease:
            assert lease.hits == 8
            lease.fetch()
            lease.takes(5, 4 * SIZE)
