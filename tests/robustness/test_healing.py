"""Copies with wrong bytes in real daemons: no reader gets them for long, and a sound copy takes their place."""

from __future__ import annotations

import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    Prompt,
    accounted,
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


def test_a_corrupt_copy_is_dropped_and_recomputed(cluster: Cluster, pools: list[Pool]) -> None:
    """Each prompt has one copy, at node 0, with a flipped bit. The engines there do not verify checksums."""
    prompts = stored(cluster, pools)
    for prompt in prompts:
        assert flip(pools[0], pools[0].prefix(prompt.tokens).keys[0])
        assert read(pools[1], prompt) == 0, "the corrupt segment is a miss"
    wait_until(lambda: confirmed(cluster) == len(prompts), "each copy was checked and dropped")
    for prompt in prompts:
        assert read(pools[0], prompt) == 0, "the engine at the source misses as well"
        store(pools[1], prompt)
    wait_told(cluster)
    for prompt in prompts:
        for pool in pools:
            assert read(pool, prompt) == 1
    assert total(cluster.nodes[0], "tokenlake_reported_segments_total") == len(prompts)
    for node in cluster.nodes:
        wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up", 2 * LIMIT_S)  # type: ignore[misc]


def test_a_sound_copy_elsewhere_is_used_by_the_same_fetch(cluster: Cluster, pools: list[Pool]) -> None:
    """The owner, node 0, and node 1 have a copy of each prompt. The copy that is fetched first is corrupt; that of node
    1 is found where node 1 is a candidate of the key."""
    prompts = stored(cluster, pools, 1)
    healed = 0
    for prompt in prompts:
        key = pools[2].prefix(prompt.tokens).keys[0]
        with match(pools[2], prompt) as lease:
            (source,) = lease.nodes()
            assert flip(pools[[node.name for node in cluster.nodes].index(source)], key)
            arrays = lease.fetch(deadline_s=LIMIT_S)
            assert prompt.wrong(arrays) == 0
            healed += len(arrays)
            del arrays
    assert healed > 0
    assert total(cluster.nodes[2], "tokenlake_corrupt_segments_total") == len(prompts)
    wait_until(lambda: confirmed(cluster) == len(prompts), "each wrong copy was checked and dropped")
    for prompt in prompts:
        for pool in pools:
            assert read(pool, prompt) <= 1


def test_a_verifying_engine_reports_a_corrupt_copy(cluster: Cluster, pools: list[Pool]) -> None:
    prompts = stored(cluster, pools)
    with Pool.connect(cluster.nodes[0].socket, LAYOUT, verify=True, deadlines=PATIENT) as careful:
        for prompt in prompts:
            assert flip(pools[0], pools[0].prefix(prompt.tokens).keys[0])
            assert read(careful, prompt) == 0
        wait_until(lambda: confirmed(cluster) == len(prompts), "each copy was checked and dropped")
        assert careful.corrupt == len(prompts)
        for prompt in prompts:
            assert read(pools[0], prompt) == 0, "the engine that does not verify misses"
            store(careful, prompt)
        wait_told(cluster)
        for prompt in prompts:
            for pool in (*pools, careful):
                assert read(pool, prompt) == 1
