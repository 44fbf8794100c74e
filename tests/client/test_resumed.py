"""A session that goes on over another connection: both sides hold the same, whatever was lost with the former one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.robustness.live import LAYOUT, Prompt, accounted, daemons, match, store, wait_until
from tests.robustness.matrix.measure import Asker
from tests.robustness.matrix.proxy import Cut, Proxy
from tokenlake.errors import Unreachable
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

PROMPT = Prompt(1, 8)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


def connect_again(pool: Pool) -> None:
    """Break the connection, if it is not broken yet; there is another when this returns."""
    former = pool._link
    former.channel._sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: Asker("", pool).answered() and pool._link is not former, "it is connected again")


def test_segments_given_back_in_a_frame_that_got_lost(cluster: Cluster, tmp_path: Path) -> None:
    """The lease went on, and these of its segments stayed leased for as long as the process lived."""
    node = cluster.nodes[0]
    with Proxy(node.socket, tmp_path / "proxy.sock") as proxy, Pool.connect(tmp_path / "proxy.sock", LAYOUT) as pool:
        store(pool, PROMPT)
        lease = match(pool, PROMPT)
        assert len(lease.fetch()) == 8
        former = pool._link
        proxy.fault = Cut("up", "body")
        lease.release(0, 3)
        wait_until(lambda: proxy.done == 1, "the frame is cut")
        wait_until(lambda: Asker("", pool).answered() and pool._link is not former, "it is connected again")
        assert len(lease.fetch(3)) == 5
        lease.release()
        wait_until(lambda: accounted(node), "everything is given back")


def test_what_a_welcome_that_got_lost_had_taken_over(cluster: Cluster, tmp_path: Path) -> None:
    """The daemon had handed it to a connection that the engine never heard of."""
    node = cluster.nodes[0]
    with Proxy(node.socket, tmp_path / "proxy.sock") as proxy, Pool.connect(tmp_path / "proxy.sock", LAYOUT) as pool:
        store(pool, PROMPT)
        lease = match(pool, PROMPT)
        arrays = lease.fetch()
        for times in (1, 2):
            proxy.fault = Cut("down", "hello")
            connect_again(pool)
            assert proxy.done == times
        assert PROMPT.wrong(arrays) == 0
        del arrays
        lease.release()
        wait_until(lambda: accounted(node), "everything is given back")
        assert node.metrics()["tokenlake_processes"] == 1


def test_a_lease_of_a_process_that_had_mapped_nothing(cluster: Cluster) -> None:
    """The daemon gives back at once what such a process held. Its session goes on with others, the lease does not: its
    slots are others' by now."""
    with cluster.connect(0, LAYOUT) as scheduler:
        store(scheduler, PROMPT)
        with Pool.connect(cluster.nodes[0].socket, LAYOUT, session=scheduler.session) as rank:
            lease = match(rank, PROMPT)
            write = rank.reserve(rank.prefix(Prompt(2, 2).tokens).keys)
            assert (lease.hits, bool(write.id)) == (8, True)
            connect_again(rank)
            assert rank.session == scheduler.session
            for seed in range(12):
                store(scheduler, Prompt(5000 + seed, 32))
            with pytest.raises(Unreachable):
                lease.fetch()
            with pytest.raises(Unreachable):
                lease.copy_into([np.empty(LAYOUT.segment_bytes, np.uint8)])
            lease.release()
            write.release()
            with match(rank, PROMPT) as again:
                assert len(again.fetch()) == again.hits
