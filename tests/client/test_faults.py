"""A pool whose daemon dies, freezes or loses the connection, and an engine that forks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

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
from tokenlake.errors import DeadlinePassed, LimitReached, Unreachable
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


def refill(pool: Pool) -> None:
    """Write more than the arena holds."""
    for seed in range(12):
        store(pool, Prompt(5000 + seed, 32))


def break_socket(pool: Pool) -> None:
    """The connection breaks; both processes live on."""
    pool._link.channel._sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: not pool.connected or _noticed(pool), "the client noticed")


def _noticed(pool: Pool) -> bool:
    try:
        pool.match([])
    except Unreachable:
        return True
    return False


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_that_was_restarted(cluster: Cluster, how: str) -> None:
    node = cluster.nodes[0]
    prompt, other = Prompt(1, 4), Prompt(2, 4)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        keys = pool.prefix(prompt.tokens).keys
        lease = match(pool, prompt)
        arrays = lease.fetch()
        begun = pool.begin_match(keys)
        pool.match([])
        write = pool.store(pool.prefix(other.tokens).keys)
        for index, array in write.slots:
            other.fill(index, array)
        first = pool.incarnation
        getattr(node, how)()
        with pytest.raises(Unreachable):
            pool.match(keys)
        node.start()
        wait_until(lambda: pool.connected and pool.incarnation != first, "connected to the new daemon")

        with match(pool, prompt) as fresh:
            assert fresh.hits == 0
        assert outcomes(write.commit()) == {Code.EXPIRED}, "granted by the daemon that is gone"
        with pytest.raises(Unreachable, match="restarted"):
            lease.fetch()
        # Slots of the former arena must not be looked up in the new one, which has others there by now.
        refill(pool)
        with pytest.raises(Unreachable, match="restarted"):
            begun.wait().fetch()
        assert prompt.wrong(arrays) == 0, "old arrays stay readable"
        lease.release()
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 4
    wait_until(lambda: total(node, "tokenlake_processes") == 0, "closed")


def test_calls_fail_at_once_while_there_is_no_daemon(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        cluster.nodes[0].kill()
        for _ in range(50):
            with pytest.raises(Unreachable):
                pool.match([])
        assert pool.timeouts == 0


def test_a_session_goes_on_after_its_socket_broke(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt, other = Prompt(3, 4), Prompt(4, 4)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        lease = match(pool, prompt)
        arrays = lease.fetch(0, 2)
        write = pool.store(pool.prefix(other.tokens).keys)
        session = pool.session
        for _ in range(5):
            link = pool._link
            break_socket(pool)
            lease.release(3)  # While nobody can be told.
            wait_until(lambda link=link: pool.connected and pool._link is not link, "connected again")  # type: ignore[misc]
        assert pool.session == session
        assert total(node, "tokenlake_processes") == 1, "the former connections are forgotten"
        refill(pool)
        assert prompt.wrong(arrays) == 0
        assert prompt.wrong(lease.fetch(2, 3), start=2) == 0
        keys = pool.prefix(prompt.tokens).keys
        with pool.match(keys[3:]) as gone:
            assert gone.hits == 0, "what was released meanwhile is not leased"
        for index, array in write.slots:
            other.fill(index, array)
        assert outcomes(write.commit()) == {Code.COMMITTED}
        assert read(pool, other) == 4


def test_a_frozen_daemon_costs_one_deadline(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt = Prompt(5, 40)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        keys = pool.prefix(prompt.tokens).keys
        node.freeze()
        with pytest.raises(DeadlinePassed, match="did not answer within"):
            pool.match(keys)
        for _ in range(100):
            with pytest.raises(DeadlinePassed, match="still owes"):
                pool.match(keys)
            with pytest.raises(DeadlinePassed, match="still owes"):
                pool.store(keys)
        assert pool.timeouts == 1
        node.thaw()
        wait_until(lambda: not _noticed(pool), "it answers again")
        # The late answer leased 40 of the 120 that a session may: three more fit only when it was given back.
        leases = [match(pool, prompt) for _ in range(3)]
        assert [lease.hits for lease in leases] == [40] * 3
        for lease in leases:
            lease.release()
        assert pool.connected


def test_a_match_that_waits_for_somebody_notices_a_frozen_daemon(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(Prompt(5, 4).tokens).keys
        pool.match(keys, in_flight_wait_s=10.0).release()
        cluster.nodes[0].freeze()
        with pytest.raises(DeadlinePassed, match=f"did not answer within {PATIENT_S * 1e3:.0f} ms"):
            pool.match(keys, in_flight_wait_s=10.0)
        assert pool.timeouts == 1
        cluster.nodes[0].thaw()


def test_a_frozen_daemon_stops_those_who_wait_once_each(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        given_up: list[str] = []

        def work() -> None:
            for _ in range(20):
                try:
                    pool.match([], deadline_s=1.0)
                except DeadlinePassed as error:
                    given_up.append(str(error))

        node.freeze()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert len(given_up) == 80
        # Three more threads, and the heartbeat, may have sent their call before the first gave up.
        assert 1 <= pool.timeouts <= 5
        node.thaw()
        wait_until(lambda: not _noticed(pool), "it answers again")


def test_a_fetch_without_a_deadline_from_a_frozen_daemon() -> None:
    """The daemon predicts the deadline; when it cannot keep it, the client finds out by a heartbeat."""
    with daemons(3) as cluster, cluster.connect(0, LAYOUT) as writer, cluster.connect(2, LAYOUT) as reader:
        prompt = Prompt(10, 8)
        store(writer, prompt)
        wait_pushed(cluster)
        lease = match(reader, prompt)
        assert lease.local_hits < lease.hits == 8
        cluster.nodes[2].freeze()
        with pytest.raises(DeadlinePassed):
            lease.fetch()
        assert reader.timeouts == 1
        with pytest.raises(DeadlinePassed, match="still owes"):
            lease.fetch()
        cluster.nodes[2].thaw()
        wait_until(lambda: not _noticed(reader), "it answers again")
        lease.release()
        wait_until(lambda: read(reader, prompt) == 8, "all is found again")


def test_a_write_in_a_frozen_daemon_is_given_back(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt = Prompt(6, 4)
    keys_of = prompt.tokens
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(keys_of).keys
        write = pool.store(keys)
        node.freeze()
        with pytest.raises(DeadlinePassed):
            pool.store(pool.prefix(Prompt(7, 4).tokens).keys)
        write.abort()
        node.thaw()
        wait_until(lambda: not _noticed(pool), "it answers again")
        # Both the write that was aborted meanwhile and the one whose grant came late are free again.
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert outcomes(store(pool, Prompt(7, 4))) == {Code.COMMITTED}
        assert total(node, "tokenlake_quarantined_slots") == 0


def test_a_request_that_is_too_large_stays_here(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(Prompt(8, 1).tokens).keys * (1 << 17)
        with pytest.raises(LimitReached, match="max_frame"):
            pool.match(keys * 2)
        assert pool.match(keys[:10]).hits == 0


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
            wait_until(lambda: total(node, "tokenlake_processes") == 1, "the parent's death is seen")
            refill(pool)
            assert read(pool, Prompt(9, 4)) == 0
        finally:
            os.kill(child, signal.SIGKILL)
