"""Daemons whose members are in etcd: they join, drain and are removed while engines read, and etcd may fail."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from tests.operator.scene import control_of, run, told
from tests.robustness.live import LAYOUT, PATIENT, Prompt, outcomes, read, store, total, wait_until
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.control import Control
from tokenlake_operator.members import drain, members, remove
from tokenlake_server.membership.keeper import LEASE_S
from tokenlake_testing.cluster import Node
from tokenlake_testing.etcd import EtcdServers, etcd_version
from tokenlake_testing.ports import reserve_port

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools"),
    pytest.mark.rest,
]


class Nodes:
    """Daemons of one cluster."""

    def __init__(self, directory: Path, endpoints: str) -> None:
        self._directory = directory
        self.endpoints = endpoints
        self.nodes: dict[str, Node] = {}

    def start(self, *names: str, **settings: str) -> Node:
        """Start daemons, and wait until each serves. Returns the last one."""
        for name in names:
            own = {"listen": f"127.0.0.1:{reserve_port()}", "memory": "2MiB", "region-size": "256KiB"}
            given = {"etcd": self.endpoints, **own, **settings}
            self.nodes[name] = Node(name, self._directory, given)
            self.nodes[name].start()
        for name in names:
            wait_until(lambda name=name: self.page(name, "/health") is not None, f"{name} serves")  # type: ignore[misc]
        return self.nodes[names[-1]]

    def page(self, name: str, path: str) -> dict[str, object] | None:
        with contextlib.suppress(OSError):
            page: dict[str, object] = json.loads(self.nodes[name].page(path))
            return page
        return None

    def connected(self, *names: str) -> bool:
        """Whether each of the nodes is a member, ready and connected with all the others, and with no further one."""
        for name in names:
            health = self.page(name, "/health")
            if health is None or self.page(name, "/ready") is None:
                return False
            peers = health["peers"]
            assert isinstance(peers, dict)
            if {other: peer["state"] for other, peer in peers.items()} != {
                other: "connected" for other in names if other != name
            }:
                return False
        return True

    def wait(self, *names: str) -> None:
        wait_until(lambda: self.connected(*names), f"{', '.join(names)} are a cluster")

    def connect(self, name: str) -> Pool:
        return Pool.connect(self.nodes[name].socket, LAYOUT, deadlines=PATIENT)

    def end_of(self, name: str) -> int:
        """Wait until a daemon has ended by itself. Returns its status."""
        process = self.nodes[name].process
        assert process is not None
        return process.wait(30)

    def command(self, command: click.Command, *arguments: str) -> Result:
        """`tokenlake members | drain | remove`, which ask a daemon that runs; without one etcd."""
        running = [] if command is members else [node for node in self.nodes.values() if node.running][:1]
        where = [word for node in running for word in ("--socket", str(control_of(node)))]
        return run(command, *arguments, *where, env={"TOKENLAKE_ETCD": self.endpoints, "TOKENLAKE_NODE": "nowhere"})


@pytest.fixture
def etcd() -> Iterator[EtcdServers]:
    with EtcdServers() as servers:
        yield servers


@pytest.fixture
def nodes(tmp_path: Path, etcd: EtcdServers) -> Iterator[Nodes]:
    cluster = Nodes(tmp_path, etcd.endpoints)
    try:
        yield cluster
    finally:
        for node in cluster.nodes.values():
            node.stop()


def test_nodes_join_drain_and_are_removed(nodes: Nodes) -> None:
    """Nodes join, drain and are removed, and every byte is found."""
    nodes.start("a", "b")
    nodes.wait("a", "b")
    prompts = [Prompt(seed, 5) for seed in range(4)]
    with nodes.connect("a") as a, nodes.connect("b") as b:
        for prompt, pool in zip(prompts, (a, b, a, b), strict=True):
            assert outcomes(store(pool, prompt)) == {Code.COMMITTED}

        def all_found(pool: Pool) -> bool:
            return all(read(pool, prompt) == prompt.segments for prompt in prompts)

        wait_until(lambda: all_found(a) and all_found(b), "found from both")
        with Control.local(control_of(nodes.nodes["a"])) as control:
            stream = control.events()
            first = next(message.snapshot.ring for message in stream if message.snapshot.complete)
            nodes.start("c")
            nodes.wait("a", "b", "c")
            rings = (each.ring for message in stream for each in message.changes)
            changed = next(ring for ring in rings if "c" in ring.members)
            assert (sorted(first.members), sorted(changed.members)) == (["a", "b"], ["a", "b", "c"])
            assert changed.epoch > first.epoch
            stream.close()
        with nodes.connect("c") as c:
            wait_until(lambda: all_found(c), "found from the newcomer")
        assert all_found(a)
        # b leaves: what it owned is owned by others, and its daemon ends by itself.
        account = told(drain, "b", "--socket", control_of(nodes.nodes["a"]))
        assert account["left"]
        assert account["moved"].keys() <= {"a", "c"}
        assert sum(each["segments"] for each in account["moved"].values()) > 0
        assert account["lost"] == {"segments": 0, "bytes": 0}
        assert nodes.end_of("b") == 0
        for name in "abc":
            wait_until(lambda name=name: "it handed over" in nodes.nodes[name].log.read_text(), name)  # type: ignore[misc]
        nodes.wait("a", "c")
        wait_until(lambda: all_found(a), "found after the drain")
        # c dies; its copies are lost, and its place is given away by an operator.
        nodes.nodes["c"].kill()
        refused = nodes.command(remove, "c")
        if refused.exit_code:
            assert "registration in etcd is live" in refused.stderr
        wait_until(lambda: nodes.command(remove, "c").exit_code == 0, "c can be removed", LEASE_S + 20)
        nodes.wait("a")
        assert nodes.command(remove, "c").exit_code == 1
        listed = json.loads(nodes.command(members, "--json").stdout)
        assert listed["members"].keys() == {"a"}
        assert total(nodes.nodes["a"], "tokenlake_peer_state") == 0
    # The last node is removed while no daemon runs.
    assert nodes.nodes["a"].stop() == 0
    result = nodes.command(remove, "a")
    assert result.exit_code == 0, result.stderr
    assert json.loads(nodes.command(members, "--json").stdout)["members"] == {}


def test_sigterm_drains_where_the_settings_say_so(nodes: Nodes) -> None:
    nodes.start("a")
    node = nodes.start("b", **{"drain-s": "20"})
    nodes.wait("a", "b")
    prompt = Prompt(7, 6)
    with nodes.connect("b") as pool:
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == prompt.segments
    node.terminate()
    assert nodes.end_of("b") == 0
    assert "has drained and left the ring" in node.log.read_text()
    nodes.wait("a")
    with nodes.connect("a") as pool:
        wait_until(lambda: read(pool, prompt) == prompt.segments, "a has the segments of b")
    # Without the setting a node stays a member, and takes its place again.
    nodes.start("b")
    nodes.wait("a", "b")
    epoch = total(nodes.nodes["a"], "tokenlake_ring_epoch")
    assert nodes.nodes["b"].stop() == 0
    nodes.start("b")
    nodes.wait("a", "b")
    assert total(nodes.nodes["a"], "tokenlake_ring_epoch") == epoch


@pytest.mark.parametrize("fault", ["down", "frozen"])
def test_the_data_path_does_not_notice_that_etcd_is_gone(nodes: Nodes, etcd: EtcdServers, fault: str) -> None:
    nodes.start("a", "b")
    nodes.wait("a", "b")
    with nodes.connect("a") as a, nodes.connect("b") as b:
        prompts = [Prompt(seed, 3) for seed in range(3)]
        for prompt in prompts:
            assert outcomes(store(a, prompt)) == {Code.COMMITTED}
        wait_until(lambda: all(read(b, prompt) == prompt.segments for prompt in prompts), "found")
        changes = total(nodes.nodes["a"], "tokenlake_ring_changes_total")
        etcd.kill() if fault == "down" else etcd.freeze()
        until = time.monotonic() + 3 * LEASE_S
        while time.monotonic() < until:
            for prompt in prompts:
                assert read(a, prompt) == prompt.segments
                assert read(b, prompt) == prompt.segments
        fresh = Prompt(99, 3)
        assert outcomes(store(b, fresh)) == {Code.COMMITTED}
        wait_until(lambda: read(a, fresh) == fresh.segments, "found without etcd")
        assert total(nodes.nodes["a"], "tokenlake_ring_changes_total") == changes
        assert nodes.connected("a", "b")
        health = nodes.page("a", "/health")
        assert health is not None
        assert health["tokenlake_membership_problem"] == 1
        # A node that starts now serves its engines alone, is healthy and not ready.
        nodes.start("c")
        assert nodes.page("c", "/ready") is None
        with nodes.connect("c") as c:
            assert outcomes(store(c, Prompt(5, 3))) == {Code.COMMITTED}
        etcd.restart() if fault == "down" else etcd.thaw()
        wait_until(lambda: nodes.page("c", "/ready") is not None, "c joins")
        nodes.wait("a", "b", "c")
        with nodes.connect("c") as c:
            wait_until(lambda: read(c, fresh) == fresh.segments, "found from the newcomer")
