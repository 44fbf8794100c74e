"""A node joins the ring only once a member has completed a handshake with it, at the address that it registered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.operator.scene import control_of, examined, told
from tests.robustness.live import total, wait_until
from tests.server import certified
from tests.server.test_etcd_daemons import Nodes
from tokenlake_operator.members import members
from tokenlake_operator.status import status
from tokenlake_server.membership.keeper import LEASE_S
from tokenlake_testing.etcd import EtcdServers, etcd_version

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools"),
]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServers]:
    with EtcdServers() as servers:
        yield servers


class Scene:
    """Nodes of the CA `own`, and of the CA `other`, which neither trusts. All have one etcd and one cluster."""

    def __init__(self, directory: Path, endpoints: str, cluster: str) -> None:
        self.nodes = Nodes(directory, endpoints)
        self._cluster = cluster
        self._authorities = {each: certified.authority(directory / each, cluster) for each in ("own", "other")}
        self.trusted = {each: directory / f"{each}.pem" for each in self._authorities}
        for each, file in self.trusted.items():
            file.write_bytes((self._authorities[each] / "ca.pem").read_bytes())

    def start(self, *names: str, ca: str = "own", **settings: str) -> None:
        for name in names:
            identity = certified.files(self._authorities[ca], name, self.trusted[ca])
            self.nodes.start(name, **{"cluster": self._cluster, **identity, **settings})

    def trust_each_other(self) -> None:
        """Put both CAs into the files `ca` of all nodes, which read them again."""
        both = b"".join((authority / "ca.pem").read_bytes() for authority in self._authorities.values())
        for file in self.trusted.values():
            file.write_bytes(both)

    def health(self, name: str) -> dict[str, Any]:
        page = self.nodes.page(name, "/health")
        assert page is not None
        return page

    def unready(self, name: str) -> str:
        """The reason why a node is not ready; empty if it is."""
        try:
            self.nodes.nodes[name].page("/ready")
        except HTTPError as error:
            return str(json.load(error)["reason"])
        return ""

    def refuses(self, name: str, other: str) -> bool:
        """Whether the page of `name` says that one of both refuses the other."""
        unproven = self.health(name)["unproven"]
        return other in unproven and unproven[other]["state"] == "refused"

    def epoch(self, name: str) -> float:
        return total(self.nodes.nodes[name], "tokenlake_ring_epoch")

    def log(self, name: str) -> str:
        return self.nodes.nodes[name].log.read_text()

    def listed(self) -> dict[str, str]:
        """The states of all nodes as `tokenlake members` lists them."""
        env = {"TOKENLAKE_ETCD": self.nodes.endpoints, "TOKENLAKE_CLUSTER": self._cluster}
        return {name: each["state"] for name, each in told(members, env=env)["members"].items()}

    def members(self, name: str) -> set[str]:
        return {name, *self.health(name)["peers"]}


@pytest.fixture
def scene(tmp_path: Path, etcd: EtcdServers, request: pytest.FixtureRequest) -> Iterator[Scene]:
    # etcd is shared by the tests: each has a cluster of its own.
    made = Scene(tmp_path, etcd.endpoints, request.node.name.replace("_", "-")[:40])
    try:
        yield made
    finally:
        for node in made.nodes.nodes.values():
            with contextlib.suppress(ProcessLookupError):
                node.kill()


def test_a_stranger_does_not_join_until_it_is_trusted(scene: Scene) -> None:
    """A node with a certificate of another CA reaches etcd: it stays out, all are told, and it joins once trusted."""
    scene.start("a")
    scene.start("c")
    scene.nodes.wait("a", "c")
    epoch = scene.epoch("a")
    assert "'c' joined the ring" in scene.log("a")
    assert "this node is a member of the ring" in scene.log("c")
    scene.start("b", ca="other")
    wait_until(lambda: scene.refuses("a", "b") and scene.refuses("c", "b"), "the members name the stranger")
    wait_until(lambda: scene.refuses("b", "a") and scene.refuses("b", "c"), "the stranger names who refuses it")
    reason = scene.unready("b")
    assert "no member of the ring has proven it" in reason
    assert "'a' refused" in reason
    assert "signed by" in reason
    assert scene.epoch("a") == scene.epoch("c") == epoch
    assert scene.members("a") == scene.members("c") == {"a", "c"}
    assert not scene.unready("a")
    # Both sides say so, and ask before they advise to trust a CA.
    for name, other in (("a", "b"), ("b", "a")):
        report = examined(scene.nodes.nodes[name])
        found = [each for each in report["findings"] if other in each["where"]]
        assert {each["check"] for each in found} == {"not-admitted"}
        shown = told(status, "--socket", control_of(scene.nodes.nodes[name]))
        assert any(each["check"] == "not-admitted" and other in each["where"] for each in shown["findings"])
        assert "belong" in found[0]["cure"].partition("'ca'")[0]
    assert scene.listed() == {"a": "member", "b": "asks to join", "c": "member"}
    scene.trust_each_other()
    scene.nodes.wait("a", "b", "c")
    assert scene.epoch("a") == epoch + 1
    assert "'b' joined the ring" in scene.log("a")
    assert "this node is a member of the ring" in scene.log("b")
    assert not scene.health("a")["unproven"]


def test_a_wrong_address_keeps_a_node_out(scene: Scene) -> None:
    """Another daemon listens where the node says that it does."""
    scene.start("a")
    listen = scene.nodes.nodes["a"].settings["listen"]
    scene.start("b", advertise=listen)
    wait_until(lambda: scene.refuses("a", "b"), "a dialled itself")
    assert scene.members("a") == {"a"}
    wait_until(lambda: scene.health("b")["unproven"].get("a", {}).get("state") == "connected", "b reaches a")
    assert f"no member of the ring has proven it at {listen}" in scene.unready("b")
    [found] = [each for each in examined(scene.nodes.nodes["b"])["findings"] if each["where"] == "b"]
    assert "correct 'advertise'" in found["cure"]


def test_the_whole_cluster_starts_again(scene: Scene) -> None:
    """All members end and return: no member is there that could prove the first one."""
    scene.start("a", "b")
    scene.nodes.wait("a", "b")
    epoch = scene.epoch("a")
    for name in "ab":
        scene.nodes.nodes[name].kill()
    scene.start("a", "b")
    scene.nodes.wait("a", "b")
    assert scene.epoch("a") == epoch
    # One of them alone is a member too, once the other one's registration has ended.
    for name in "ab":
        scene.nodes.nodes[name].kill()
    scene.start("a")
    wait_until(lambda: not scene.unready("a"), "a is ready without b", LEASE_S + 20)


def test_a_newcomer_waits_while_no_member_runs(scene: Scene) -> None:
    scene.start("a")
    wait_until(lambda: not scene.unready("a"), "a founds the ring")
    scene.nodes.nodes["a"].kill()
    scene.start("b")
    wait_until(lambda: "no member runs" in scene.unready("b"), "b waits", LEASE_S + 20)
    assert "tokenlake remove" in scene.unready("b")
    scene.start("a")
    scene.nodes.wait("a", "b")
