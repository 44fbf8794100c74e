"""Writes: reserve, fill, commit or abort."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.client.connections import answers
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    EngineProcess,
    Prompt,
    match,
    outcomes,
    read,
    store,
    total,
    wait_until,
)
from tokenlake.errors import DeadlinePassed
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


def test_arrays_are_stored_and_copied_out(pool: Pool) -> None:
    """One of the segments may be stored already, and there may be more arrays than segments."""
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
    with (
        Pool.connect(pool.engine.socket, LAYOUT, verify=True, deadlines=PATIENT) as careful,
        match(careful, prompt) as lease,
    ):
        assert lease.copy_into(list(out)) == 40
        assert careful.corrupt == 0
    assert np.array_equal(out[:40], segments)


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


def test_a_failed_fill_is_repeated(pool: Pool) -> None:
    """A fill that failed can be repeated. With the checksums of the first attempt, all nodes would refuse the right
    bytes of the second one."""
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
    with (
        Pool.connect(pool.engine.socket, LAYOUT, verify=True, deadlines=PATIENT) as careful,
        match(careful, prompt) as lease,
    ):
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


def test_a_second_writer_gets_pending(pool: Pool) -> None:
    prompt = Prompt(12, 2)
    with pool.store(pool.prefix(prompt.tokens).keys) as write:
        assert outcomes(store(pool, prompt)) == {Code.PENDING}
        with match(pool, prompt) as lease:
            assert lease.hits == 0
        for index, array in write.slots:
            prompt.fill(index, array)
    assert read(pool, prompt) == 2


def test_shards_come_from_two_processes(pool: Pool, shared: Cluster) -> None:
    prompt = Prompt(14, 3)
    with EngineProcess(shared.nodes[0].socket, pool.engine.session) as rank:
        begun = rank.ask("prepare", seed=14, segments=3)
        assert rank.ask("commit", shard=1)["codes"] == [Code.RESERVED] * 3
        assert outcomes(match(pool, prompt).codes) == {Code.PENDING}
        write = pool.engine.attach_write(begun["write"])
        for index, array in write.slots:
            array[: LAYOUT.shard_bytes] = np.frombuffer(prompt.content(index)[: LAYOUT.shard_bytes], np.uint8)
        assert outcomes(write.commit(0b01)) == {Code.COMMITTED}
        assert read(pool, prompt) == 3


def test_a_write_in_a_frozen_daemon_is_given_back(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt = Prompt(6, 4)
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(prompt.tokens).keys
        write = pool.store(keys)
        node.freeze()
        with pytest.raises(DeadlinePassed):
            pool.store(pool.prefix(Prompt(7, 4).tokens).keys)
        write.abort()
        node.thaw()
        wait_until(lambda: answers(pool), "it answers again")
        # The write that was aborted meanwhile, and the write whose grant arrived late, were both given back.
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert outcomes(store(pool, Prompt(7, 4))) == {Code.COMMITTED}
        assert total(node, "tokenlake_quarantined_slots") == 0
