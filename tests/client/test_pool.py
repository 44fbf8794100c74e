"""A pool of several threads, of three nodes, in a forked process, and collected."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading

import pytest

from tests.client.connections import heartbeat_threads, refill
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    EngineProcess,
    Prompt,
    match,
    outcomes,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


def test_threads_share_a_pool(shared: Cluster) -> None:
    failures: list[str] = []
    prompts = [Prompt(100 + number, 8) for number in range(24)]

    def work(seed: int, pool: Pool) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(60):
                prompt = draw.choice(prompts)
                action = draw.randrange(4)
                if action == 0:
                    store(pool, prompt)
                elif action == 1:
                    pending = pool.engine.begin_match(pool.prefix(prompt.tokens).keys)
                    if draw.random() < 0.5:
                        pending.cancel()
                    else:
                        pending.wait().release()
                elif action == 2:
                    with match(pool, prompt) as lease:
                        arrays = lease.fetch()
                        lease.release(0, draw.randrange(9))
                        failures.extend(["wrong bytes"] * prompt.wrong(arrays))
                else:
                    read(pool, prompt)
        except Exception as error:
            failures.append(repr(error))

    with shared.connect(0, LAYOUT) as pool:
        threads = [threading.Thread(target=work, args=(seed, pool)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)
        gc.collect()
        refill(pool)
        assert all(read(pool, prompt) == 0 for prompt in prompts), "a segment stayed leased"


def test_three_nodes_are_one_pool(three: Cluster) -> None:
    pools = [three.connect(number, LAYOUT) for number in range(3)]
    prompts = [Prompt(200 + number, 10) for number in range(6)]
    for number, prompt in enumerate(prompts):
        assert outcomes(store(pools[number % 3], prompt)) == {Code.COMMITTED}
    wait_told(three)
    for pool in pools:
        assert [read(pool, prompt) for prompt in prompts] == [10] * 6
    for pool in pools:
        pool.close()


def test_a_pool_may_be_collected(shared: Cluster) -> None:
    before, threads = total(shared.nodes[0], "tokenlake_processes"), heartbeat_threads()
    pool = shared.connect(0, LAYOUT)
    (heartbeat,) = heartbeat_threads() - threads
    assert heartbeat.daemon
    lease = match(pool, Prompt(17, 1))
    del pool, lease
    gc.collect()
    wait_until(lambda: total(shared.nodes[0], "tokenlake_processes") == before, "the process left")
    heartbeat.join(LIMIT_S)
    assert not heartbeat.is_alive()


def test_a_forked_child_does_not_keep_slots(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool, EngineProcess(node.socket) as engine:
        engine.ask("store", seed=9, segments=4)
        assert engine.ask("match", seed=9, segments=4)["hits"] == 4
        assert engine.ask("fork_and_read")["signal"] == signal.SIGSEGV, "the child has no mapping"
        child = engine.ask("fork")["child"]
        try:
            assert engine.ask("compare") == {"hits": 4, "wrong": 0}, "the child's close is not the parent's"
            assert engine.ask("state")["connected"]
            engine.kill()
            wait_until(lambda: total(node, "tokenlake_processes") == 1, "the daemon noticed the parent's death")
            refill(pool)
            assert read(pool, Prompt(9, 4)) == 0
        finally:
            os.kill(child, signal.SIGKILL)
