"""Defects that the fault matrix found, with a test for each, which failed before the correction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, accounted, daemons, match, store, wait_until
from tests.robustness.matrix.measure import Asker
from tests.robustness.matrix.proxy import Cut, Proxy
from tokenlake.errors import DeadlinePassed, Unreachable
from tokenlake.wire import Code, engine
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

PROMPT = Prompt(1, 4)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with daemons() as cluster:
        yield cluster


@pytest.mark.parametrize("request_", ["match", "prepare"])
def test_an_answer_that_was_cut_off_grants_nothing(cluster: Cluster, tmp_path: Path, request_: str) -> None:
    """The leases or reservations granted in such an answer are given back, and not kept until the process ends."""
    node = cluster.nodes[0]
    with (
        Proxy(node.socket, tmp_path / "proxy.sock") as proxy,
        Pool.connect(tmp_path / "proxy.sock", LAYOUT, deadlines=PATIENT) as pool,
    ):
        store(pool, PROMPT)
        kept = pool.match(pool.prefix(PROMPT.tokens).keys)
        proxy.fault = Cut("down", "body")
        wanted = PROMPT if request_ == "match" else Prompt(2, 4)
        ask: Callable[[Any], object] = pool.match if request_ == "match" else pool.store
        with pytest.raises(Unreachable):
            ask(pool.prefix(wanted.tokens).keys)
        wait_until(Asker("", pool).answered, "it is connected again")
        arrays = kept.fetch()
        assert (len(arrays), PROMPT.wrong(arrays)) == (4, 0), "the lease with a reply stays"
        assert node.metrics()['tokenlake_map_entries{map="leases"}'] == 1
        del arrays
        kept.release()
        wait_until(lambda: accounted(node), "everything is given back")


def test_a_grant_of_an_earlier_connection_is_not_used(cluster: Cluster) -> None:
    """The answer with the grant has arrived, but the engine did not name the lease when it connected again: the lease
    has ended."""
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, PROMPT)
        previous_owner = pool.link
        pending = pool.engine.begin_match(pool.prefix(PROMPT.tokens).keys)
        # The daemon answers in order: with this answer the one before it has been read too.
        match(pool, Prompt(2, 1)).release()
        previous_owner.channel.close()
        wait_until(Asker("", pool).answered, "it is connected again")
        assert pool.link is not previous_owner
        with pytest.raises(Unreachable):
            pending.wait()
        wait_until(lambda: accounted(cluster.nodes[0]), "nothing is leased")


def test_an_answer_that_never_comes_ends_no_service() -> None:
    """While one reply was missing, the pool once sent no other request, heartbeats included."""
    with daemons(lease_s="0.6") as cluster, cluster.connect(0, LAYOUT) as pool:
        with pytest.raises(DeadlinePassed):
            # The daemon answers no Abort.
            pool.link.channel.call(lambda number: engine.Abort(number), 0.05)
        assert pool.link.channel.overdue
        wait_until(Asker("", pool).answered, "it is served again")
        assert store(pool, PROMPT) == bytes([Code.COMMITTED]) * PROMPT.segments
