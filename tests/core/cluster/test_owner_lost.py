"""Cached copies of segments whose owner is lost: one of them makes its node the owner."""

from __future__ import annotations

from tests.core.scenes import answer, calm, copies, fetch, kinds, match, placed, store, stored
from tests.sim.cluster import Cluster
from tests.sim.engine import Engine
from tokenlake.identity import SegmentKey
from tokenlake.memory import Kind
from tokenlake.wire import Code, engine


def cached_at(cluster: Cluster, readers: list[Engine], key: SegmentKey) -> None:
    """Each reader's node fetches a copy."""
    for reader in readers:
        lease = match(cluster, reader, [key]).lease
        assert fetch(cluster, reader, lease, 1).codes == bytes([Code.LOCAL])
        reader.processes[0].tell(engine.Release(((lease, 0, 1),)))


def test_a_cached_copy_is_found_after_the_owner_died() -> None:
    """The directory node is another node, the owner itself, or the node with the copy."""
    cluster = calm(4)
    writer, *readers = [cluster.join(node) for node in range(4)]
    cluster.run_for(0.01)
    keys = [placed(cluster, directory_node, 3 if directory_node < 3 else 1)[0] for directory_node in range(4)]
    for key in keys:
        store(cluster, writer, [key])
        cached_at(cluster, readers[:2], key)
        assert kinds(cluster, key) == {0: Kind.PRIMARY, 1: Kind.CACHED, 2: Kind.CACHED}
    cluster.node(0).crash()
    cluster.run_for(5.0)
    for directory_node, key in enumerate(keys):
        owners = [node for node, kind in kinds(cluster, key).items() if kind is Kind.PRIMARY]
        if directory_node:
            assert sorted(kinds(cluster, key).values()) == [Kind.CACHED, Kind.PRIMARY]
            assert {segment.source for segment in copies(cluster, key).values()} == {None, f"n{owners[0]}"}
        else:
            # A stand-in believes each node; the directory node itself decides when it comes back.
            assert owners
        matched = match(cluster, readers[2], [key])
        assert matched.codes == bytes([Code.REMOTE])
    cluster.check()


def test_an_owner_that_comes_back_in_time_stays_the_owner() -> None:
    cluster, reader, (key,) = stored(pair=(2, 0), reader=1)
    cached_at(cluster, [reader], key)
    for link in cluster.links_of("n0"):
        link.cut(0.05)
    cluster.run_for(5.0)
    assert kinds(cluster, key) == {0: Kind.PRIMARY, 1: Kind.CACHED}
    assert copies(cluster, key)[1].source == "n0"
    assert answer(cluster, reader.processes[0], engine.Match, key, 0.0).codes == bytes([Code.LOCAL])
