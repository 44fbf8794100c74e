"""Nodes with certificates: they connect encrypted, and refuse others by name, on both sides."""

from __future__ import annotations

import datetime
import json
import socket
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, outcomes, read, store, total, wait_told, wait_until
from tests.server.certified import authority, files, nodes
from tests.server.raw import Raw, peer_address
from tokenlake.wire import Code, peer
from tokenlake_client import Pool
from tokenlake_server.ca import issue
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


def logged(node: Node, *texts: str) -> None:
    """Wait until one line of the node's log has all these texts."""

    def found() -> bool:
        lines = node.log.read_text().splitlines() if node.log.exists() else []
        return any(all(text in line for text in texts) for line in lines)

    wait_until(found, f"the log of {node.name} has a line with {texts}: {node.log}")


def connected(node: Node) -> bool:
    try:
        return total(node, "tokenlake_peers_connected") == len(node.settings["peers"].split(",")) - 1
    except OSError:
        return False


def days(count: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=count)


class Case:
    """Two nodes that refuse each other: a dials b."""

    def __init__(self, a: dict[str, str], b: dict[str, str], in_a: tuple[str, ...], in_b: tuple[str, ...]) -> None:
        self.settings = {"a": a, "b": b}
        self.texts = {"a": in_a, "b": in_b}


def cases(directory: Path) -> dict[str, Case]:
    ca, other = authority(directory / "ca"), authority(directory / "other")
    both = directory / "both.pem"
    both.write_bytes((ca / "ca.pem").read_bytes() + (other / "ca.pem").read_bytes())
    staging = authority(directory / "staging", "staging")
    trusts_staging = directory / "trusts-staging.pem"
    trusts_staging.write_bytes((ca / "ca.pem").read_bytes() + (staging / "ca.pem").read_bytes())
    expired, early = authority(directory / "expired"), authority(directory / "early")
    for place, begin in ((expired, days(-2)), (early, days(2))):
        for name in ("a", "b"):
            issue(place, name, days=1, begin=begin)
    all_of_them = directory / "all.pem"
    all_of_them.write_bytes(b"".join((each / "ca.pem").read_bytes() for each in (ca, expired, early)))
    good = {name: files(ca, name) for name in ("a", "b")}
    trusting = {name: good[name] | {"ca": str(all_of_them)} for name in ("a", "b")}
    return {
        "the dialler has another CA": Case(
            files(other, "a", both),
            good["b"],
            ("'CN=tokenlake CA ", "unknown ca"),
            ("not signed by a CA of the setting 'ca'",),
        ),
        "the acceptor has another CA": Case(
            good["a"], files(other, "b", both), ("not signed by a CA of the setting 'ca'",), ("issued: unknown ca",)
        ),
        "the dialler is of another cluster": Case(
            files(staging, "a", trusts_staging) | {"cluster": "staging"},
            good["b"] | {"ca": str(trusts_staging)},
            ("its certificate is for spiffe://tokenlake/tokenlake/node/b", "no node of the cluster 'staging'"),
            ("its certificate is for spiffe://staging/tokenlake/node/a", "no node of the cluster 'tokenlake'"),
        ),
        "the dialler has expired": Case(
            files(expired, "a", all_of_them),
            trusting["b"],
            ("it refused this node", "'a' has expired", "the clock of the node that checks", "clock of this node says"),
            ("'a' has expired: it is valid from", "the clock of the node that checks it says"),
        ),
        "the acceptor has expired": Case(
            trusting["a"],
            files(expired, "b", all_of_them),
            ("'b' has expired: it is valid from", "the clock of the node that checks it says"),
            ("it refused this node", "'b' has expired", "the clock of the node that checks", "clock of this node says"),
        ),
        "the dialler is not valid yet": Case(
            files(early, "a", all_of_them),
            trusting["b"],
            ("it refused this node", "'a' is not valid yet"),
            ("'a' is not valid yet: it is valid from",),
        ),
        "the acceptor is not valid yet": Case(
            trusting["a"],
            files(early, "b", all_of_them),
            ("'b' is not valid yet: it is valid from",),
            ("it refused this node", "'b' is not valid yet"),
        ),
        "the dialler is plain": Case(
            {}, good["b"], ("it refused this node", "accepts encrypted ones only"), ("accepts encrypted ones only",)
        ),
        "the acceptor is plain": Case(
            good["a"], {}, ("answered without TLS",), ("an encrypted connection (TLS)", "accepts plain ones only")
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        "the dialler has another CA",
        "the acceptor has another CA",
        "the dialler is of another cluster",
        "the dialler has expired",
        "the acceptor has expired",
        "the dialler is not valid yet",
        "the acceptor is not valid yet",
        "the dialler is plain",
        "the acceptor is plain",
    ],
)
def test_refusals_are_named_on_both_sides(name: str, tmp_path: Path) -> None:
    case = cases(tmp_path)[name]
    with daemons(0) as cluster:
        for node in nodes(cluster, case.settings):
            logged(node, *case.texts[node.name])
            assert total(node, "tokenlake_peers_connected") == 0
            [(other, state)] = json.loads(node.page("/health"))["peers"].items()
            assert state["state"] == "refused", (node.name, other, state)
        for node in cluster.nodes:
            assert node.stop() == 0
            assert "Traceback" not in node.log.read_text()


def test_a_certificate_for_another_node(tmp_path: Path) -> None:
    """a dials c at the address of b; both have valid certificates of the cluster. c does not learn the name of b."""
    ca = authority(tmp_path / "ca")
    with daemons(0) as cluster:
        a, b = nodes(cluster, {name: files(ca, name) for name in ("a", "b")})
        wait_until(lambda: connected(a), "they know each other")
        b.kill()
        posing = Node("c", cluster.directory, {**b.settings, **files(ca, "c"), "node": "c"})
        posing.settings |= {"peers": "", "socket": str(posing.socket)}
        cluster.nodes.append(posing)
        posing.start()
        logged(a, "certificate is for node 'c', and another node was dialled")
        logged(posing, "it refused this node", "certificate is for node 'c', and another node was dialled")
        assert "'b'" not in posing.log.read_text()


def test_a_plain_process_learns_no_names(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    with daemons(0) as cluster:
        node, _ = nodes(cluster, {name: files(ca, name) for name in ("node-a", "node-b")})
        wait_until(lambda: connected(node), "they know each other")
        with Raw(peer_address(node)) as raw:
            raw.write(b"\x16\x03\x01\x00\x05junk!")
            raw.sock.shutdown(socket.SHUT_WR)
            assert b"node-" not in raw.sock.recv(1 << 16)
        logged(node, "TLS failed")
        purposes: list[peer.Purpose] = ["control", "bulk", "query"]
        for purpose in purposes:
            with Raw(peer_address(node)) as raw:
                raw.send(peer.PeerHello(1, 1, "tokenlake", "node-b", 1, purpose, bytes(32)))
                refused = raw.answer()
                assert isinstance(refused, peer.PeerRefused)
                assert "node-" not in refused.reason
                assert raw.closed()
        assert connected(node)


def test_no_request_fails_while_they_are_replaced(tmp_path: Path) -> None:
    """Engines store at one node and read at the other one all the time."""
    old, new = authority(tmp_path / "old"), authority(tmp_path / "new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes((old / "ca.pem").read_bytes())
    with daemons(0) as cluster:
        own = {"memory": "32MiB", "ca": str(trusted)}
        a, b = nodes(cluster, {name: files(old, name) | own for name in ("a", "b")})
        for node in (a, b):
            wait_until(lambda node=node: connected(node), "they know each other")  # type: ignore[misc]
        with (
            Pool.connect(a.socket, LAYOUT, deadlines=PATIENT) as writer,
            Pool.connect(b.socket, LAYOUT, deadlines=PATIENT) as reader,
        ):
            seed = 900

            def use() -> None:
                """Store at a and read at b, as engines do all the time."""
                nonlocal seed
                seed += 1
                prompt = Prompt(seed, 4)
                assert outcomes(store(writer, prompt)) == {Code.COMMITTED}
                wait_told(cluster)
                assert read(reader, prompt) == prompt.segments

            def use_until_reloaded(times: int) -> None:
                while min(node.log.read_text().count("are in use for new") for node in (a, b)) < times:
                    use()

            use()
            trusted.write_bytes((old / "ca.pem").read_bytes() + (new / "ca.pem").read_bytes())
            use_until_reloaded(1)
            for name in ("a", "b"):
                issue(new, name)
                for ending in (".pem", "-key.pem"):
                    (old / f"{name}{ending}").write_bytes((new / f"{name}{ending}").read_bytes())
                    use()
            use_until_reloaded(2)
            trusted.write_bytes((new / "ca.pem").read_bytes())
            use_until_reloaded(3)
            use()


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    good = files(ca, "a")
    other = files(ca, "b")
    readable = tmp_path / "readable.pem"
    readable.write_bytes(Path(good["key"]).read_bytes())
    readable.chmod(0o644)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for change, expected in (
        ({"certificate": other["certificate"]}, "spiffe://tokenlake/tokenlake/node/a, not one for"),
        ({"key": other["key"]}, "setting 'key'"),
        ({"key": str(readable)}, "chmod 600"),
        ({"ca": str(text)}, "certificates in PEM"),
        ({"ca": str(tmp_path / "none")}, "No such file"),
    ):
        with Cluster(0, "4MiB", "1MiB") as cluster:
            node = Node("a", cluster.directory, {"memory": "1MiB", "listen": "127.0.0.1:0"} | good | change)
            cluster.nodes.append(node)
            node.start()
            assert node.process is not None
            assert node.process.wait(60) == 1
            assert expected in node.log.read_text(), node.log.read_text()
