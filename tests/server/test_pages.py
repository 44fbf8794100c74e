"""The health pages and the log name each peer that is not connected, and why; pages beyond loopback name no tenant."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, store, total, wait_until
from tests.server.scene import OF_THIS_USER, tenants
from tokenlake_client import Pool
from tokenlake_server.peers.states import WARN_S
from tokenlake_testing.cluster import Node
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live


@contextlib.contextmanager
def running(directory: Path, **settings: dict[str, str]) -> Iterator[dict[str, Node]]:
    """Daemons by name, each with settings of its own. They serve when the body begins."""
    nodes = {
        name: Node(name, directory, {"memory": "1MiB", "region-size": "256KiB", **own})
        for name, own in settings.items()
    }
    try:
        for node in nodes.values():
            node.start()
        for node in nodes.values():
            wait_until(lambda node=node: node.socket.exists(), "it serves")  # type: ignore[misc]
        yield nodes
    finally:
        for node in nodes.values():
            node.stop()


def serves(node: Node) -> bool:
    with contextlib.suppress(OSError):
        return bool(node.page("/health"))
    return False


def peer(node: Node, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.page("/health"))["peers"][name]
    return found


def test_each_state_of_a_peer_has_a_name_and_a_reason(tmp_path: Path) -> None:
    ports = {name: reserve_port() for name in "abcde"}
    address = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    # b does not know a; c knows all but e; no daemon listens at d; e is in no other list, and knows a.
    peers = {"a": "bcd", "b": "c", "c": "abd", "e": "a"}
    settings = {
        name: {"listen": address[name], "peers": ",".join(f"{other}={address[other]}" for other in others)}
        for name, others in peers.items()
    }
    with running(tmp_path, **settings) as nodes:
        a = nodes["a"]
        wait_until(lambda: peer(a, "c")["state"] == "connected", "a and c are connected")
        wait_until(lambda: peer(a, "b")["state"] == "refused", "b refuses a")
        assert "not" in peer(a, "b")["reason"]
        assert "member" in peer(a, "b")["reason"]
        wait_until(lambda: address["d"] in peer(a, "d")["reason"], "a dialled d")
        assert peer(a, "d")["state"] == "unreachable"
        assert "refused" in peer(a, "d")["reason"].lower()
        # a, whose name sorts first, would dial e.
        assert peer(nodes["e"], "a")["state"] == "unreachable"
        assert "must include 'e'" in peer(nodes["e"], "a")["reason"]
        # b and c are connected, and their lists differ.
        wait_until(lambda: peer(nodes["c"], "b")["state"] == "other ring", "the lists of b and c differ")
        assert "'peers'" in peer(nodes["c"], "b")["reason"]
        # The gauge says the same, and exactly one state of each peer is 1.
        assert total(a, "tokenlake_peer_state") == 3
        samples = a.metrics()
        assert samples['tokenlake_peer_state{peer="c",state="connected"}'] == 1
        assert samples['tokenlake_peer_state{peer="b",state="refused"}'] == 1
        assert samples['tokenlake_peer_state{peer="d",state="unreachable"}'] == 1
        # The log says so as well, without a request for a page.
        wait_until(lambda: "peer d: unreachable for 1" in a.log.read_text(), "a warning about d", WARN_S + 10)
        wait_until(lambda: "peer b: refused for 1" in a.log.read_text(), "a warning about b", 5)
        assert "peer c:" not in a.log.read_text()
        # They serve all the same.
        assert json.loads(a.page("/ready")) == {"node": "a", "ready": True}


@pytest.mark.parametrize("shown", [False, True])
def test_pages_beyond_loopback(tmp_path: Path, shown: bool) -> None:
    """Pages beyond loopback can only be read and name no tenant."""
    port = reserve_port()
    settings = {
        "config": tenants(tmp_path, blue=OF_THIS_USER),
        "metrics": f"0.0.0.0:{port}",
        "metrics-tenants": str(shown).lower(),
    }
    with running(tmp_path, a={"listen": "127.0.0.1:0", **settings}) as nodes:
        node = nodes["a"]
        node.metrics_port = port
        wait_until(lambda: serves(node), "it serves")
        with Pool.connect(node.socket, LAYOUT, deadlines=PATIENT) as pool:
            store(pool, Prompt(1, 4))
            page = node.page("/metrics")
        assert ("blue" in page) == shown
        assert 'tenant="0"' in page or shown
        assert "tokenlake_written_bytes_total" in page
        request = urllib.request.Request(f"http://127.0.0.1:{port}/health", data=b"{}")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=5)
