"""What an engine reads are the bytes it leased, whatever became of its pool, its connection or its daemon."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    Prompt,
    daemons,
    match,
    outcomes,
    read,
    store,
    total,
    wait_until,
)
from tokenlake.errors import DeadlinePassed, Unreachable
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine
from tokenlake_client import Pool
from tokenlake_client import heart as heart_module
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

OTHER = Layout(**(msgspec.structs.asdict(LAYOUT) | {"model_id": "another"}))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


def refill(cluster: Cluster) -> None:
    """As another engine, write more than the arena holds."""
    with cluster.connect(0, LAYOUT) as other:
        for seed in range(12):
            store(other, Prompt(7000 + seed, 32))


def processes(cluster: Cluster) -> float:
    return total(cluster.nodes[0], "tokenlake_processes")


def answers(pool: Pool) -> bool:
    try:
        pool.match([], deadline_s=PATIENT_S)
    except Unreachable:
        return False
    return True


def break_and_wait(pool: Pool) -> None:
    """The connection breaks, and there is another."""
    link = pool._link
    link.channel._sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not answers(pool) or pool._link is not link, "the client noticed")
    wait_until(lambda: pool._link is not link and answers(pool), "connected again")


def test_nothing_is_handed_out_after_close(cluster: Cluster) -> None:
    """The daemon gave the slots to others when it heard Bye."""
    prompt = Prompt(1, 8)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    read(pool, prompt)
    lease = match(pool, prompt)
    pool.close()
    wait_until(lambda: processes(cluster) == 0, "it said Bye")
    refill(cluster)
    for attempt in (
        lease.fetch,
        lambda: lease.copy_into([np.empty(LAYOUT.segment_bytes, np.uint8)]),
        lambda: pool.match([]),
        lambda: pool.store(pool.prefix(prompt.tokens).keys),
    ):
        with pytest.raises(Unreachable, match="closed"):
            attempt()
    lease.release()


def test_close_while_others_begin_to_look_and_to_write(cluster: Cluster) -> None:
    """Either they get nothing, or the daemon is not told that this process touches nothing."""
    prompt = Prompt(2, 8)
    with cluster.connect(0, LAYOUT) as other:
        store(other, prompt)
        for _ in range(20):
            pool = cluster.connect(0, LAYOUT)
            lease = match(pool, prompt)
            lease.fetch(0, 1)
            kept: list[Any] = []
            begun = threading.Barrier(2)

            def look(lease: Any = lease, kept: list[Any] = kept, begun: threading.Barrier = begun) -> None:
                begun.wait(LIMIT_S)
                try:
                    while True:
                        kept[:] = lease.fetch()
                except Unreachable:
                    return

            thread = threading.Thread(target=look)
            thread.start()
            begun.wait(LIMIT_S)
            pool.close()
            thread.join(LIMIT_S)
            books = pool._books
            assert books.closed
            assert bool(kept) <= bool(books.touching), "an array that the daemon does not know of"
            assert prompt.wrong(kept) == 0


def hold_late_attach(cluster: Cluster, attach: Callable[[], object]) -> None:
    """An attach whose answer comes when nobody waits for it any more."""
    node = cluster.nodes[0]
    node.freeze()
    try:
        with pytest.raises(DeadlinePassed):
            attach()
    finally:
        node.thaw()


def test_a_late_attach_takes_nothing_from_a_second(cluster: Cluster) -> None:
    """The daemon keeps one owner per process: what comes late is given back only if nothing here holds it."""
    prompt = Prompt(3, 8)
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool, Pool.connect(node.socket, LAYOUT, session=pool.session) as rank:
        store(pool, prompt)
        read(rank, prompt)
        lease = match(pool, prompt)
        hold_late_attach(cluster, lambda: rank.attach(lease.id))
        wait_until(lambda: answers(rank), "it answers again")
        held = rank.attach(lease.id)
        arrays = held.fetch()
        lease.release()
        answers(rank)
        refill(cluster)
        assert len(arrays) == 8
        assert prompt.wrong(arrays) == 0
        del arrays
        held.release()
        refill(cluster)
        assert read(pool, prompt) == 0, "nothing stayed leased"


def test_a_late_attach_to_what_this_process_leased(cluster: Cluster) -> None:
    prompt = Prompt(4, 8)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        lease = match(pool, prompt)
        hold_late_attach(cluster, lambda: pool.attach(lease.id))
        lease.release(6)
        wait_until(lambda: answers(pool), "it answers again")
        answers(pool)
        refill(cluster)
        arrays = lease.fetch(0, 6)
        assert len(arrays) == 6
        assert prompt.wrong(arrays) == 0
        with pool.match(pool.prefix(prompt.tokens).keys[6:], deadline_s=PATIENT_S) as gone:
            assert gone.hits == 0, "what was released meanwhile is not leased"
        del arrays
        lease.release()
        refill(cluster)
        assert read(pool, prompt) == 0, "nothing stayed leased"


def test_two_leases_of_one_process_are_given_back_with_the_last(cluster: Cluster) -> None:
    prompt = Prompt(5, 8)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        first = match(pool, prompt)
        second = pool.attach(first.id)
        first.release()
        refill(cluster)
        arrays = second.fetch()
        assert len(arrays) == 8
        assert prompt.wrong(arrays) == 0
        second.release()
        refill(cluster)
        assert prompt.wrong(arrays) == 0, "still looked at"
        del arrays
        answers(pool)
        refill(cluster)
        assert read(pool, prompt) == 0


def test_a_write_is_given_back_with_its_last_owner(cluster: Cluster) -> None:
    """Whoever reserved it gives it up while the same process still fills it, after an attach that came late."""
    prompt = Prompt(6, 4)
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(prompt.tokens).keys
        reserved = pool.reserve(keys)
        hold_late_attach(cluster, lambda: pool.attach_write(reserved.id))
        wait_until(lambda: answers(pool), "it answers again")
        with pool.attach_write(reserved.id) as write:
            reserved.release()
            answers(pool)
            refill(cluster)
            for index, array in write.slots:
                prompt.fill(index, array)
        assert outcomes(bytes(write.codes)) == {Code.COMMITTED}
        assert read(pool, prompt) == 4
        aborted = pool.reserve(pool.prefix(Prompt(60, 4).tokens).keys)
        filling = pool.attach_write(aborted.id)
        filling.abort()
        assert outcomes(store(pool, Prompt(60, 4), patience=0)) == {Code.PENDING}, "reserved as before"
        aborted.release()
        assert outcomes(store(pool, Prompt(60, 4))) == {Code.COMMITTED}


def test_a_lease_of_a_session_that_ended_is_gone(cluster: Cluster) -> None:
    """The connection broke before anything was mapped: the daemon forgot the process, and serves it as a new one."""
    prompt = Prompt(7, 8)
    with cluster.connect(0, LAYOUT) as other:
        store(other, prompt)
    with cluster.connect(0, LAYOUT) as pool:
        lease, session = match(pool, prompt), pool.session
        assert lease.hits == 8
        begun = pool.reserve(pool.prefix(Prompt(70, 2).tokens).keys)
        break_and_wait(pool)
        assert pool.session != session
        refill(cluster)
        with pytest.raises(Unreachable, match="session ended"):
            lease.fetch()
        lease.release()
        begun.release()
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 8


def test_engines_of_two_layouts_come_back_to_a_daemon_that_restarted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the other order: no session number of the former daemon stands in their way, or leads one to the other."""
    node = cluster.nodes[0]
    one, two = cluster.connect(0, LAYOUT), cluster.connect(0, OTHER)
    twin = cluster.connect(0, LAYOUT)
    gate, reconnect = threading.Event(), heart_module.Heart._reconnect

    def late(self: heart_module.Heart, former: Any) -> None:
        assert self is not one._heart or gate.wait(LIMIT_S)
        reconnect(self, former)

    monkeypatch.setattr(heart_module.Heart, "_reconnect", late)
    node.kill()
    node.start()
    cluster.wait_ready()
    wait_until(lambda: answers(two) and answers(twin), "the others are back")
    gate.set()
    wait_until(lambda: answers(one), "this one too")
    assert len({one.session, two.session, twin.session}) == 3
    for pool in (one, two, twin):
        pool.close()


def test_numbers_of_another_daemon_are_not_taken(cluster: Cluster) -> None:
    """A session and a connection that a former daemon named: here they are somebody else's."""
    with cluster.connect(0, LAYOUT) as pool:
        link = pool._link
        again = pool._heart._connect(pool.session, link.connection, pool.incarnation - 1)
        assert again.session != pool.session
        again.channel.close()
        prompt = Prompt(8, 4)
        store(pool, prompt)
        assert read(pool, prompt) == 4, "its connection was not taken over"
        with Pool.connect(cluster.nodes[0].socket, LAYOUT, session=pool.session) as rank:
            assert rank.session == pool.session, "without an incarnation the number counts"


def test_what_outlives_its_pool_is_kept_and_given_back(cluster: Cluster) -> None:
    """Leases, arrays and writes keep the heartbeats going; with the last of them the process leaves."""
    prompt, other = Prompt(9, 4), Prompt(90, 4)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    lease, session = match(pool, prompt), pool.session
    write = pool.store(pool.prefix(other.tokens).keys)
    heart = pool._heart
    gc.disable()
    try:
        del pool
        refill(cluster)
        arrays = lease.fetch()
        assert len(arrays) == 4
        assert prompt.wrong(arrays) == 0
        del lease
        refill(cluster)
        assert prompt.wrong(arrays) == 0
        for index, array in write.slots:
            other.fill(index, array)
        assert outcomes(write.commit()) == {Code.COMMITTED}
        del write, array
        assert heart.is_alive()
        assert processes(cluster) == 1
        assert heart._books.link.session == session
        del arrays
        wait_until(lambda: processes(cluster) == 0, "it left")
        heart.join(LIMIT_S)
        assert not heart.is_alive()
    finally:
        gc.enable()


def test_a_pool_that_is_collected_in_a_circle_with_its_arrays(cluster: Cluster) -> None:
    prompt = Prompt(10, 4)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    circle: list[Any] = [pool, match(pool, prompt)]
    circle += [circle[1].fetch(), circle]
    del pool, circle
    gc.collect()
    wait_until(lambda: processes(cluster) == 0, "it left")


def test_a_release_that_waits_for_an_attach(cluster: Cluster) -> None:
    """An attach is on its way when the only owner here releases: the daemon must not hear of it afterwards."""
    prompt = Prompt(11, 4)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        lease = match(pool, prompt)
        told: list[engine.EngineRequest] = []
        tell = pool._link.channel.tell

        def listen(message: engine.EngineRequest) -> None:
            told.append(message)
            tell(message)

        pool._link.channel.tell = listen  # type: ignore[method-assign]
        with pool._books.attaching(lease.id, write=False):
            lease.release()
            assert told == []
        assert told == [engine.Release(((lease.id, 0, (1 << 32) - 1),))]
