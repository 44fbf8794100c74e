"""Leases: match, fetch, copy and release; arrays keep their segments leased."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from tests.client.connections import refill
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    EngineProcess,
    Prompt,
    daemons,
    match,
    read,
    store,
    wait_told,
    wait_until,
)
from tokenlake.wire import Code
from tokenlake_client import MatchOptions, Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


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


def test_a_second_process_attaches_to_a_lease(pool: Pool, shared: Cluster) -> None:
    prompt = Prompt(13, 5)
    store(pool, prompt)
    lease = match(pool, prompt)
    with EngineProcess(shared.nodes[0].socket, pool.engine.session) as rank:
        assert rank.session == pool.engine.session
        assert rank.ask("attach", lease=lease.ids, seed=13, segments=5) == {"hits": 5, "wrong": 0}
        lease.release()
        refill(pool, 5)
        assert rank.ask("compare") == {"hits": 5, "wrong": 0}
        assert read(pool, prompt) == 5, "still leased by the rank"
        rank.ask("release")
        assert pool.engine.attach(*lease.ids).hits in (0, 5)
        wait_until(lambda: pool.engine.attach(*lease.ids).hits == 0, "the lease ended")


def test_a_fetch_in_pieces(three: Cluster) -> None:
    prompt = Prompt(210, 12)
    with three.connect(0, LAYOUT) as writer, three.connect(1, LAYOUT) as reader:
        store(writer, prompt)
        wait_told(three)
        pending = reader.engine.begin_match(reader.prefix(prompt.tokens).keys, deadline_s=PATIENT_S)
        with pending.wait() as lease:
            assert lease.hits == 12
            assert lease.local_hits < 12
            first = lease.fetch(0, 5)
            rest = np.empty((7, LAYOUT.segment_bytes), np.uint8)
            assert lease.copy_into(list(rest), start=5) == 7
            assert prompt.wrong(first) == 0
            assert prompt.wrong(list(rest), start=5) == 0
            assert len(first) == 5
