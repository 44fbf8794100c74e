"""Nodes with two network interfaces for bulk connections: reads use both, and one of them where the other fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, PATIENT_S, pid_of, total, wait_told
from tests.server import certified
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_testing.cluster import Cluster, Node, node_names
from tokenlake_testing.network import Network, missing
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

LARGE = Layout(**(msgspec.structs.asdict(LAYOUT) | {"model_id": "large", "segment_tokens": 3072}))
"""3 MiB in two shards: each is received in pieces. `COUNT` segments come in two halves."""
COUNT = 8
ATTEMPTS = 5
"""The reads, each by a daemon that just started: on a busy machine it may take a path for a broken one."""


@contextlib.contextmanager
def two(directory: Path, hosts: list[str], *, encrypted: bool, network: Network | None = None) -> Iterator[Cluster]:
    """Two nodes, each with a further address at one of these hosts."""
    settings = {"match_deadline_ms": "2000"}
    cluster = Cluster(2, "96MiB", "32MiB", None, "tokenlake_server", network, **settings)
    cluster.deadlines = PATIENT
    authority = certified.authority(directory / "ca")
    for node, host in zip(cluster.nodes, hosts, strict=True):
        node.settings |= certified.files(authority, node.name) if encrypted else {}
        node.settings["bulk-listen"] = f"{host}:{reserve_port()}"
    with cluster:
        yield cluster


def store_at_first(two: Cluster, seed: int) -> tuple[list[SegmentKey], NDArray[np.uint8]]:
    """Store at the first node while the second is down, so that the first one keeps the segments."""
    second = two.nodes[1]
    second.kill()
    draw = np.random.default_rng(seed)
    content = draw.integers(0, 256, (COUNT, LARGE.segment_bytes), dtype=np.uint8)
    with two.connect(0, LARGE) as pool:
        keys = pool.prefix(draw.integers(0, 1 << 17, COUNT * LARGE.segment_tokens).tolist()).keys
        assert pool.store_all(keys, content, patience=LIMIT_S) == bytes([Code.COMMITTED]) * COUNT
        wait_told(two)
    second.start()
    two.wait_ready()
    return list(keys), content


def read_large(cluster: Cluster, seed: int) -> None:
    """The second node reads what the first one stored: two halves over two connections."""
    keys, content = store_at_first(cluster, seed)
    with cluster.connect(1, LARGE) as pool, pool.match(keys, deadline_s=PATIENT_S) as lease:
        assert lease.codes == bytes([Code.REMOTE]) * COUNT
        out = np.zeros_like(content)
        assert lease.copy_into(list(out), deadline_s=LIMIT_S) == COUNT
        assert np.array_equal(out, content)


def connections(node: Node, port: int) -> int:
    """The number of connections that the node has opened to this port of another node.

    The tables in /proc/PID/net name the connections of all processes, so those of other tests to a server at the same
    port of another address. Only the sockets of the node's process count.
    """
    process = Path(f"/proc/{pid_of(node)}")
    own = set()
    for path in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The process has closed it since.
            own.add(os.readlink(path))
    found = 0
    for name in ("tcp", "tcp6"):
        for line in (process / "net" / name).read_text().splitlines()[1:]:
            fields = line.split()
            remote, state, inode = fields[2], fields[3], fields[9]
            established = state == "01" and int(remote.rpartition(":")[2], 16) == port
            found += established and f"socket:[{inode}]" in own
    return found


def port_of(node: Node, setting: str) -> int:
    return int(node.settings[setting].rpartition(":")[2])


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("hosts", [["127.0.0.2", "127.0.0.3"], ["[::1]", "[::1]"]], ids=["IPv4", "IPv6"])
def test_a_large_fetch_uses_both_interfaces(tmp_path: Path, hosts: list[str], encrypted: bool) -> None:
    with two(tmp_path, hosts, encrypted=encrypted) as cluster:
        owner, reader = cluster.nodes
        opened = []
        for seed in range(1, 1 + ATTEMPTS):
            read_large(cluster, seed)
            opened.append([connections(reader, port_of(owner, setting)) for setting in ("listen", "bulk-listen")])
            if all(opened[-1]):
                break
        assert all(opened[-1]), opened
        for node in cluster.nodes:
            assert "Traceback" not in node.log.read_text()


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("version", [4, 6])
def test_one_interface_fails(tmp_path: Path, version: int) -> None:
    """Its packets are lost: reads go on over the other one, and the owner is not taken for a node that delivers
    nothing."""
    names = node_names(2)
    with (
        Network(names, version) as network,
        two(tmp_path, [network.host(name, 1) for name in names], encrypted=True, network=network) as cluster,
    ):
        read_large(cluster, 1)
        network.drop(names[1], names[0], 1)
        for seed in range(2, 4):
            read_large(cluster, seed)
            assert total(cluster.nodes[1], "tokenlake_unanswered_fetches_total") == 0
        assert "leaves the path" in cluster.nodes[1].log.read_text()
