"""Nodes on a network of their own, with certificates: partitions, links that are slow or drop, addresses that are lost.

After each fault the bytes that the pool returns are compared, and what was found before is found again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, Prompt, read, store, total, wait_told, wait_until
from tests.server import certified
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, node_names
from tokenlake_testing.network import Network, missing

pytestmark = [pytest.mark.live, pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.rest]

NODES = 3
SEGMENTS = 16
LONG_S = 10.0
"""A limit of calls that have deadlines of 2 s, for a busy machine."""


class World:
    """Three daemons, a pool at each, and a prompt that each stored."""

    def __init__(self, network: Network, cluster: Cluster, pools: list[Pool]) -> None:
        self.network = network
        self.cluster = cluster
        self.pools = pools
        self.prompts = [Prompt(seed, SEGMENTS) for seed in range(NODES)]
        for pool, prompt in zip(pools, self.prompts, strict=True):
            store(pool, prompt)
        wait_told(cluster)

    def connected(self, number: int, peers: int) -> bool:
        """Whether so many peers of a node can be reached."""
        return total(self.cluster.nodes[number], "tokenlake_peers_connected") == peers

    def all_connected(self) -> None:
        """Wait until every node is connected with all others."""
        wait_until(lambda: all(self.connected(each, NODES - 1) for each in range(NODES)), "all nodes are connected")

    def read(self, reader: int, writer: int) -> int:
        """Segments of the prompt of one node that the engine of another one reads, all with right bytes. The call does
        not take longer than its deadlines."""
        began = time.monotonic()
        found = read(self.pools[reader], self.prompts[writer])
        assert time.monotonic() - began < LONG_S
        return found

    def found_by_all(self) -> None:
        """Wait until every engine finds every prompt, with right bytes."""
        for reader in range(NODES):
            for writer in range(NODES):
                self.found(reader, writer)

    def found(self, reader: int, writer: int) -> None:
        """Wait until one engine finds the prompt of another, with right bytes."""
        wait_until(lambda: self.read(reader, writer) == SEGMENTS, f"node {reader} finds the prompt of node {writer}")

    def store_and_compare(self, number: int, seed: int) -> None:
        """An engine goes on: it stores a prompt and reads it back."""
        prompt = Prompt(seed, SEGMENTS)
        store(self.pools[number], prompt)
        assert read(self.pools[number], prompt) == SEGMENTS


@contextlib.contextmanager
def world(directory: Path, version: int = 4) -> Iterator[World]:
    authority = certified.authority(directory / "ca")
    names = node_names(NODES)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(names, version))
        cluster = Cluster(NODES, "4MiB", "1MiB", None, "tokenlake_server", network, match_deadline_ms="2000")
        for node in cluster.nodes:
            node.settings |= certified.files(authority, node.name)
        stack.enter_context(cluster)
        pools = [stack.enter_context(cluster.connect(number, LAYOUT)) for number in range(NODES)]
        yield World(network, cluster, pools)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


@pytest.mark.parametrize("version", [4, 6])
def test_nodes_with_addresses_of_a_network(tmp_path: Path, version: int) -> None:
    with world(tmp_path, version) as made:
        made.found_by_all()


@pytest.mark.parametrize("both", [True, False], ids=["both directions", "one direction"])
def test_a_partition_of_two_nodes(three: World, both: bool) -> None:
    """The third node reaches both of them. Each of the two reads what it finds: right bytes, of the segments whose
    directory node it reaches."""
    three.network.drop("node0", "node1")
    if both:
        three.network.drop("node1", "node0")
    for reader in (0, 1):
        assert three.read(reader, 1 - reader) in range(SEGMENTS + 1)
        three.store_and_compare(reader, 10 + reader)
    for reader in (0, 1):
        assert three.read(reader, 2) in range(SEGMENTS + 1)
        assert three.read(2, reader) == SEGMENTS
    three.network.forward("node0", "node1")
    if both:
        three.network.forward("node1", "node0")
    three.all_connected()
    three.found_by_all()


def test_a_node_loses_its_address(three: World) -> None:
    three.network.lose_address("node1")
    three.store_and_compare(1, 40)
    three.store_and_compare(0, 41)
    three.found(0, 2)
    three.network.give_address("node1")
    three.all_connected()
    three.found_by_all()
