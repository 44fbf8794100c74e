"""Two clusters never mix, although their nodes have the same names, tenants and secrets, or CAs that both trust, and a
list or etcd names the addresses of the other cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, match, outcomes, store, total, wait_until
from tests.server import certified
from tests.server.test_encryption import logged
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Node
from tokenlake_testing.etcd import EtcdServers, etcd_version
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

CLUSTERS = ("blue", "red")
NAMED = "'b' belongs to the cluster '{theirs}', and 'a' to '{own}'"
CERTIFIED = "no node of the cluster '{own}'"
Settings = Callable[[str, str], dict[str, str]]
"""Function that returns the settings by which a node (cluster, name) proves its identity."""


def plain(directory: Path) -> Settings:
    return lambda cluster, name: {}


def secret(directory: Path) -> Settings:
    file = directory / "tokenlake.toml"
    file.write_text(f'cluster_secret = "{"ab" * 16}"\n')
    file.chmod(0o600)
    return lambda cluster, name: {"config": str(file)}


def certificates(directory: Path) -> Settings:
    authorities = {cluster: certified.authority(directory / cluster, cluster) for cluster in CLUSTERS}
    both = directory / "both.pem"
    both.write_bytes(b"".join((authority / "ca.pem").read_bytes() for authority in authorities.values()))
    return lambda cluster, name: certified.files(authorities[cluster], name, both)


PROOFS = {"no secret": (plain, NAMED), "a secret": (secret, NAMED), "certificates": (certificates, CERTIFIED)}


class Nodes:
    """The nodes a and b of each of the two clusters."""

    def __init__(self, directory: Path, proofs: Settings) -> None:
        self.ports = {(cluster, name): reserve_port() for cluster in CLUSTERS for name in "ab"}
        self.nodes: dict[tuple[str, str], Node] = {}
        self._proofs = proofs
        self._directory = directory

    def start(self, cluster: str, name: str, **settings: str) -> Node:
        place = self._directory / f"nodes-{cluster}"
        place.mkdir(exist_ok=True)
        own = {"cluster": cluster, "memory": "4MiB", "region-size": "1MiB", "match-deadline-ms": "2000"}
        own["listen"] = f"127.0.0.1:{self.ports[cluster, name]}"
        node = Node(name, place, own | self._proofs(cluster, name) | settings)
        self.nodes[cluster, name] = node
        node.start()
        wait_until(lambda: node.log.exists() and " port for peers " in node.log.read_text(), f"{cluster} {name} serves")
        return node

    def do_not_mix(self, text: str) -> None:
        """Each node a has dialled the b of the other cluster: both refuse it by name, and serve their own only."""
        for cluster, other in (CLUSTERS, CLUSTERS[::-1]):
            a, b = self.nodes[cluster, "a"], self.nodes[other, "b"]
            logged(a, text.format(own=cluster, theirs=other))
            logged(b, text.format(own=other if text is CERTIFIED else cluster, theirs=other))
            health = json.loads(a.page("/health"))
            # With etcd, b stays out of the ring, or a does, whichever of them did not found it.
            state = (health["peers"] | health["unproven"])["b"]
            assert state["state"] == "refused"
            assert f"the cluster '{cluster}'" in state["reason"] or f"to '{cluster}'" in state["reason"]
        assert [total(node, "tokenlake_peers_connected") for node in self.nodes.values()] == [0] * 4
        self.serve_only_their_own()

    def serve_only_their_own(self) -> None:
        """What one cluster stores, the other one does not find."""
        with ExitStack() as stack:
            pools = {
                place: stack.enter_context(Pool.connect(node.socket, LAYOUT, deadlines=PATIENT))
                for place, node in self.nodes.items()
            }
            for seed, (place, pool) in enumerate(pools.items()):
                prompt = Prompt(seed, 6)
                assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
                for other, reader in pools.items():
                    if other[0] != place[0]:
                        with match(reader, prompt) as lease:
                            assert lease.hits == 0, f"{other} finds segments of {place}"
        for place, node in self.nodes.items():
            assert total(node, "tokenlake_sent_segments_total") == 0, place
            assert "Traceback" not in node.log.read_text()


@pytest.fixture
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, PROOFS[request.param][0](tmp_path))
    try:
        yield nodes
    finally:
        for node in nodes.nodes.values():
            node.stop()


each_proof = pytest.mark.parametrize(
    ("made", "text"), [(name, text) for name, (_, text) in PROOFS.items()], indirect=["made"], ids=list(PROOFS)
)


@each_proof
def test_lists_that_name_the_other_cluster(made: Nodes, text: str) -> None:
    """Each node a takes the b of the other cluster for its own."""
    for cluster, other in (CLUSTERS, CLUSTERS[::-1]):
        right = {name: made.ports[cluster, name] for name in "ab"}
        wrong = right | {"b": made.ports[other, "b"]}
        for name, ports in (("a", wrong), ("b", right)):
            made.start(cluster, name, peers=",".join(f"{each}=127.0.0.1:{port}" for each, port in ports.items()))
    made.do_not_mix(text)


@pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools")
@each_proof
def test_an_etcd_that_names_the_other_cluster(made: Nodes, text: str) -> None:
    """Both clusters are in one etcd. Each b advertises the address of the b of the other cluster."""
    with EtcdServers() as servers:
        for cluster, other in (CLUSTERS, CLUSTERS[::-1]):
            made.start(cluster, "a", etcd=servers.endpoints)
            made.start(cluster, "b", etcd=servers.endpoints, advertise=f"127.0.0.1:{made.ports[other, 'b']}")
        made.do_not_mix(text)
