"""Where copies go, which is read, and what everybody knows."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from tokenlake.hot import HotItem, KnownSets, by_a_further_hash, draws, less_loaded_of_two
from tokenlake.identity import Incarnation, NodeId, SegmentKey, TenantId

NODES = [NodeId(f"n{number}") for number in range(8)]
KEYS = [SegmentKey(bytes([number % 256, number >> 8]) * 16) for number in range(800)]
PRIMARY, OTHER = NodeId("a"), NodeId("b")


def item(number: int) -> HotItem:
    return TenantId("red"), KEYS[number]


def test_places_are_spread_and_the_same_for_all() -> None:
    first = Counter(by_a_further_hash(key, NODES)[0] for key in KEYS)
    assert len(first) == 8
    assert min(first.values()) > 60
    assert max(first.values()) < 140
    assert all(by_a_further_hash(key, NODES) == by_a_further_hash(key, reversed(NODES)) for key in KEYS)


def test_a_node_that_comes_moves_nobody_else() -> None:
    for key in KEYS:
        more = by_a_further_hash(key, [*NODES, NodeId("new")])
        assert [node for node in more if node != "new"] == by_a_further_hash(key, NODES)


def test_the_less_loaded_of_two_that_differ() -> None:
    load = {node: float(number) for number, node in enumerate(NODES)}
    chosen = Counter(less_loaded_of_two(NODES, draw, load.__getitem__) for draw in islice(draws(7), 5600))
    # The k-th best of eight wins when it meets a worse one: 2 (8 - k) of 56 draws.
    for number, node in enumerate(NODES):
        expected = 200 * (7 - number)
        assert abs(chosen[node] - expected) < 120, (node, chosen[node])


def test_a_node_that_claims_to_be_idle_gets_no_more_than_its_two_draws() -> None:
    load = {**dict.fromkeys(NODES, 1.0), NODES[3]: 0.0}
    chosen = Counter(less_loaded_of_two(NODES, draw, load.__getitem__) for draw in islice(draws(7), 4000))
    assert chosen[NODES[3]] < 1100


def test_one_copy_is_chosen_from_one() -> None:
    assert less_loaded_of_two(NODES[:1], next(draws(1)), lambda node: 0.0) == NODES[0]


def test_sets_follow_versions_and_lives() -> None:
    known = KnownSets()
    life, later = Incarnation(5), Incarnation(4)
    assert known.learn(PRIMARY, life, 2, {item(1): (NODES[0], NODES[1])})
    assert known.learn(OTHER, life, 1, {item(2): (NODES[2], NODES[3])})
    assert not known.learn(PRIMARY, life, 2, {})
    assert not known.learn(PRIMARY, life, 1, {})
    assert known.nodes(item(1)) == (NODES[0], NODES[1])
    assert known.learn(PRIMARY, life, 3, {item(3): (NODES[4], NODES[5])})
    assert (known.nodes(item(1)), len(known)) == ((), 2)
    # A smaller number says nothing: it is another life of the node.
    assert known.version(PRIMARY, later) == 0
    assert known.learn(PRIMARY, later, 1, {item(4): (NODES[6],)})
    assert (known.nodes(item(3)), known.nodes(item(4))) == ((), (NODES[6],))
    known.check_integrity()
    known.drop(PRIMARY)
    known.drop(PRIMARY)
    assert list(known.items()) == [(item(2), (NODES[2], NODES[3]))]
    assert known.directory_nodes() == [OTHER]
