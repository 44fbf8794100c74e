"""Reconnecting: to a daemon that was restarted, and to the same session after the connection broke."""

from __future__ import annotations

import errno
import gc
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.client.connections import (
    answers,
    fill_from_another_pool,
    heartbeat_threads,
    reconnect,
    reconnected,
    refill,
    through_proxy,
)
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    Prompt,
    accounted,
    census,
    match,
    outcomes,
    read,
    store,
    wait_until,
)
from tests.robustness.matrix.proxy import Cut
from tokenlake.errors import LimitReached, Unreachable
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

OTHER = Layout(**(msgspec.structs.asdict(LAYOUT) | {"model_id": "another"}))
PROMPT = Prompt(1, 8)


def test_a_process_without_free_descriptors_connects_again_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, refused = cluster.nodes[0], threading.Event()

    def full(*arguments: object) -> None:
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with cluster.connect(0, LAYOUT) as pool:
        with monkeypatch.context() as patched:
            patched.setattr("tokenlake_client.dial.socket.socket", full)
            node.kill()
            assert refused.wait(LIMIT_S)
        node.start()
        wait_until(lambda: pool.connected, "connected to the new daemon")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_restarted_daemon(cluster: Cluster, how: str) -> None:
    node = cluster.nodes[0]
    prompt, other = Prompt(1, 4), Prompt(2, 4)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        keys = pool.prefix(prompt.tokens).keys
        lease = match(pool, prompt)
        arrays = lease.fetch()
        begun = pool.engine.begin_match(keys)
        pool.match([])
        write = pool.store(pool.prefix(other.tokens).keys)
        for index, array in write.slots:
            other.fill(index, array)
        first = pool.engine.incarnation
        getattr(node, how)()
        with pytest.raises(Unreachable):
            pool.match(keys)
        node.start()
        wait_until(lambda: pool.connected and pool.engine.incarnation != first, "connected to the new daemon")

        with match(pool, prompt) as fresh:
            assert fresh.hits == 0
        assert outcomes(write.commit()) == {Code.EXPIRED}, "the previous daemon granted the write"
        with pytest.raises(Unreachable, match="restarted"):
            lease.fetch()
        # The lease names slots of the previous arena; in the new arena these slots hold other segments.
        refill(pool)
        with pytest.raises(Unreachable, match="restarted"):
            begun.wait().fetch()
        assert prompt.wrong(arrays) == 0, "old arrays stay readable"
        lease.release()
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 4
    wait_until(lambda: census(node) == 0, "closed")


def test_a_process_without_free_threads(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a limit of processes: the error says so, and no session is left."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(LimitReached, match="heartbeat cannot be started: can't start new thread"):
            cluster.connect(0, LAYOUT)
    wait_until(lambda: census(cluster.nodes[0]) == 0, "the session has ended")
    with cluster.connect(0, LAYOUT) as pool:
        assert outcomes(store(pool, Prompt(1, 2))) == {Code.COMMITTED}


def test_a_session_goes_on_after_its_connection_broke(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt, other = Prompt(3, 4), Prompt(4, 4)
    with through_proxy(node) as (pool, proxy):
        store(pool, prompt)
        lease = match(pool, prompt)
        arrays = lease.fetch(0, 2)
        write = pool.store(pool.prefix(other.tokens).keys)
        session = pool.engine.session
        for _ in range(5):
            link = pool.link
            proxy.cut()
            lease.release(3)  # The message may be lost with the connection.
            reconnected(pool, link)
        assert pool.engine.session == session
        assert census(node) == 1, "the daemon forgot the previous connections"
        refill(pool)
        assert prompt.wrong(arrays) == 0
        assert prompt.wrong(lease.fetch(2, 3), start=2) == 0
        keys = pool.prefix(prompt.tokens).keys
        with pool.match(keys[3:]) as gone:
            assert gone.hits == 0, "a segment that was released meanwhile is not leased"
        for index, array in write.slots:
            other.fill(index, array)
        assert outcomes(write.commit()) == {Code.COMMITTED}
        assert read(pool, other) == 4


def test_a_release_that_was_lost_is_repeated(cluster: Cluster) -> None:
    """A release is sent again when its message was lost. Otherwise its segments stay leased until the process ends."""
    node = cluster.nodes[0]
    with through_proxy(node) as (pool, proxy):
        store(pool, PROMPT)
        lease = match(pool, PROMPT)
        assert len(lease.fetch()) == 8
        previous = pool.link
        proxy.fault = Cut("up", "body")
        lease.release(0, 3)
        wait_until(lambda: proxy.done == 1, "the frame is cut")
        reconnected(pool, previous)
        assert len(lease.fetch(3)) == 5
        lease.release()
        wait_until(lambda: accounted(node), "all grants are given back")


def test_a_welcome_that_was_lost(cluster: Cluster) -> None:
    """The daemon moved the grants to a new connection, but its reply with the number of that connection was lost. The
    next connection takes the grants over again."""
    node = cluster.nodes[0]
    with through_proxy(node) as (pool, proxy):
        store(pool, PROMPT)
        lease = match(pool, PROMPT)
        arrays = lease.fetch()
        for times in (1, 2):
            proxy.fault = Cut("down", "hello")
            reconnect(pool, proxy)
            assert proxy.done == times
        assert PROMPT.wrong(arrays) == 0
        del arrays
        lease.release()
        wait_until(lambda: accounted(node), "all grants are given back")
        assert node.metrics()["tokenlake_processes"] == 1


def test_a_lease_of_a_process_that_mapped_nothing(cluster: Cluster) -> None:
    """A process that mapped no region loses its connection: the daemon ends its leases at once. The session goes on
    with its other process, whose segments fill the slots of the lease."""
    with cluster.connect(0, LAYOUT) as scheduler:
        store(scheduler, PROMPT)
        with through_proxy(cluster.nodes[0], scheduler.engine.session) as (rank, proxy):
            lease = match(rank, PROMPT)
            write = rank.engine.reserve(rank.prefix(Prompt(2, 2).tokens).keys)
            assert (lease.hits, bool(write.id)) == (8, True)
            reconnect(rank, proxy)
            assert rank.engine.session == scheduler.engine.session
            refill(scheduler)
            with pytest.raises(Unreachable):
                lease.fetch()
            with pytest.raises(Unreachable):
                lease.copy_into([np.empty(LAYOUT.segment_bytes, np.uint8)])
            lease.release()
            write.release()
            with match(rank, PROMPT) as again:
                assert len(again.fetch()) == again.hits


def test_a_lease_ends_with_its_session(cluster: Cluster) -> None:
    """The connection broke before the process mapped a region: the daemon forgot it and serves it as a new process."""
    prompt = Prompt(7, 8)
    with cluster.connect(0, LAYOUT) as other:
        store(other, prompt)
    with through_proxy(cluster.nodes[0]) as (pool, proxy):
        lease, session = match(pool, prompt), pool.engine.session
        assert lease.hits == 8
        begun = pool.engine.reserve(pool.prefix(Prompt(70, 2).tokens).keys)
        reconnect(pool, proxy)
        assert pool.engine.session != session
        refill(pool)
        with pytest.raises(Unreachable, match="session ended"):
            lease.fetch()
        lease.release()
        begun.release()
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 8


def test_pools_of_two_layouts_reconnect(cluster: Cluster, tmp_path: Path) -> None:
    """The pools reconnect in another order than they connected before the restart: the session numbers of the previous
    daemon neither prevent a connection nor join one pool to the session of another."""
    node, path = cluster.nodes[0], tmp_path / "link.sock"
    path.symlink_to(node.socket)
    one, two = Pool.connect(path, LAYOUT, deadlines=PATIENT), cluster.connect(0, OTHER)
    twin = cluster.connect(0, LAYOUT)
    path.unlink()
    node.kill()
    node.start()
    cluster.wait_ready()
    wait_until(lambda: answers(two) and answers(twin), "the other pools are connected")
    assert not answers(one)
    path.symlink_to(node.socket)
    wait_until(lambda: answers(one), "this pool is connected too")
    assert len({one.engine.session, two.engine.session, twin.engine.session}) == 3
    for pool in (one, two, twin):
        pool.close()


def test_leases_and_writes_outlive_their_pool(cluster: Cluster) -> None:
    """Leases, arrays and writes keep the heartbeats going. The process leaves with the last of them."""
    prompt, other = Prompt(9, 4), Prompt(90, 4)
    before = heartbeat_threads()
    pool = cluster.connect(0, LAYOUT)
    (heartbeat,) = heartbeat_threads() - before
    store(pool, prompt)
    lease = match(pool, prompt)
    write = pool.store(pool.prefix(other.tokens).keys)
    gc.disable()
    try:
        del pool
        fill_from_another_pool(cluster)
        arrays = lease.fetch()
        assert len(arrays) == 4
        assert prompt.wrong(arrays) == 0
        del lease
        fill_from_another_pool(cluster)
        assert prompt.wrong(arrays) == 0
        for index, array in write.slots:
            other.fill(index, array)
        assert outcomes(write.commit()) == {Code.COMMITTED}
        del write, array
        assert heartbeat.is_alive()
        assert census(cluster.nodes[0]) == 1
        del arrays
        wait_until(lambda: census(cluster.nodes[0]) == 0, "the process left")
        heartbeat.join(LIMIT_S)
        assert not heartbeat.is_alive()
    finally:
        gc.enable()


def test_a_pool_collected_in_a_cycle_with_its_arrays(cluster: Cluster) -> None:
    prompt = Prompt(10, 4)
    pool = cluster.connect(0, LAYOUT)
    store(pool, prompt)
    cycle: list[Any] = [pool, match(pool, prompt)]
    cycle += [cycle[1].fetch(), cycle]
    del pool, cycle
    gc.collect()
    wait_until(lambda: census(cluster.nodes[0]) == 0, "the process left")
