"""Leases: match, fetch, copy and release; arrays keep their segments leased."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from msgspec import structs

from tests.client.connections import refill
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    PATIENT_S,
    EngineProcess,
    Prompt,
    daemons,
    match,
    outcomes,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tokenlake.wire import Code
from tokenlake_client import MatchOptions, Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


def test_stored_segments_are_read(pool: Pool) -> None:
    prompt = Prompt(1, 6)
    assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
    with match(pool, prompt) as lease:
        assert (lease.hits, lease.local_hits) == (6, 6)
        arrays = lease.fetch()
        assert prompt.wrong(arrays) == 0
        assert not arrays[0].flags.writeable
        assert arrays[0].shape == (LAYOUT.segment_bytes,)
    assert outcomes(store(pool, prompt)) == {Code.EXISTS}


def test_a_match_ends_where_the_prompts_differ(pool: Pool) -> None:
    shared = Prompt(2, 3)
    store(pool, Prompt(3, 2, shared))
    other = Prompt(4, 2, shared)
    with match(pool, other) as lease:
        assert lease.hits == 3
        assert outcomes(lease.codes[3:]) == {Code.MISSING}
        assert other.wrong(lease.fetch()) == 0
        assert len(lease.fetch(1, 3)) == 2
        out = np.empty((3, LAYOUT.segment_bytes), np.uint8)
        assert lease.copy_into(list(out), start=1) == 2
        assert other.wrong(list(out[:2]), start=1) == 0


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


def test_an_unknown_prompt_is_a_miss(pool: Pool) -> None:
    with match(pool, Prompt(5, 4)) as lease:
        assert lease.hits == 0
        assert lease.fetch() == []
    with pool.match([]) as empty:
        assert empty.hits == 0


def test_arrays_keep_their_segments_leased(pool: Pool) -> None:
    prompt = Prompt(8, 4)
    store(pool, prompt)
    with match(pool, prompt) as lease:
        view = lease.fetch(1)[1].view(np.float32).reshape(2, -1)[1][5:][::2]
        assert prompt.wrong(lease.fetch(0, 1)) == 0
        expected = view.copy()
    refill(pool, 2)
    assert view.tobytes() == expected.tobytes()
    with match(pool, prompt) as lease:
        assert lease.hits == 4, "what continues in an array keeps its beginning"
    keys = pool.prefix(prompt.tokens).keys
    with pool.match(keys[1:]) as lease:
        assert lease.hits == 3
    del view, lease
    gc.collect()
    refill(pool, 3)
    with pool.match(keys[2:3]) as lease:
        assert lease.hits == 0, "the last array is gone, and the lease ended"


def test_release_by_range(pool: Pool) -> None:
    prompt = Prompt(9, 8)
    store(pool, prompt)
    lease = match(pool, prompt)
    lease.release(2, 5)
    lease.release(2, 5)
    assert len(lease.fetch()) == 2, "a fetch ends at the first released segment"
    refill(pool, 4)
    kept = lease.fetch(5, 8)
    assert prompt.wrong(kept, start=5) == 0
    assert len(kept) == 3
    keys = pool.prefix(prompt.tokens).keys
    with pool.match(keys) as whole:
        assert whole.hits == 8, "what is leased keeps what is before it"
    del kept
    lease.release()


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


def test_closing_frees_slots(shared: Cluster) -> None:
    prompt = Prompt(15, 4)
    with shared.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        lease = match(pool, prompt)
        assert lease.hits == 4
    wait_until(lambda: total(shared.nodes[0], "tokenlake_processes") == 0, "the daemon processed Bye")
    with shared.connect(0, LAYOUT) as other:
        refill(other)
        assert read(other, prompt) == 0


def test_arrays_outlive_close(shared: Cluster) -> None:
    prompt = Prompt(16, 4)
    pool = shared.connect(0, LAYOUT)
    store(pool, prompt)
    arrays = match(pool, prompt).fetch()
    pool.close()
    with shared.connect(0, LAYOUT) as other:
        refill(other)
    assert prompt.wrong(arrays) == 0
    assert total(shared.nodes[0], "tokenlake_processes") == 1, "this process may still read"


def test_a_verifying_pool_finds_a_flipped_bit(shared: Cluster) -> None:
    prompt = Prompt(18, 4)
    with shared.connect(0, LAYOUT) as pool:
        write = pool.store(pool.prefix(prompt.tokens).keys)
        for index, array in write.slots:
            prompt.fill(index, array)
        slot = write.slots[2][1]
        write.commit()
        # A faulty writer stores into a slot that was published already.
        slot.flags.writeable = True
        slot[7] ^= 1
        with (
            Pool.connect(shared.nodes[0].socket, LAYOUT, verify=True, deadlines=PATIENT) as careful,
            match(careful, prompt) as lease,
        ):
            arrays = lease.fetch()
            assert len(arrays) == 2
            assert prompt.wrong(arrays) == 0
            assert careful.corrupt == 1
            del arrays
            assert lease.copy_into(list(np.empty((4, LAYOUT.segment_bytes), np.uint8))) == 2
            assert careful.corrupt == 2


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
