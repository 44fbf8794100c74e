"""A node that comes back under its name: at another address, or with an earlier clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, outcomes, read, store, total, wait_told, wait_until
from tests.server import certified
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, node_names
from tokenlake_testing.network import Network, missing
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

SEGMENTS = 6


def serves(cluster: Cluster, seed: int) -> None:
    """Both nodes find what engines of either store, with right bytes."""
    with cluster.connect(0, LAYOUT) as one, cluster.connect(1, LAYOUT) as other:
        for writer, reader in ((one, other), (other, one)):
            prompt = Prompt(seed, SEGMENTS)
            seed += 1
            assert outcomes(store(writer, prompt)) <= {Code.COMMITTED, Code.EXISTS}
            wait_until(lambda: read(reader, prompt) == SEGMENTS, "found from the other node")  # noqa: B023


def compared(pool: Pool, prompt: Prompt) -> bool:
    """Whether all of the prompt is found; what is found has right bytes."""
    return read(pool, prompt) == prompt.segments


@pytest.mark.parametrize("restarted", [0, 1], ids=["the node that dials", "the node that accepts"])
def test_a_node_with_an_earlier_clock(restarted: int) -> None:
    """Its incarnation is smaller than that of the process before: it is connected, and entries of the process before
    are not taken for its own."""
    with daemons(2) as cluster:
        serves(cluster, 1)
        lost = Prompt(10, SEGMENTS)
        with cluster.connect(restarted, LAYOUT) as pool:
            assert outcomes(store(pool, lost)) == {Code.COMMITTED}
            wait_told(cluster)
        node = cluster.nodes[restarted]
        for module in ("tests.robustness.early_daemon", "tokenlake_server", "tests.robustness.early_daemon"):
            node.kill()
            node.start(module)
            cluster.wait_ready()
            with cluster.connect(1 - restarted, LAYOUT) as pool:
                assert read(pool, lost) <= SEGMENTS
                store(pool, lost)
                wait_until(lambda: compared(pool, lost), "computed again and found")
            serves(cluster, 20)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("restarted", [0, 1], ids=["the node that dials", "the node that accepts"])
def test_a_node_that_lost_power_and_its_clock(tmp_path: Path, restarted: int) -> None:
    """The other node still has the connection of the process before when the node comes back with a smaller
    incarnation: it is refused until that connection has ended, and not for good."""
    names = node_names(2)
    with Network(names) as network:
        cluster = Cluster(2, "4MiB", "1MiB", None, "tokenlake_server", network, match_deadline_ms="2000")
        cluster.deadlines = PATIENT
        authority = certified.authority(tmp_path / "ca")
        for node in cluster.nodes:
            node.settings |= certified.files(authority, node.name)
        with cluster:
            serves(cluster, 1)
            for source, target in (names, names[::-1]):
                network.drop(source, target)
            cluster.nodes[restarted].kill()
            for source, target in (names, names[::-1]):
                network.forward(source, target)
            cluster.nodes[restarted].start("tests.robustness.early_daemon")
            cluster.wait_ready()
            serves(cluster, 10)


@pytest.mark.parametrize("moved", [0, 1], ids=["the node that dials", "the node that accepts"])
def test_a_host_name_that_resolves_anew(tmp_path: Path, moved: int) -> None:
    """A node is started at another address, and its host name resolves to that address: the other node finds it, also
    for bulk connections."""
    names = node_names(2)
    hosts = tmp_path / "hosts"
    where = {f"{name}.pool": f"127.0.0.{10 + number}" for number, name in enumerate(names)}
    hosts.write_text(json.dumps(where))
    cluster = Cluster(2, "4MiB", "1MiB", None, "tests.robustness.resolver_daemon", match_deadline_ms="2000")
    cluster.deadlines = PATIENT
    ports = {name: reserve_port() for name in names}
    for number, node in enumerate(cluster.nodes):
        other = names[1 - number]
        node.settings |= {
            "hosts": str(hosts),
            "listen": f"{where[f'{node.name}.pool']}:{ports[node.name]}",
            "peers": f"{other}={other}.pool:{ports[other]}",
            "unencrypted-beyond-loopback": "true",
        }
    with cluster:
        serves(cluster, 1)
        node = cluster.nodes[moved]
        node.kill()
        where[f"{node.name}.pool"] = "127.0.0.20"
        hosts.write_text(json.dumps(where))
        node.start(listen=f"127.0.0.20:{ports[node.name]}")
        cluster.wait_ready()
        before = [total(each, "tokenlake_received_segments_total") for each in cluster.nodes]
        serves(cluster, 10)
        for each, count in zip(cluster.nodes, before, strict=True):
            assert total(each, "tokenlake_received_segments_total") > count, each.name
