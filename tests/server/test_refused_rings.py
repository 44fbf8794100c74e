"""Nodes that disagree on the ring or on a name refuse each other by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.robustness.live import daemons, total, wait_until
from tokenlake_testing.cluster import Cluster, Node, free_port

pytestmark = pytest.mark.live


def test_rings_that_differ_are_named_on_both_sides() -> None:
    ports = {name: free_port() for name in ("a", "b", "c")}
    both = f"a=127.0.0.1:{ports['a']},b=127.0.0.1:{ports['b']}"
    all_three = f"{both},c=127.0.0.1:{ports['c']}"
    with daemons() as cluster:
        one = _node(cluster, "a", ports["a"], both)
        two = _node(cluster, "b", ports["b"], all_three)
        for node in (one, two):
            node.start()
        for node in (one, two):
            _until_logged(node, lambda text: "its members are" in text and "a, b, c" in text and "'peers'" in text)
        for node in (one, two):
            assert node.page("/health")
            assert total(node, "tokenlake_peers_connected") == 0
            assert node.stop() == 0


def test_two_nodes_of_one_name() -> None:
    ports = {name: free_port() for name in ("a", "b", "again")}
    with daemons() as cluster:
        one = _node(cluster, "a", ports["a"], f"b=127.0.0.1:{ports['b']}")
        two = _node(cluster, "b", ports["b"], f"a=127.0.0.1:{ports['a']}")
        for node in (one, two):
            node.start()
        wait_until(lambda: _connected(two), "the two nodes know each other")
        again = _node(cluster, "a", ports["again"], f"b=127.0.0.1:{ports['b']}")
        again.socket = cluster.directory / "again.sock"
        again.settings["socket"] = str(again.socket)
        again.log = cluster.directory / "again.log"
        again.start()
        _until_logged(one, lambda text: "two daemons are called 'a'" in text)
        _until_logged(two, lambda text: "two daemons are called 'a'" in text)
        wait_until(lambda: _connected(two), "one of them is connected")
        for node in (one, two, again):
            assert node.stop() == 0


def _connected(node: Node) -> bool:
    try:
        return total(node, "tokenlake_peers_connected") == 1
    except OSError:
        return False


def _node(cluster: Cluster, name: str, port: int, peers: str) -> Node:
    settings = {"memory": "1MiB", "listen": f"127.0.0.1:{port}", "peers": peers}
    node = Node(name, cluster.directory, settings)
    cluster.nodes.append(node)
    return node


def _until_logged(node: Node, found: Callable[[str], bool]) -> None:
    wait_until(lambda: node.log.exists() and found(node.log.read_text()), f"the log of {node.name} says so")
