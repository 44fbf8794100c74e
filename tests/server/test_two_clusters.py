"""Two clusters never mix, although their nodes have the same names, tenants and secrets, or CAs that both trust, and a
list or etcd names the addresses of the other cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, match, outcomes, store, total, wait_until
from tests.server import certified
from tests.server.scene import private
from tests.server.test_encryption import logged
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Node
from tokenlake_testing.etcd import EtcdServers, etcd_version
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

CLUSTERS = ("blue", "red")
NAMED, CERTIFIED = "'b' belongs to the cluster '{theirs}', and 'a' to '{own}'", "no node of the cluster '{own}'"
PROOFS = {"no secret": NAMED, "a secret": NAMED, "certificates": CERTIFIED}
"""By kind of proof, the text with which the nodes refuse each other."""


class Nodes:
    """The nodes a and b of each of the two clusters."""

    def __init__(self, directory: Path, proof: str) -> None:
        self.ports = {(cluster, name): reserve_port() for cluster in CLUSTERS for name in "ab"}
        self.nodes: dict[tuple[str, str], Node] = {}
        self._directory, self._proof = directory, proof
        self._secret = {"config": private(directory / "tokenlake.toml", f'cluster_secret = "{"ab" * 16}"\n')}
        self._authorities = {cluster: certified.authority(directory / cluster, cluster) for cluster in CLUSTERS}
        self._both = directory / "both.pem"
        self._both.write_bytes(b"".join((each / "ca.pem").read_bytes() for each in self._authorities.values()))

    def start(self, cluster: str, name: str, **settings: str) -> None:
        place = self._directory / f"nodes-{cluster}"
        place.mkdir(exist_ok=True)
        own = {"cluster": cluster, "memory": "4MiB", "region-size": "1MiB", "match-deadline-ms": "2000"}
        own["listen"] = f"127.0.0.1:{self.ports[cluster, name]}"
        if self._proof == "certificates":
            own |= certified.files(self._authorities[cluster], name, self._both)
        own |= self._secret if self._proof == "a secret" else {}
        node = self.nodes[cluster, name] = Node(name, place, own | settings)
        node.start()
        wait_until(lambda: node.log.exists() and " port for peers " in node.log.read_text(), f"{cluster} {name} serves")

    def do_not_mix(self) -> None:
        """Each node a has dialled the b of the other cluster: both refuse it by name, and serve their own only."""
        text = PROOFS[self._proof]
        for cluster, other in (CLUSTERS, CLUSTERS[::-1]):
            a, b = self.nodes[cluster, "a"], self.nodes[other, "b"]
            logged(a, text.format(own=cluster, theirs=other))
            logged(b, text.format(own=other if text is CERTIFIED else cluster, theirs=other))
            health = json.loads(a.page("/health"))
            # With etcd, b stays out of the ring, or a does, whichever of them did not found it.
            state = (health["peers"] | health["unproven"])["b"]
            assert state["state"] == "refused"
            assert f"the cluster '{cluster}'" in state["reason"] or f"to '{cluster}'" in state["reason"]
        with ExitStack() as stack:
            pools = {
                place: stack.enter_context(Pool.connect(node.socket, LAYOUT, deadlines=PATIENT))
                for place, node in self.nodes.items()
            }
            for seed, (place, pool) in enumerate(pools.items()):
                assert outcomes(store(pool, Prompt(seed, 6))) == {Code.COMMITTED}
                for other_place, reader in pools.items():
                    if other_place[0] != place[0]:
                        with match(reader, Prompt(seed, 6)) as lease:
                            assert lease.hits == 0, f"{other_place} finds segments of {place}"
        for place, node in self.nodes.items():
            assert total(node, "tokenlake_peers_connected") == total(node, "tokenlake_sent_segments_total") == 0, place
            assert "Traceback" not in node.log.read_text()


@pytest.fixture(params=PROOFS)
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, request.param)
    try:
        yield nodes
    finally:
        for node in nodes.nodes.values():
            node.stop()


def test_lists_that_name_the_other_cluster(made: Nodes) -> None:
    """Each node a takes the b of the other cluster for its own."""
    for cluster, other in (CLUSTERS, CLUSTERS[::-1]):
        right = {name: made.ports[cluster, name] for name in "ab"}
        for name, ports in (("a", right | {"b": made.ports[other, "b"]}), ("b", right)):
            made.start(cluster, name, peers=",".join(f"{each}=127.0.0.1:{port}" for each, port in ports.items()))
    made.do_not_mix()


@pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools")
def test_an_etcd_that_names_the_other_cluster(made: Nodes) -> None:
    """Both clusters are in one etcd. Each b advertises the address of the b of the other cluster."""
    with EtcdServers() as servers:
        for cluster, other in (CLUSTERS, CLUSTERS[::-1]):
            made.start(cluster, "a", etcd=servers.endpoints)
            made.start(cluster, "b", etcd=servers.endpoints, advertise=f"127.0.0.1:{made.ports[other, 'b']}")
        made.do_not_mix()
