"""Nodes with certificates connect encrypted, refuse others by name, and take no byte that was changed on its way."""

from __future__ import annotations

import datetime
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    Prompt,
    daemons,
    outcomes,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tests.robustness.matrix.proxy import Direction, Flip, Part, Proxy
from tests.server.certified import authority, encrypted, files, nodes
from tests.server.raw import Raw, peer_address
from tokenlake.wire import Code, peer
from tokenlake_client import Pool
from tokenlake_server.ca import issue
from tokenlake_server.peers.certificates import CertificateFiles, Certificates
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


HUB = "m"
"""The node that all others refuse or that refuses them. Of two nodes, the one whose name sorts first dials."""
LATE = "' has expired: it is valid from", "the clock of the node that checks it says"
TOLD_LATE = "it refused this node", "' has expired", "the clock of the node that checks", "clock of this node says"
REFUSED = {
    "a-ca": (("'CN=tokenlake CA ", "unknown ca"), ("not signed by a CA of the setting 'ca'",)),
    "z-ca": (("issued: unknown ca",), ("not signed by a CA of the setting 'ca'",)),
    "a-staging": (
        ("its certificate is for spiffe://tokenlake/tokenlake/node/m", "no node of the cluster 'staging'"),
        ("its certificate is for spiffe://staging/tokenlake/node/a-staging", "no node of the cluster 'tokenlake'"),
    ),
    "a-late": (("'a-late", *TOLD_LATE), ("'a-late", *LATE)),
    "z-late": (("'z-late", *TOLD_LATE), ("'z-late", *LATE)),
    "a-plain": (("it refused this node", "accepts encrypted ones only"), ("accepts encrypted ones only",)),
    "z-plain": (("an encrypted connection (TLS)", "accepts plain ones only"), ("answered without TLS",)),
}
"""By node: the texts of a line of its log, and of one of the hub's."""


def test_refusals_are_named_on_both_sides(tmp_path: Path) -> None:
    """Nodes of another CA and of another cluster, with a certificate that has expired, and without one."""
    ca, other = authority(tmp_path / "ca"), authority(tmp_path / "other")
    staging = authority(tmp_path / "staging", "staging")
    trusted = tmp_path / "all.pem"
    trusted.write_bytes(b"".join((each / "ca.pem").read_bytes() for each in (ca, other, staging)))
    known = tmp_path / "known.pem"
    known.write_bytes((ca / "ca.pem").read_bytes() + (staging / "ca.pem").read_bytes())
    settings: dict[str, dict[str, str]] = {HUB: files(ca, HUB, known)}
    for name in REFUSED:
        kind = name.partition("-")[2]
        if kind == "late":
            issue(ca, name, days=1, begin=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2))
        place = {"ca": other, "staging": staging}.get(kind, ca)
        settings[name] = {} if kind == "plain" else files(place, name, trusted)
        settings[name] |= {"cluster": "staging"} if kind == "staging" else {}
    with daemons(0) as cluster:
        hub, *others = nodes(cluster, settings, HUB)
        for node in others:
            own, of_hub = REFUSED[node.name]
            logged(node, *own)
            logged(hub, *of_hub)
            assert json.loads(node.page("/health"))["peers"][HUB]["state"] == "refused"
        states = {name: each["state"] for name, each in json.loads(hub.page("/health"))["peers"].items()}
        assert {states[name] for name in REFUSED if name > HUB} == {"refused"}
        assert [total(node, "tokenlake_peers_connected") for node in cluster.nodes] == [0] * len(settings)
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
        # Each id that waits for its key is kept, so a process that proves nothing may name one.
        with Raw(peer_address(node)) as raw:
            raw.send(peer.OpenConnection(bytes(32)))
            raw.send(peer.OpenConnection(bytes([1] * 32)))
            refused = raw.answer()
            assert isinstance(refused, peer.PeerRefused)
            assert "unexpected OpenConnection" in refused.reason
            assert raw.closed()
        assert connected(node)


def test_certificates_are_replaced_while_nodes_run(tmp_path: Path) -> None:
    """Engines store at one node and read at the other one all the time. The connection goes on, and a node that still
    has a certificate of the authority that was removed is refused at its next start."""
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
        assert [node.log.read_text().count("ended:") for node in (a, b)] == [0, 0]
        b.kill()
        issue(old, "b", renew=True)
        b.start()
        logged(a, "not signed by a CA")


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


HANDSHAKES = 100
SOURCES = 4
"""Addresses from which they come: the unfinished handshakes of one are limited."""


def serves(node: Node) -> bool:
    try:
        return bool(node.page("/health"))
    except OSError:
        return False


def test_no_callback_takes_as_long_as_a_handshake(tmp_path: Path) -> None:
    ca = authority(tmp_path / "ca")
    with daemons(0) as cluster:
        [node] = nodes(cluster, {"a": files(ca, "a")})
        wait_until(lambda: serves(node), "it serves")
        own = files(ca, "b")
        paths = CertificateFiles(Path(own["certificate"]), Path(own["key"]), Path(own["ca"]))
        context = Certificates(paths, "tokenlake", "b").current.client
        before = total(node, "tokenlake_long_callbacks_total")
        barrier = threading.Barrier(HANDSHAKES)

        def connect(number: int) -> None:
            source = f"127.0.0.{2 + number % SOURCES}", 0
            with socket.create_connection(peer_address(node), LIMIT_S, source) as sock:
                barrier.wait(LIMIT_S)
                with context.wrap_socket(sock) as tls:
                    assert tls.version() == "TLSv1.3"

        with ThreadPoolExecutor(HANDSHAKES) as threads:
            assert len(list(threads.map(connect, range(HANDSHAKES)))) == HANDSHAKES
        assert total(node, "tokenlake_long_callbacks_total") - before <= HANDSHAKES / 10


SEGMENTS = 8


class Wire(Proxy):
    """A proxy that keeps what comes down."""

    seen = b""

    def _pass(
        self, direction: Direction, part: Part, piece: bytes, sink: socket.socket, descriptors: list[int]
    ) -> None:
        self.seen += piece if direction == "down" else b""
        super()._pass(direction, part, piece, sink, descriptors)


@pytest.fixture
def scene() -> Iterator[tuple[Cluster, Wire]]:
    """Two nodes. node1 fetches from node0 through the proxy."""
    made = encrypted(2, memory="8MiB")
    with Wire(("127.0.0.1", made.ports["node0"])) as wire:
        made.nodes[1].settings["peers"] = f"node0=127.0.0.1:{wire.port}"
        with made as cluster:
            yield cluster, wire


def test_a_flipped_bit_is_a_miss(scene: tuple[Cluster, Wire]) -> None:
    """On any connection between the nodes. `tests/rules/test_records.py` has the other changes of a record."""
    cluster, wire = scene
    prompts = [Prompt(700 + seed, SEGMENTS) for seed in range(4)]
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        for prompt in prompts:
            assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        wait_told(cluster)
        wire.fault = Flip("down", "body", 4)
        missed = False

        def damaged() -> bool:
            nonlocal missed
            missed |= sum(read(other, prompt) for prompt in prompts) < SEGMENTS * 4
            return missed and wire.done > 3

        wait_until(damaged, "misses")
        wire.fault = None
        wait_until(lambda: all(read(other, prompt) == SEGMENTS for prompt in prompts), "all are fetched")
    assert "Traceback" not in "".join(node.log.read_text() for node in cluster.nodes)


def test_no_bytes_of_a_segment_are_on_the_wire(scene: tuple[Cluster, Wire]) -> None:
    cluster, wire = scene
    prompt = Prompt(800, SEGMENTS)
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(1, LAYOUT) as other:
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        wait_told(cluster)
        wait_until(lambda: read(other, prompt) == SEGMENTS, "the segments are fetched")
    assert len(wire.seen) > SEGMENTS * LAYOUT.segment_bytes
    assert all(prompt.content(index)[:16] not in wire.seen for index in range(SEGMENTS))
    # The id of a connection is seen by everyone on the way: unknown and used keys open nothing.
    for messages in ([], [peer.Pull("default", bytes(32))]):
        with Raw(peer_address(cluster.nodes[0])) as raw:
            raw.send(peer.OpenConnection(bytes(32)))
            for message in messages:
                raw.send(message)
            answer = raw.body()
            assert answer == b"" or isinstance(peer.handshake_decoder.decode(answer), peer.PeerRefused)
