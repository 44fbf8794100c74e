"""Pool against one real daemon, and three: match, fetch, store, release, and what keeps a segment leased."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    EngineProcess,
    Prompt,
    daemons,
    match,
    outcomes,
    read,
    store,
    total,
    wait_pushed,
    wait_until,
)
from tokenlake.identity import LeaseId, SegmentKey
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[Pool]:
    with cluster.connect(0, LAYOUT) as pool:
        yield pool
    wait_until(lambda: total(cluster.nodes[0], "tokenlake_processes") == 0, "the daemon saw us leave")
    assert total(cluster.nodes[0], "tokenlake_quarantined_slots") == 0


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with daemons(3) as cluster:
        yield cluster


def quarantined(cluster: Cluster) -> float:
    return total(cluster.nodes[0], "tokenlake_quarantined_slots")


def refill(pool: Pool, seed: int) -> None:
    """Write more than the arena holds, so that everything that may be evicted is."""
    for offset in range(12):
        store(pool, Prompt(seed * 1000 + offset, 32))


def test_what_is_stored_is_matched_and_read(pool: Pool) -> None:
    prompt = Prompt(1, 6)
    assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
    with match(pool, prompt) as lease:
        assert (lease.hits, lease.local_hits) == (6, 6)
        arrays = lease.fetch()
        assert prompt.wrong(arrays) == 0
        assert not arrays[0].flags.writeable
        assert arrays[0].shape == (LAYOUT.segment_bytes,)
    assert outcomes(store(pool, prompt)) == {Code.EXISTS}


def test_a_match_ends_where_the_prompts_part(pool: Pool) -> None:
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


def test_arrays_are_stored_and_copied_out(pool: Pool) -> None:
    """Also where one segment is there already, and where more is asked for than is there."""
    prompt = Prompt(30, 40)
    segments = np.stack([np.frombuffer(prompt.content(index), np.uint8) for index in range(40)])
    keys = pool.prefix(prompt.tokens).keys
    with pool.store(keys[3:4]) as write:
        write.fill(segments[3:4])
        with pytest.raises(ValueError, match="read-only"):
            write.slots[0][1][0] = 1
    assert bytes(write.codes) == bytes([Code.COMMITTED])
    codes = pool.store_all(keys, segments, patience=LIMIT_S)
    assert [index for index, code in enumerate(codes) if code == Code.EXISTS] == [3]
    assert codes.count(Code.COMMITTED) == 39
    out = np.zeros((42, LAYOUT.segment_bytes), np.uint8)
    with Pool.connect(pool.socket, LAYOUT, verify=True) as careful, match(careful, prompt) as lease:
        assert lease.copy_into(list(out)) == 40
        assert careful.corrupt == 0
    assert np.array_equal(out[:40], segments)


def test_nothing_is_copied_of_what_was_released_and_reused(pool: Pool) -> None:
    """The generation tells: a copy out of a slot that has another owner now is none."""
    prompt = Prompt(31, 4)
    store(pool, prompt)
    lease = match(pool, prompt)
    lease.release(2, 3)
    refill(pool, 31)
    out = np.zeros((4, LAYOUT.segment_bytes), np.uint8)
    assert lease.copy_into(list(out)) == 2
    assert prompt.wrong(list(out[:2])) == 0
    lease.release()


def test_nothing_is_found_of_a_stranger(pool: Pool) -> None:
    with match(pool, Prompt(5, 4)) as lease:
        assert (lease.hits, lease.id) == (0, 0)
        assert lease.fetch() == []
    with pool.match([]) as empty:
        assert empty.hits == 0


def test_a_prompt_that_all_ask_for_at_once_is_computed_once(three: Cluster) -> None:
    prompt = Prompt(7, 12)
    with three.connect(0, LAYOUT) as first, three.connect(1, LAYOUT) as second, three.connect(2, LAYOUT) as third:
        keys = first.prefix(prompt.tokens).keys
        with first.match(keys, deadline_s=PATIENT_S, in_flight_wait_s=10.0) as lease:
            assert lease.hits == 0
        waiting = [pool.begin_match(keys, deadline_s=PATIENT_S, in_flight_wait_s=10.0) for pool in (second, third)]
        store(first, prompt)
        for pending in waiting:
            with pending.wait() as lease:
                assert lease.hits == 12
                assert prompt.wrong(lease.fetch(deadline_s=LIMIT_S)) == 0


def claimed(pool: Pool, keys: Sequence[SegmentKey], code: Code) -> None:
    """Wait until this is what the directory nodes say of all."""
    wait_until(lambda: set(pool.match(keys, deadline_s=PATIENT_S).codes) == {code}, f"all are {code.name}")


def test_a_prompt_that_is_stored_in_parts_is_waited_for_to_its_end(three: Cluster) -> None:
    prompt = Prompt(8, 12)
    with three.connect(0, LAYOUT) as first, three.connect(1, LAYOUT) as second:
        keys = first.prefix(prompt.tokens).keys
        first.claim(keys, 10.0)
        claimed(second, keys, Code.PENDING)
        waiting = second.begin_match(keys, deadline_s=PATIENT_S, in_flight_wait_s=10.0)
        for start in range(0, 12, 4):
            assert waiting.poll() is None
            part = [np.frombuffer(prompt.content(index), np.uint8) for index in range(start, start + 4)]
            assert set(first.store_all(keys[start : start + 4], part, start, 20.0)) == {Code.COMMITTED}
        with waiting.wait() as lease:
            assert lease.hits == 12
            assert prompt.wrong(lease.fetch(deadline_s=LIMIT_S)) == 0


def test_claims_end_when_they_are_taken_back_and_with_the_pool(three: Cluster) -> None:
    with three.connect(1, LAYOUT) as second:
        with three.connect(0, LAYOUT) as first:
            keys = first.prefix(Prompt(9, 12).tokens).keys
            first.claim(keys, 10.0)
            claimed(second, keys, Code.PENDING)
            first.claim(keys, 0.0)
            claimed(second, keys, Code.MISSING)
            first.claim(keys, 10.0)
            claimed(second, keys, Code.PENDING)
        claimed(second, keys, Code.MISSING)


def test_a_sign_of_life_is_given_while_a_match_waits(three: Cluster) -> None:
    with three.connect(0, LAYOUT) as first, three.connect(1, LAYOUT) as second:
        keys = first.prefix(Prompt(10, 12).tokens).keys
        first.claim(keys, 10.0)
        claimed(second, keys, Code.PENDING)
        waiting = second.begin_match(keys, deadline_s=PATIENT_S, in_flight_wait_s=10.0)
        beat = second.begin_beat()
        wait_until(beat.poll, "the daemon answers")
        assert waiting.poll() is None
        first.claim(keys, 0.0)
        with waiting.wait() as lease:
            assert (lease.hits, lease.codes[0]) == (0, Code.MISSING)


def test_begin_poll_and_cancel(pool: Pool, cluster: Cluster) -> None:
    prompt = Prompt(6, 40)
    store(pool, prompt)
    keys = pool.prefix(prompt.tokens).keys
    pending = pool.begin_match(keys)
    wait_until(lambda: pending.poll() is not None, "the answer is here")
    lease = pending.poll()
    assert lease is not None
    assert lease.hits == 40
    lease.release()
    # More than a session may lease at a time, begun and cancelled: nothing stays behind.
    for _ in range(10):
        pool.begin_match(keys).cancel()
    answered = pool.begin_match(keys)
    answered.wait()
    answered.cancel()
    wait_until(lambda: match(pool, prompt).hits == 40, "cancelled matches are given back")


def test_an_answer_that_nobody_took_is_given_back(pool: Pool) -> None:
    prompt = Prompt(7, 40)
    store(pool, prompt)
    keys = pool.prefix(prompt.tokens).keys
    pending = [pool.begin_match(keys) for _ in range(3)]
    pool.match([]).release()
    for each in pending:
        each.cancel()
    with match(pool, prompt) as lease:
        assert lease.hits == 40


def test_threads_share_a_pool(cluster: Cluster) -> None:
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
                    pending = pool.begin_match(pool.prefix(prompt.tokens).keys)
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

    with cluster.connect(0, LAYOUT) as pool:
        threads = [threading.Thread(target=work, args=(seed, pool)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)
        gc.collect()
        refill(pool, 1)
        assert all(read(pool, prompt) == 0 for prompt in prompts), "something stayed leased"


def test_views_keep_their_segment_leased(pool: Pool) -> None:
    prompt = Prompt(8, 4)
    store(pool, prompt)
    with match(pool, prompt) as lease:
        view = lease.fetch(1)[1].view(np.float32).reshape(2, -1)[1][5:][::2]
        assert prompt.wrong(lease.fetch(0, 1)) == 0
        expected = view.copy()
    refill(pool, 2)
    assert view.tobytes() == expected.tobytes()
    with match(pool, prompt) as lease:
        assert lease.hits == 0, "only what was fetched together stays"
    keys = pool.prefix(prompt.tokens).keys
    with pool.match(keys[1:]) as lease:
        assert lease.hits == 3
    del view, lease
    gc.collect()
    refill(pool, 3)
    with pool.match(keys[2:3]) as lease:
        assert lease.hits == 0, "the last look ended, and so did the lease"


def test_release_by_range(pool: Pool) -> None:
    prompt = Prompt(9, 8)
    store(pool, prompt)
    lease = match(pool, prompt)
    lease.release(2, 5)
    lease.release(2, 5)
    assert len(lease.fetch()) == 2, "nothing beyond a gap"
    refill(pool, 4)
    kept = lease.fetch(5, 8)
    assert prompt.wrong(kept, start=5) == 0
    assert len(kept) == 3
    keys = pool.prefix(prompt.tokens).keys
    with pool.match(keys[2:3]) as gone:
        assert gone.hits == 0
    del kept
    lease.release()


def test_an_aborted_write_leaves_nothing(pool: Pool) -> None:
    prompt = Prompt(10, 3)
    keys = pool.prefix(prompt.tokens).keys
    write = pool.store(keys)

    def prefill() -> None:
        with write:
            prompt.fill(0, write.slots[0][1])
            raise RuntimeError("mid-prefill")

    with pytest.raises(RuntimeError, match="mid-prefill"):
        prefill()
    write.abort()
    with match(pool, prompt) as lease:
        assert outcomes(lease.codes) == {Code.MISSING}
    with pytest.raises(ZeroDivisionError):
        pool.store_all(keys, lambda index, array: 1 // 0)  # type: ignore[arg-type]
    assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
    assert read(pool, prompt) == 3


def test_a_fill_that_failed_is_made_again(pool: Pool) -> None:
    """The checksums of the first attempt were taken for those of the second's first segments: good bytes that no node
    would take, and that nobody could store again."""
    prompt = Prompt(6, 4)
    failing = iter([False, True])

    def prefill(index: int, slot: NDArray[np.uint8]) -> None:
        if next(failing, False):
            raise RuntimeError("mid-prefill")
        prompt.fill(index, slot)

    with pool.store(pool.prefix(prompt.tokens).keys) as write:
        with pytest.raises(RuntimeError, match="mid-prefill"):
            write.fill(prefill)
        write.fill(prefill)
    with Pool.connect(pool.socket, LAYOUT, verify=True) as careful, match(careful, prompt) as lease:
        assert len(lease.fetch()) == 4
        assert careful.corrupt == 0


def test_a_committed_slot_cannot_be_written(pool: Pool) -> None:
    prompt = Prompt(11, 1)
    with pool.store(pool.prefix(prompt.tokens).keys) as write:
        array = write.slots[0][1]
        prompt.fill(0, array)
    assert bytes(write.codes) == bytes([Code.COMMITTED])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert write.commit() == bytes([Code.COMMITTED]), "a second commit only repeats the codes"


def test_another_writer_is_pending(pool: Pool) -> None:
    prompt = Prompt(12, 2)
    with pool.store(pool.prefix(prompt.tokens).keys) as write:
        assert outcomes(store(pool, prompt)) == {Code.PENDING}
        with match(pool, prompt) as lease:
            assert lease.hits == 0
        for index, array in write.slots:
            prompt.fill(index, array)
    assert read(pool, prompt) == 2


def test_a_second_process_attaches_to_a_lease(pool: Pool, cluster: Cluster) -> None:
    prompt = Prompt(13, 5)
    store(pool, prompt)
    lease = match(pool, prompt)
    with EngineProcess(cluster.nodes[0].socket, pool.session) as rank:
        assert rank.session == pool.session
        assert rank.ask("attach", lease=lease.id, seed=13, segments=5) == {"hits": 5, "wrong": 0}
        lease.release()
        refill(pool, 5)
        assert rank.ask("compare") == {"hits": 5, "wrong": 0}
        assert read(pool, prompt) == 5, "still leased by the rank"
        rank.ask("release")
        assert pool.attach(LeaseId(lease.id)).hits in (0, 5)
        wait_until(lambda: pool.attach(LeaseId(lease.id)).hits == 0, "the lease ended")


def test_shards_come_from_two_processes(pool: Pool, cluster: Cluster) -> None:
    prompt = Prompt(14, 3)
    with EngineProcess(cluster.nodes[0].socket, pool.session) as rank:
        begun = rank.ask("prepare", seed=14, segments=3)
        assert rank.ask("commit", shard=1)["codes"] == [Code.RESERVED] * 3
        assert outcomes(match(pool, prompt).codes) == {Code.PENDING}
        write = pool.attach_write(begun["write"])
        for index, array in write.slots:
            array[: LAYOUT.shard_bytes] = np.frombuffer(prompt.content(index)[: LAYOUT.shard_bytes], np.uint8)
        assert outcomes(write.commit(0b01)) == {Code.COMMITTED}
        assert read(pool, prompt) == 3


def test_closing_frees_slots(cluster: Cluster) -> None:
    prompt = Prompt(15, 4)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        lease = match(pool, prompt)
        assert lease.hits == 4
    wait_until(lambda: total(cluster.nodes[0], "tokenlake_processes") == 0, "it said Bye")
    with cluster.connect(0, LAYOUT) as other:
        refill(other, 6)
        assert read(other, prompt) == 0


def test_arrays_outlive_close(cluster: Cluster) -> None:
    prompt = Prompt(16, 4)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    arrays = match(pool, prompt).fetch()
    pool.close()
    with cluster.connect(0, LAYOUT) as other:
        refill(other, 7)
    assert prompt.wrong(arrays) == 0
    assert total(cluster.nodes[0], "tokenlake_processes") == 1, "this process may still look"


def test_a_pool_may_be_collected(cluster: Cluster) -> None:
    before = total(cluster.nodes[0], "tokenlake_processes")
    pool = cluster.connect(0, LAYOUT)
    heart = pool._heart
    lease = match(pool, Prompt(17, 1))
    del pool, lease
    gc.collect()
    wait_until(lambda: total(cluster.nodes[0], "tokenlake_processes") == before, "the daemon saw it go")
    assert heart.daemon


def test_a_pool_that_verifies_finds_a_flipped_bit(cluster: Cluster) -> None:
    prompt = Prompt(18, 4)
    with cluster.connect(0, LAYOUT) as pool:
        write = pool.store(pool.prefix(prompt.tokens).keys)
        for index, array in write.slots:
            prompt.fill(index, array)
        slot = write.slots[2][1]
        write.commit()
        # The last word of a writer that breaks its word: a stray store into a published slot.
        slot.flags.writeable = True
        slot[7] ^= 1
        with Pool.connect(cluster.nodes[0].socket, LAYOUT, verify=True) as careful, match(careful, prompt) as lease:
            arrays = lease.fetch()
            assert len(arrays) == 2
            assert prompt.wrong(arrays) == 0
            assert careful.corrupt == 1
            del arrays
            assert lease.copy_into(list(np.empty((4, LAYOUT.segment_bytes), np.uint8))) == 2
            assert careful.corrupt == 2


def test_three_nodes_are_one_pool(three: Cluster) -> None:
    pools = [three.connect(number, LAYOUT) for number in range(3)]
    prompts = [Prompt(200 + number, 10) for number in range(6)]
    for number, prompt in enumerate(prompts):
        assert outcomes(store(pools[number % 3], prompt)) == {Code.COMMITTED}
    wait_pushed(three)
    for pool in pools:
        assert [read(pool, prompt) for prompt in prompts] == [10] * 6
    for pool in pools:
        pool.close()


def test_a_fetch_in_pieces(three: Cluster) -> None:
    prompt = Prompt(210, 12)
    with three.connect(0, LAYOUT) as writer, three.connect(1, LAYOUT) as reader:
        store(writer, prompt)
        wait_pushed(three)
        pending = reader.begin_match(reader.prefix(prompt.tokens).keys, deadline_s=PATIENT_S)
        with pending.wait() as lease:
            assert lease.hits == 12
            assert lease.local_hits < 12
            first = lease.fetch(0, 5)
            rest = np.empty((7, LAYOUT.segment_bytes), np.uint8)
            assert lease.copy_into(list(rest), start=5) == 7
            assert prompt.wrong(first) == 0
            assert prompt.wrong(list(rest), start=5) == 0
            assert len(first) == 5
