"""Copies with wrong bytes in real daemons: no reader gets them for long, and a sound copy takes their place."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    Prompt,
    accounted,
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
    with daemons(3, "24MiB", "4MiB", hot="off") as cluster:
        yield cluster


@pytest.fixture
def pools(cluster: Cluster) -> Iterator[list[Pool]]:
    """One pool at each node. None of them verifies checksums."""
    pools = [cluster.connect(number, LAYOUT) for number in range(3)]
    yield pools
    for pool in pools:
        pool.close()


def holds(pool: Pool, prompt: Prompt) -> bool:
    """Is the prompt's one segment in the arena of the pool's node?"""
    return bool(local_keys(pool, [prompt]))


def held_by(pools: list[Pool], prompt: Prompt) -> list[int]:
    """The nodes with a copy of the prompt's one segment."""
    return [number for number, pool in enumerate(pools) if holds(pool, prompt)]


def kept_at(cluster: Cluster, pools: list[Pool], nodes: list[int]) -> list[Prompt]:
    """Prompts of one segment each, stored by the engine of node 0, of which exactly `nodes` have a copy. More prompts
    are stored until there is one: a node gets no segments before the writer's node has heard how full it is."""
    found: list[Prompt] = []
    seeds = itertools.count(9100)
    until = time.monotonic() + LIMIT_S
    while not found:
        assert time.monotonic() < until, f"no prompt has copies at {nodes} alone"
        prompts = [Prompt(seed, 1) for seed in itertools.islice(seeds, 40)]
        for prompt in prompts:
            store(pools[0], prompt)
        wait_told(cluster)
        found = [prompt for prompt in prompts if held_by(pools, prompt) == nodes]
    return found


def confirmed(cluster: Cluster) -> float:
    """Copies that were dropped, at all nodes."""
    return sum(total(node, "tokenlake_confirmed_segments_total") for node in cluster.nodes)


def test_a_corrupt_copy_is_dropped_and_recomputed(cluster: Cluster, pools: list[Pool]) -> None:
    """Each prompt has one copy, at node 0, with a flipped bit. The engines there do not verify checksums."""
    prompts = kept_at(cluster, pools, [0])
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
    assert total(cluster.nodes[1], "tokenlake_healed_segments_total") == len(prompts)
    for node in cluster.nodes:
        wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up", 2 * LIMIT_S)  # type: ignore[misc]


def test_a_sound_copy_elsewhere_is_used_by_the_same_fetch(cluster: Cluster, pools: list[Pool]) -> None:
    """Both candidates, nodes 0 and 1, have a copy of some prompts. The copy that is fetched first is corrupt."""
    prompts = kept_at(cluster, pools, [0, 1])
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
    assert total(cluster.nodes[2], "tokenlake_healed_segments_total") == healed
    wait_until(lambda: confirmed(cluster) == len(prompts), "each wrong copy was checked and dropped")
    for prompt in prompts:
        for pool in pools:
            assert read(pool, prompt) <= 1


def test_a_verifying_engine_reports_a_corrupt_copy(cluster: Cluster, pools: list[Pool]) -> None:
    prompts = kept_at(cluster, pools, [0])
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
    assert total(cluster.nodes[0], "tokenlake_healed_segments_total") == len(prompts)
