"""The order in which nodes get copies, and the choice of the copy to read."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from tokenlake.hot import less_loaded_of_two, rendezvous_order, splitmix64
from tokenlake.identity import NodeId, SegmentKey

NODES = [NodeId(f"n{number}") for number in range(8)]
KEYS = [SegmentKey(bytes([number % 256, number >> 8]) * 16) for number in range(800)]


def test_the_order_is_even_and_the_same_on_all_nodes() -> None:
    first = Counter(rendezvous_order(key, NODES)[0] for key in KEYS)
    assert len(first) == 8
    assert min(first.values()) > 60
    assert max(first.values()) < 140
    assert all(rendezvous_order(key, NODES) == rendezvous_order(key, reversed(NODES)) for key in KEYS)


def test_a_node_that_joins_keeps_the_order_of_the_others() -> None:
    for key in KEYS:
        more = rendezvous_order(key, [*NODES, NodeId("new")])
        assert [node for node in more if node != "new"] == rendezvous_order(key, NODES)


def test_the_less_loaded_of_two_random_nodes_is_read() -> None:
    load = {node: float(number) for number, node in enumerate(NODES)}
    chosen = Counter(less_loaded_of_two(NODES, draw, load.__getitem__) for draw in islice(splitmix64(7), 5600))
    # The k-th least loaded of eight nodes is chosen when the other draw has more load: in 2 (8 - k) of 56 pairs.
    for number, node in enumerate(NODES):
        expected = 200 * (7 - number)
        assert abs(chosen[node] - expected) < 120, (node, chosen[node])


def test_a_false_idle_report_attracts_two_draws_at_most() -> None:
    load = {**dict.fromkeys(NODES, 1.0), NODES[3]: 0.0}
    chosen = Counter(less_loaded_of_two(NODES, draw, load.__getitem__) for draw in islice(splitmix64(7), 4000))
    assert chosen[NODES[3]] < 1100


def test_a_single_copy_is_chosen() -> None:
    assert less_loaded_of_two(NODES[:1], next(splitmix64(1)), lambda node: 0.0) == NODES[0]
