"""Leases and writes that several objects of one process hold, and attaches whose reply is late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.client.connections import answers, fill_from_another_pool, refill, scripted_link
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    PATIENT_S,
    Prompt,
    census,
    daemons,
    match,
    outcomes,
    read,
    store,
    wait_until,
)
from tokenlake.errors import DeadlinePassed, LimitReached, Unreachable
from tokenlake.hints import Hints
from tokenlake.identity import LeaseId
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SLOT_BYTES, slot_array
from tokenlake_client import Pool
from tokenlake_client.grants import Grants, LeaseHold, closed_with_arrays
from tokenlake_client.link import Connector, Link
from tokenlake_client.write import Write
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


def sessions(cluster: Cluster) -> float:
    return cluster.nodes[0].metrics()['tokenlake_map_entries{map="sessions"}']


def test_a_closed_pool_leaves_with_its_last_array(cluster: Cluster) -> None:
    """Its leases are released at once, and what the arrays do not cover may be reused."""
    prompt = Prompt(3, 8)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    lease = match(pool, prompt)
    arrays = lease.fetch(0, 2)
    pool.close()
    pool.close()
    wait_until(lambda: cluster.nodes[0].metrics()['tokenlake_map_entries{map="leases"}'] == 1, "it keeps the lease")
    for attempt in (
        lease.fetch,
        lambda: lease.copy_into([np.empty(LAYOUT.segment_bytes, np.uint8)]),
        lambda: pool.match([]),
        lambda: pool.store(pool.prefix(prompt.tokens).keys),
    ):
        with pytest.raises(Unreachable, match="closed"):
            attempt()
    fill_from_another_pool(cluster)
    assert prompt.wrong(arrays) == 0
    assert (sessions(cluster), census(cluster.nodes[0])) == (1, 1)
    del arrays
    wait_until(lambda: (sessions(cluster), census(cluster.nodes[0])) == (0, 0), "it left")
    lease.release()


def test_a_closed_pool_leaves_with_its_last_write(cluster: Cluster) -> None:
    pool = cluster.connect(0, LAYOUT)
    prompt = Prompt(4, 2)
    write = pool.store(pool.prefix(prompt.tokens).keys)
    pool.close()
    assert sessions(cluster) == 1
    for index, array in write.slots:
        prompt.fill(index, array)
    assert set(write.commit()) == {Code.COMMITTED}
    del write, array
    wait_until(lambda: (sessions(cluster), census(cluster.nodes[0])) == (0, 0), "it left")


def test_a_closed_pool_waits_for_the_answer_to_a_commit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = cluster.connect(0, LAYOUT)
    prompt = Prompt(77, 2)
    write = pool.store(pool.prefix(prompt.tokens).keys)
    pool.close()
    publish = Write._publish

    def late(write: Write, indices: tuple[int, ...], mask: int, checksums: bytes) -> bytes:
        # As the thread of the pool does meanwhile.
        assert not pool._grants.leave_if_free()
        return publish(write, indices, mask, checksums)

    monkeypatch.setattr(Write, "_publish", late)
    write.fill(prompt.fill)
    assert set(write.commit()) == {Code.COMMITTED}
    wait_until(lambda: pool._grants.left, "the pool has left")


def test_a_closed_pool_outlives_a_broken_connection(cluster: Cluster) -> None:
    """It resumes its session, so that the daemon hears of the end of its arrays."""
    prompt = Prompt(5, 4)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    arrays = match(pool, prompt).fetch()
    pool.close()
    pool.link.channel.close()
    wait_until(lambda: pool.connected, "it resumed the session")
    fill_from_another_pool(cluster)
    assert prompt.wrong(arrays) == 0
    del arrays
    wait_until(lambda: (sessions(cluster), census(cluster.nodes[0])) == (0, 0), "it left")


def test_a_pool_closed_without_a_connection_leaves(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon lives and keeps the leases of a process that maps the arena, so that the pool connects once more."""
    prompt = Prompt(15, 4)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    lease = match(pool, prompt)
    assert prompt.wrong(lease.fetch()) == 0
    tried = threading.Event()
    connect = Connector.connect

    def once_refused(*arguments: Any) -> Link:
        if tried.is_set():
            return connect(*arguments)
        tried.set()
        raise Unreachable("the daemon is busy")

    monkeypatch.setattr(Connector, "connect", once_refused)
    pool.link.channel.close()
    assert tried.wait(LIMIT_S)
    # The thread that connects again pauses now.
    pool.close()
    wait_until(lambda: (sessions(cluster), census(cluster.nodes[0])) == (0, 0), "it left")


def test_a_closed_pool_leaves_a_daemon_that_does_not_read(cluster: Cluster) -> None:
    """Its `Bye` waits until the daemon reads again: before, it was dropped, and the leases stayed."""
    node, prompt = cluster.nodes[0], Prompt(21, 4)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    lease = match(pool, prompt)
    assert lease.hits == 4
    node.freeze()
    try:
        while not pool.link.channel.unsent:
            pool.hint(pool.prefix(prompt.tokens).keys * 32, Hints())
        lease.release()
        pool.close()
        assert not pool._grants.left
    finally:
        node.thaw()
    wait_until(lambda: (sessions(cluster), census(node)) == (0, 0), "it left")
    wait_until(lambda: pool._grants.left, "its thread knows")


def test_a_closed_pool_leaves_a_dead_daemon() -> None:
    """Its arrays keep their bytes, and its thread ends."""
    with daemons(1) as cluster:
        prompt = Prompt(6, 4)
        pool = cluster.connect(0, LAYOUT)
        store(pool, prompt)
        arrays = match(pool, prompt).fetch()
        pool.close()
        cluster.nodes[0].kill()
        wait_until(lambda: not pool._heartbeat.is_alive(), "its thread has ended")
        assert prompt.wrong(arrays) == 0


def test_the_limit_of_closed_pools(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose closed pools wait for their arrays opens no further ones; those of other processes are served."""
    monkeypatch.setattr("tokenlake_client.pool.MAX_CLOSED", 3)
    wait_until(lambda: closed_with_arrays() == 0, "none is left of earlier tests")
    prompt, kept = Prompt(7, 4), []
    with cluster.connect(0, LAYOUT) as first:
        store(first, prompt)
    for _ in range(3):
        pool = cluster.connect(0, LAYOUT)
        kept.append(match(pool, prompt).fetch())
        pool.close()
    with pytest.raises(LimitReached, match="3 closed pools of this process"):
        cluster.connect(0, LAYOUT)
    kept.pop()
    wait_until(lambda: closed_with_arrays() == 2, "one has left")
    cluster.connect(0, LAYOUT).close()
    kept.clear()
    wait_until(lambda: sessions(cluster) == 0, "all left")


def test_close_while_another_thread_fetches(cluster: Cluster) -> None:
    """A thread that fetches while the pool is closed either gets no array, or the daemon receives no Bye and keeps the
    process, and with it the slots of the arrays."""
    prompt, rounds_with_arrays = Prompt(2, 8), 0
    kept: list[list[Any]] = []
    with cluster.connect(0, LAYOUT) as other:
        store(other, prompt)
        for _ in range(20):
            pool = cluster.connect(0, LAYOUT)
            lease = match(pool, prompt)
            lease.fetch(0, 1)
            arrays: list[Any] = []
            begun = threading.Barrier(2)

            def fetch(lease: Any = lease, arrays: list[Any] = arrays, begun: threading.Barrier = begun) -> None:
                begun.wait(LIMIT_S)
                try:
                    while True:
                        arrays[:] = lease.fetch()
                except Unreachable:
                    return

            thread = threading.Thread(target=fetch)
            thread.start()
            begun.wait(LIMIT_S)
            pool.close()
            thread.join(LIMIT_S)
            with pytest.raises(Unreachable, match="closed"):
                pool.match([])
            rounds_with_arrays += bool(arrays)
            kept.append(arrays)
        refill(other)
        assert census(cluster.nodes[0]) >= 1 + rounds_with_arrays, "the daemon does not know of an array"
        for arrays in kept:
            assert prompt.wrong(arrays) == 0


def attach_late(cluster: Cluster, attach: Callable[[], object]) -> None:
    """Call `attach`, whose reply arrives after its deadline."""
    node = cluster.nodes[0]
    node.freeze()
    try:
        with pytest.raises(DeadlinePassed):
            attach()
    finally:
        node.thaw()


def test_a_late_attach_ends_no_second_attach(cluster: Cluster) -> None:
    """The daemon counts a process as one holder of a lease, so the client gives back the grant of a late reply only if
    no other object of the process holds the lease."""
    prompt = Prompt(3, 8)
    node = cluster.nodes[0]
    with (
        cluster.connect(0, LAYOUT) as pool,
        Pool.connect(node.socket, LAYOUT, session=pool.engine.session, deadlines=PATIENT) as rank,
    ):
        store(pool, prompt)
        read(rank, prompt)
        lease = match(pool, prompt)
        attach_late(cluster, lambda: rank.engine.attach(*lease.ids))
        wait_until(lambda: answers(rank), "the daemon answers again")
        held = rank.engine.attach(*lease.ids)
        arrays = held.fetch()
        lease.release()
        answers(rank)
        fill_from_another_pool(cluster)
        assert len(arrays) == 8
        assert prompt.wrong(arrays) == 0
        del arrays
        held.release()
        fill_from_another_pool(cluster)
        assert read(pool, prompt) == 0, "nothing stayed leased"


def test_a_late_attach_to_a_lease_of_this_process(cluster: Cluster) -> None:
    prompt = Prompt(4, 8)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        lease = match(pool, prompt)
        attach_late(cluster, lambda: pool.engine.attach(*lease.ids))
        lease.release(6)
        wait_until(lambda: answers(pool), "the daemon answers again")
        answers(pool)
        fill_from_another_pool(cluster)
        arrays = lease.fetch(0, 6)
        assert len(arrays) == 6
        assert prompt.wrong(arrays) == 0
        with pool.match(pool.prefix(prompt.tokens).keys[6:], deadline_s=PATIENT_S) as gone:
            assert gone.hits == 0, "a segment that was released meanwhile is not leased"
        del arrays
        lease.release()
        fill_from_another_pool(cluster)
        assert read(pool, prompt) == 0, "nothing stayed leased"


def test_a_write_ends_with_its_last_holder(cluster: Cluster) -> None:
    """After an attach with a late reply, one holder releases the reservation while another one of the same process
    still fills the write."""
    prompt = Prompt(6, 4)
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(prompt.tokens).keys
        reserved = pool.engine.reserve(keys)
        attach_late(cluster, lambda: pool.engine.attach_write(reserved.id))
        wait_until(lambda: answers(pool), "the daemon answers again")
        with pool.engine.attach_write(reserved.id) as write:
            reserved.release()
            answers(pool)
            fill_from_another_pool(cluster)
            for index, array in write.slots:
                prompt.fill(index, array)
        assert outcomes(bytes(write.codes)) == {Code.COMMITTED}
        assert read(pool, prompt) == 4
        aborted = pool.engine.reserve(pool.prefix(Prompt(60, 4).tokens).keys)
        filling = pool.engine.attach_write(aborted.id)
        filling.abort()
        assert outcomes(store(pool, Prompt(60, 4), patience=0)) == {Code.PENDING}, (
            "the other holder keeps the reservation"
        )
        aborted.release()
        assert outcomes(store(pool, Prompt(60, 4))) == {Code.COMMITTED}


def test_a_release_waits_for_an_attach() -> None:
    """While an attach to a lease is under way, a release by the only holder is not sent: it could reach the daemon
    after the attach was granted, and end the lease for the new holder."""
    lease = LeaseId(7)
    with scripted_link() as (link, daemon):
        grants = Grants(link)
        hold = LeaseHold(lease, link, slot_array(bytes(4 * SLOT_BYTES)))
        grants.hold_lease(hold)
        daemon.send(engine.Matched(1, lease, 0, b"", b"", b""))
        with grants.attaching(lease, PATIENT_S, write=False):
            grants.release(hold, 0, 4)
            assert daemon.received() == [engine.Attach(1, lease)]
        sent = engine.releasable([(lease, 0, engine.MAX_KEYS)])
        assert daemon.received() == [engine.Release(part) for part in sent]


def test_an_attach_that_is_not_sent_keeps_no_lease() -> None:
    """The daemon does not read, and more bytes are unsent than may wait."""
    lease = LeaseId(7)
    with scripted_link() as (link, daemon):
        grants = Grants(link)
        hold = LeaseHold(lease, link, slot_array(bytes(4 * SLOT_BYTES)))
        grants.hold_lease(hold)
        while not link.channel.refused_messages:
            with contextlib.suppress(DeadlinePassed):
                link.channel.tell(engine.MarkInFlight(bytes(32 * 1024), 1.0))
        with pytest.raises(DeadlinePassed, match="has not read"), grants.attaching(lease, PATIENT_S, write=False):
            pass
        grants.release(hold, 0, 4)
        got: list[engine.EngineRequest] = []

        def released() -> bool:
            link.channel.flush()
            grants.sweep()
            got.extend(each for each in daemon.received() if not isinstance(each, engine.MarkInFlight))
            return bool(got)

        wait_until(released, "the daemon has the release")
        assert got == [engine.Release(((lease, 0, 4),))]
