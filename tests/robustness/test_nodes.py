"""Daemons that die, freeze, or hold flipped bits, under a small workload with every byte compared."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    Prompt,
    daemons,
    flip,
    found_keys,
    local_keys,
    match,
    outcomes,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tokenlake.errors import DeadlinePassed, Unreachable
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


SHARED = [Prompt(seed, 4) for seed in range(4)]
PROMPTS = [Prompt(100 + seed, 4, SHARED[seed % 4]) for seed in range(48)]
DISTINCT = sum(prompt.segments for prompt in SHARED) + 4 * len(PROMPTS)


class Replay:
    """Requests round robin: read and compare the cached prefix, store the rest. An error counts as a miss."""

    def __init__(self, pools: list[Pool]) -> None:
        self.pools = pools
        self.failed = [0] * len(pools)
        self.timed_out = 0
        self.wrong = 0

    def request(self, number: int, prompt: Prompt) -> None:
        at = number % len(self.pools)
        pool = self.pools[at]
        keys = pool.prefix(prompt.tokens).keys
        try:
            with pool.match(keys) as lease:
                arrays = lease.fetch()
                self.wrong += prompt.wrong(arrays)
                hits = len(arrays)
            del arrays
            pool.store_all(keys[hits:], lambda index, array: prompt.fill(hits + index, array), first=hits)
        except Unreachable as error:
            self.failed[at] += 1
            self.timed_out += isinstance(error, DeadlinePassed)

    def run(self, prompts: list[Prompt], at: dict[int, Callable[[], None]] | None = None) -> None:
        """`at`: actions by the number of the request before which they run, in another thread, so that calls are in
        flight."""
        faults = [threading.Thread(target=fault) for fault in (at or {}).values()]
        for number, prompt in enumerate(prompts):
            for when, thread in zip(at or {}, faults, strict=True):
                if when == number:
                    thread.start()
            self.request(number, prompt)
        for thread in faults:
            thread.join()


def primary_copies(cluster: Cluster) -> float:
    """Primary copies on all running nodes."""
    return sum(
        value
        for node in cluster.nodes
        if node.running
        for name, value in node.metrics().items()
        if name.startswith("tokenlake_segments{") and 'kind="primary"' in name
    )


def settle(cluster: Cluster) -> None:
    """Wait until writes have ended, and no peer that is up is suspect or overdue."""
    cluster.wait_ready()
    wait_told(cluster)


def test_a_node_is_killed_in_the_middle_of_a_replay(cluster: Cluster, pools: list[Pool]) -> None:
    victim = cluster.nodes[2]
    replay = Replay(pools)
    replay.run(PROMPTS * 2, {60: victim.kill})
    assert replay.wrong == 0
    assert replay.failed[:2] == [0, 0], "engines of other nodes see misses, no errors"
    assert replay.failed[2] > 0
    assert replay.timed_out == 0
    assert [pool.engine.timeouts for pool in pools[:2]] == [0, 0]

    # Lost segments are computed again by the next request; the pool is complete without the dead node.
    survivors = Replay(pools[:2])
    survivors.run(PROMPTS)
    wait_told(cluster)
    for pool in pools[:2]:
        wait_until(lambda pool=pool: all(read(pool, p) == 8 for p in PROMPTS), "all is found")  # type: ignore[misc]

    victim.start()
    cluster.wait_ready()
    wait_until(lambda: pools[2].connected, "its engine is back")
    again = Replay(pools)
    again.run(PROMPTS * 2)
    assert (again.wrong, again.failed) == (0, [0, 0, 0])
    fresh = [Prompt(9000 + seed, 8) for seed in range(12)]
    for number, prompt in enumerate(fresh):
        assert outcomes(store(pools[number % 2], prompt)) == {Code.COMMITTED}
    settle(cluster)
    assert total(victim, "tokenlake_received_segments_total") > 0, "it is used again"
    for pool in pools:
        assert all(read(pool, prompt) == 8 for prompt in fresh)
    wait_until(lambda: primary_copies(cluster) <= DISTINCT + 8 * len(fresh), "no segment has two owners")


def test_only_what_the_dead_node_held_is_lost(cluster: Cluster, pools: list[Pool]) -> None:
    for number, prompt in enumerate(PROMPTS):
        store(pools[number % 3], prompt)
    settle(cluster)
    held = [local_keys(pool, PROMPTS) for pool in pools]
    assert set.union(*held) == found_keys(pools[0], PROMPTS)
    only_there = held[2] - held[0] - held[1]
    assert only_there
    cluster.nodes[2].kill()
    for pool in pools[:2]:
        # The segments with a copy at another node are found once that node and their directory nodes have noticed the
        # death.
        wait_until(lambda pool=pool: held[0] | held[1] <= found_keys(pool, PROMPTS), "what others hold is found")  # type: ignore[misc]
        assert set.union(*held) - found_keys(pool, PROMPTS) == only_there


def test_a_frozen_node_stops_the_calls_in_flight_once() -> None:
    # `suspect_ms` is at its maximum, so that matches time out and pings do not.
    with daemons(3, "24MiB", "4MiB", suspect_ms="60000", match_deadline_ms="300") as cluster:
        pools = [cluster.connect(number, LAYOUT) for number in range(3)]
        for number, prompt in enumerate(PROMPTS):
            store(pools[number % 3], prompt)
        settle(cluster)
        pools.pop().close()
        frozen, asking = cluster.nodes[2], cluster.nodes[0]
        before = total(asking, "tokenlake_peer_timeouts_total")
        frozen.freeze()
        failures: list[str] = []
        threads = [threading.Thread(target=_read_all, args=(pools[0], failures)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert failures == []
        waited = total(asking, "tokenlake_peer_timeouts_total") - before
        assert 1 <= waited <= len(threads), "calls that began before the first timeout"
        assert pools[0].engine.timeouts == 0
        frozen.thaw()
        wait_until(lambda: all(read(pools[0], prompt) == 8 for prompt in PROMPTS), "all is found again")
        for pool in pools:
            pool.close()


def _read_all(pool: Pool, failures: list[str]) -> None:
    for prompt in PROMPTS:
        try:
            with match(pool, prompt) as lease:
                arrays = lease.fetch()
                failures.extend(["wrong bytes"] * prompt.wrong(arrays))
                del arrays
        except Exception as error:
            failures.append(repr(error))


def test_a_node_is_frozen_in_the_middle_of_a_replay(cluster: Cluster, pools: list[Pool]) -> None:
    victim = cluster.nodes[2]
    replay = Replay(pools)
    replay.run(PROMPTS * 2, {60: victim.freeze})
    assert replay.wrong == 0
    assert replay.failed[:2] == [0, 0]
    # The frozen node's own engine may have had a request and a heartbeat under way.
    assert 1 <= pools[2].engine.timeouts <= 2
    wait_until(lambda: total(cluster.nodes[0], "tokenlake_suspected_peers_total") >= 1, "it is SUSPECT")
    victim.thaw()
    wait_until(lambda: _answers(pools[2]), "its engine is served again")
    again = Replay(pools)
    again.run(PROMPTS * 2)
    assert again.wrong == 0
    settle(cluster)
    for pool in pools:
        wait_until(lambda pool=pool: all(read(pool, p) == 8 for p in PROMPTS), "all is found")  # type: ignore[misc]


def _answers(pool: Pool) -> bool:
    try:
        pool.match([])
    except Unreachable:
        return False
    return True


def test_flipped_bits_are_a_miss_for_the_reader(cluster: Cluster, pools: list[Pool]) -> None:
    prompt = Prompt(7777, 12)
    store(pools[0], prompt)
    wait_told(cluster)
    keys = pools[0].prefix(prompt.tokens).keys
    flipped = [sum(flip(pool, key) for pool in pools[:2]) for key in keys]
    with pools[2].match(keys, deadline_s=2.0) as lease:
        assert lease.hits == 12
        here = [code == Code.LOCAL for code in lease.codes]
        arrays = lease.fetch(deadline_s=LIMIT_S)
        intact = next(index for index, (local, flips) in enumerate(zip(here, flipped, strict=True)) if not local)
        assert len(arrays) == intact
        assert prompt.wrong(arrays) == 0
        del arrays
    # The same fetch asks for another copy. Where that has a flipped bit as well, it is counted too.
    refused = total(cluster.nodes[2], "tokenlake_corrupt_segments_total")
    assert 0 < here.count(False) <= refused <= sum(flipped)
    assert all(flipped[index] for index, local in enumerate(here) if not local)


def test_a_large_transfer_from_a_source_that_freezes(cluster: Cluster, pools: list[Pool]) -> None:
    """The receiver gives up and its slots get new owners while the source still sends."""
    source: Node = cluster.nodes[1]
    prompts = [Prompt(8000 + seed, 48) for seed in range(4)]
    for prompt in prompts:
        store(pools[1], prompt)
    wait_told(cluster)
    pools[2].close()
    for attempt in range(6):
        prompt = prompts[attempt % 4]
        with match(pools[0], prompt) as lease:
            fetching = threading.Thread(target=lambda lease=lease: lease.fetch(deadline_s=0.05))
            fetching.start()
            source.freeze()
            fetching.join(LIMIT_S)
        fill = [Prompt(20_000 + attempt * 100 + seed, 48) for seed in range(4)]
        for other in fill:
            store(pools[0], other, patience=0.1)
        source.thaw()
        for other in fill:
            read(pools[0], other)
        wait_until(lambda: total(cluster.nodes[0], "tokenlake_quarantined_slots") == 0, "receivers returned")
    for prompt in prompts:
        read(pools[0], prompt)
