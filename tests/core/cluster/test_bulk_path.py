"""A node that answers on its control connection and sends no segment."""

from __future__ import annotations

from tests.core.scenes import (
    answer,
    calm,
    copies,
    fetch,
    match,
    offer,
    placed,
    read,
    release,
    said,
    store,
    stored,
    within,
)
from tests.sim.cluster import Cluster
from tokenlake.core.cluster.bulk_path import LEAST_RATE
from tokenlake.core.cluster.peers import SUSPECTED, UNANSWERED, Peers
from tokenlake.core.cluster.probes import LONGEST_PAUSE_S
from tokenlake.core.cluster.transfer import ABORTED, deadline_s
from tokenlake.core.context import Context
from tokenlake.core.instructions import StartFetch
from tokenlake.identity import NodeId
from tokenlake.wire import Code, engine


def asked_for_segments(cluster: Cluster, node: int) -> int:
    """Transfers that the rules of `node` ordered, without probes."""
    return sum(bool(order.keys) for order in said(cluster, node, StartFetch))


def probes(cluster: Cluster, node: int) -> int:
    return sum(not order.keys for order in said(cluster, node, StartFetch))


def test_one_fetch_finds_out_and_no_other_waits() -> None:
    cluster = calm(2)
    writer, reader = cluster.join(0), cluster.join(1)
    keys = placed(cluster, 0, 1, 12)
    for key in keys:
        store(cluster, writer, [key])
    held = [match(cluster, reader, [key]).lease for key in keys[:6]]
    cluster.node(0).silent = True
    assert list(fetch(cluster, reader, held[0], 1).codes) == [Code.LOST]
    with within(cluster, 0.020):  # leases of earlier matches cost no deadline
        assert [list(fetch(cluster, reader, lease, 1).codes) for lease in held[1:]] == [[Code.LOST]] * 5
    with within(cluster, 0.060):  # a match leases nothing there, and waits for nothing
        assert [read(cluster, reader, [key]) for key in keys[6:]] == [[Code.UNKNOWN]] * 6
    assert asked_for_segments(cluster, 1) == 1
    counters = cluster.core(1).counters
    assert (counters[UNANSWERED], counters[ABORTED], counters[SUSPECTED]) == (1, 0, 0)
    assert cluster.core(0).census()["leases to peers"] == 6, "those of the earlier matches"
    cluster.run_for(3.0)
    assert 1 < probes(cluster, 1) <= 12
    cluster.node(0).silent = False
    cluster.run_for(1.0)
    assert cluster.core(1).census()["probes"] == 0
    asked = probes(cluster, 1)
    # The leases went on: their segments are fetched now.
    assert [list(fetch(cluster, reader, lease, 1).codes) for lease in held[1:]] == [[Code.LOCAL]] * 5
    for lease in held:
        release(cluster, reader, lease, 1)
    assert [read(cluster, reader, [key]) for key in keys[6:]] == [[Code.LOCAL]] * 6
    assert probes(cluster, 1) == asked, "no probe goes to a node that delivers"
    cluster.settle()
    cluster.check_settled()


def test_a_node_under_load_may_be_slow_to_send() -> None:
    """Lookups take long as well, so that a transfer without an answer does not show that the bulk path is dead."""
    cluster = calm(2, regions=5)
    writer, reader = cluster.join(0), cluster.join(1)
    keys = placed(cluster, 0, 1, 14)
    for key in keys:
        store(cluster, writer, [key])
    peers, node = cluster.core(1)._peers, NodeId("n0")
    held = [match(cluster, reader, [key]).lease for key in keys]
    cluster.node(0).freeze()
    cluster.clock.after(0.060, cluster.node(0).thaw)
    assert match(cluster, reader, keys[:1]).hits == 0, "the lookup took longer than its deadline"
    cluster.run_for(0.1)
    cluster.node(0).silent = True
    assert list(fetch(cluster, reader, held[0], 1).codes) == [Code.LOST]
    assert peers.delivers(node)
    cluster.node(0).silent = False
    assert list(fetch(cluster, reader, held[1], 1).codes) == [Code.LOCAL]
    cluster.node(0).silent = True
    with within(cluster, 0.500):
        assert [list(fetch(cluster, reader, lease, 1).codes) for lease in held[2:]] == [[Code.LOST]] * 12
    assert asked_for_segments(cluster, 1) < 8
    assert not peers.delivers(node)


def test_a_node_that_answers_probes_only() -> None:
    """Small packets pass and large ones do not, for instance."""
    cluster, reader, (key,) = stored(nodes=2, reader=1)
    cluster.node(0).silent = True
    cluster.node(0).answers_probes = True
    began = cluster.clock.now
    while cluster.clock.now < began + 60.0:
        assert read(cluster, reader, [key]) in ([Code.LOST], [Code.UNKNOWN])
        cluster.run_for(0.05)
    assert 4 < asked_for_segments(cluster, 1) <= 8 + 60.0 / LONGEST_PAUSE_S


def test_a_match_leases_the_copy_of_a_sound_node() -> None:
    cluster = calm(3)
    writer, other, reader = (cluster.join(node) for node in range(3))
    keys = placed(cluster, 0, 1, 3)
    store(cluster, writer, keys)
    assert read(cluster, other, keys) == [Code.LOCAL] * 3
    spoilt = placed(cluster, 0, 2, name="other")
    store(cluster, writer, spoilt)
    cluster.node(0).silent = True
    assert read(cluster, reader, spoilt) == [Code.LOST]
    lease = match(cluster, reader, keys)
    assert list(lease.codes) == [Code.REMOTE] * 3
    assert answer(cluster, reader.processes[0], engine.Locate, lease.lease).nodes == ("n1",)
    assert list(fetch(cluster, reader, lease.lease, 3).codes) == [Code.LOCAL] * 3


def test_nothing_is_taken_over_from_a_silent_node() -> None:
    cluster, reader, keys = stored(4, reader=1)
    cluster.node(0).silent = True
    assert read(cluster, reader, keys[:1]) == [Code.LOST]
    before = asked_for_segments(cluster, 1)
    offer(cluster, 0, 1, keys[2:])
    cluster.run_for(0.1)
    assert asked_for_segments(cluster, 1) == before
    assert cluster.core(0).census()["offers"] == 0, "the offer is refused at once"
    assert not copies(cluster, keys[2]).get(1)


def test_missed_deadlines_lengthen_the_next_ones_to_a_bound() -> None:
    peers = Peers(Context(calm(2).core(0).config), *4 * [lambda lost: None])
    path, nbytes, missed = peers.path(NodeId("n1")), 16 << 20, 0
    while (wait_s := deadline_s(path.predict_s(nbytes))) < nbytes / 10e6:
        path.missed(nbytes, wait_s)
        missed += 1
    assert 1 < missed < 10
    before = path.predict_s(nbytes)
    path.missed(1000, 1.0)
    assert path.predict_s(nbytes) == before, "a small transfer says little of a large one"
    for _ in range(20):
        path.missed(nbytes, 3600.0)
    assert path.predict_s(nbytes) == nbytes / LEAST_RATE
    path.measured(nbytes, 3600.0)
    assert path.predict_s(nbytes) == nbytes / LEAST_RATE


def test_an_engine_limits_the_deadline_of_its_fetch() -> None:
    """The daemon expects a slow transfer; the engine computes the segments in less time."""
    # The time within which a node must answer is not the limit here.
    cluster, reader, keys = stored(2, nodes=2, reader=1, suspect_s=60.0)
    lease = match(cluster, reader, keys).lease
    peers, nbytes = cluster.core(1)._peers, sum(copies(cluster, key)[0].slot_bytes for key in keys)
    peers.path(NodeId("n0"))._rate = nbytes / 2
    assert deadline_s(peers.path(NodeId("n0")).predict_s(nbytes)) > 6.0
    cluster.node(0).silent = True
    with within(cluster, 0.35):
        limited = answer(cluster, reader.processes[0], engine.Fetch, lease, 0, 2, 0.0, True, "", 0.3)
        assert list(limited.codes) == [Code.LOST] * 2
