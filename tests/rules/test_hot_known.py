"""The known hot sets: versions, incarnations, and their union."""

from __future__ import annotations

from tokenlake.hot import HotItem, KnownSets
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

NODES = [NodeId(f"n{number}") for number in range(8)]
A, B = NodeId("a"), NodeId("b")


def item(number: int) -> HotItem:
    return TenantId("red"), SegmentKey(bytes([number]) * 32)


def test_sets_follow_versions_and_incarnations() -> None:
    known = KnownSets()
    first, second = Incarnation(5), Incarnation(4)
    assert known.learn(A, first, 2, {item(1): (NODES[0], NODES[1])})
    assert known.learn(B, first, 1, {item(2): (NODES[2], NODES[3])})
    assert not known.learn(A, first, 2, {})
    assert not known.learn(A, first, 1, {})
    assert known.nodes(item(1)) == (NODES[0], NODES[1])
    assert known.learn(A, first, 3, {item(3): (NODES[4], NODES[5])})
    assert (known.nodes(item(1)), len(known)) == ((), 2)
    # Incarnations have no order: another number is another incarnation.
    assert known.version(A, second) == 0
    assert known.learn(A, second, 1, {item(4): (NODES[6],)})
    assert (known.nodes(item(3)), known.nodes(item(4))) == ((), (NODES[6],))
    known.check_integrity()
    known.drop(A)
    known.drop(A)
    assert len(known) == 1
    assert known.nodes(item(2)) == (NODES[2], NODES[3])
    assert known.of(B) == {item(2): (NODES[2], NODES[3])}
    assert known.directory_nodes() == [B]
