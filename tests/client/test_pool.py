"""A pool of several threads, in a forked process, and with slots that are reused or of several sizes."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading

import numpy as np
import pytest
from msgspec import structs

from tests.client.connections import refill
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    EngineProcess,
    Prompt,
    census,
    daemons,
    match,
    read,
    store,
    wait_until,
)
from tokenlake.wire import Code
from tokenlake_client import MatchOptions, Pool
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
            wait_until(lambda: census(node) == 1, "the daemon noticed the parent's death")
            refill(pool)
            assert read(pool, Prompt(9, 4)) == 0
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_reused_slot_is_not_copied(pool: Pool) -> None:
    """The slot's generation has changed: the bytes that were copied from it are not counted."""
    prompt = Prompt(31, 4)
    store(pool, prompt)
    lease = match(pool, prompt)
    lease.release(2, 4)
    refill(pool, 31)
    out = np.zeros((4, LAYOUT.segment_bytes), np.uint8)
    assert lease.copy_into(list(out)) == 2
    assert prompt.wrong(list(out[:2])) == 0
    lease.release()


def test_a_lease_over_regions_of_different_sizes() -> None:
    """In 512 KiB, with segments of 20 KiB, six regions have 4 slots and one has 1."""
    layout = structs.replace(LAYOUT, layers=5, kv_heads=1)
    content = np.arange(25, dtype=np.uint8)
    with daemons(1, "512KiB", "64KiB") as cluster, cluster.connect(0, layout) as pool:
        keys = pool.prefix(range(len(content) * layout.segment_tokens)).keys

        def store_missing() -> bool:
            codes = pool.store_all(keys, lambda index, slot: slot.fill(content[index]), patience=LIMIT_S)
            return set(codes) == {Code.EXISTS}

        wait_until(store_missing, "all segments are in memory")
        for start in range(0, len(keys), 5):
            with pool.match(keys[start : start + 5], MatchOptions(independent=True)) as lease:
                assert lease.hits == len(keys[start : start + 5])
                assert [array[-1] for array in lease.fetch()] == content[start : start + 5].tolist()
