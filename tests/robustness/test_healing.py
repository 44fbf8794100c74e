"""A sound copy takes the place of a corrupt one in the same fetch; an engine that dies while it is frozen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    EngineProcess,
    Prompt,
    daemons,
    flip,
    local_keys,
    match,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with daemons(3, "24MiB", "4MiB") as cluster:
        yield cluster


@pytest.fixture
def pools(cluster: Cluster) -> Iterator[list[Pool]]:
    """One pool at each node. None of them verifies checksums."""
    pools = [cluster.connect(number, LAYOUT) for number in range(3)]
    yield pools
    for pool in pools:
        pool.close()


def stored(cluster: Cluster, pools: list[Pool], *readers: int) -> list[Prompt]:
    """Prompts of one segment each, stored by the engine of node 0 and read by those of the nodes `readers`: each of
    these nodes has a copy, and no other."""
    prompts = [Prompt(9100 + number, 1) for number in range(20)]
    for prompt in prompts:
        store(pools[0], prompt)
    wait_told(cluster)
    for number in readers:
        assert [read(pools[number], prompt) for prompt in prompts] == [1] * len(prompts)
    held = [len(local_keys(pool, prompts)) for pool in pools]
    assert held == [len(prompts) if number in (0, *readers) else 0 for number in range(len(pools))]
    return prompts


def confirmed(cluster: Cluster) -> float:
    """Copies that were dropped, at all nodes."""
    return sum(total(node, "tokenlake_confirmed_segments_total") for node in cluster.nodes)


def test_a_sound_copy_elsewhere_is_used_by_the_same_fetch(cluster: Cluster, pools: list[Pool]) -> None:
    """The owner, node 0, and node 1 have a copy of each prompt. The copy that is fetched first is corrupt; that of node
    1 is found where node 1 is a candidate of the key."""
    prompts = stored(cluster, pools, 1)
    for prompt in prompts:
        key = pools[2].prefix(prompt.tokens).keys[0]
        with match(pools[2], prompt) as lease:
            (source,) = lease.nodes()
            assert flip(pools[[node.name for node in cluster.nodes].index(source)], key)
            arrays = lease.fetch(deadline_s=LIMIT_S)
            assert prompt.wrong(arrays) == 0
            del arrays
    assert total(cluster.nodes[2], "tokenlake_corrupt_segments_total") == len(prompts)
    wait_until(lambda: confirmed(cluster) == len(prompts), "each wrong copy was checked and dropped")
    for prompt in prompts:
        for pool in pools:
            assert read(pool, prompt) <= 1


def test_frozen_and_killed_engine_frees_its_quarantine() -> None:
    with daemons(lease_s="0.4", reservation_s="0.4") as cluster, EngineProcess(cluster.nodes[0].socket) as engine:
        node = cluster.nodes[0]
        engine.ask("prepare", seed=6, segments=8)
        engine.freeze()
        wait_until(lambda: total(node, "tokenlake_quarantined_slots") == 8, "in quarantine")
        engine.kill()
        wait_until(lambda: total(node, "tokenlake_processes") == 0, "its death is seen")
        assert total(node, "tokenlake_quarantined_slots") == 0
