"""A process without the cluster secret obtains no segments and no facts on the port for peers."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    Prompt,
    daemons,
    outcomes,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tests.server.raw import Raw, identity_of, peer_address
from tests.server.scene import OF_THIS_USER, private
from tokenlake.config import Secret
from tokenlake.wire import Code, pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake_server.peers.handshake import NONCE_BYTES, Dialler, PeerIdentity, dialler_proof
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.ports import reserve_port

pytestmark = pytest.mark.live

SECRET = "5ec7e7" * 10
PROMPT = Prompt(500, 12)


def config(path: Path, secret: str = SECRET) -> str:
    """A file with this cluster secret and one tenant."""
    tenant = f'[[tenants]]\nname = "red"\nsecret = "{"aa" * 32}"\n{OF_THIS_USER}\n'
    return private(path, f'cluster_secret = "{secret}"\n{tenant}')


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes that hold PROMPT between them."""
    with daemons(2, config=config(tmp_path / "tokenlake.toml")) as cluster:
        with cluster.connect(0, LAYOUT) as pool:
            assert outcomes(store(pool, PROMPT)) == {Code.COMMITTED}
            wait_told(cluster)
        yield cluster


def keys_of(cluster: Cluster) -> bytes:
    with cluster.connect(0, LAYOUT) as pool:
        return b"".join(pool.prefix(PROMPT.tokens).keys)


def believed(cluster: Cluster) -> Callable[[], tuple[float, ...]]:
    """Metrics of node0 that change when it accepts a handshake."""
    names = ("tokenlake_peers_connected", "tokenlake_sent_segments_total", "tokenlake_received_segments_total")
    return lambda: tuple(total(cluster.nodes[0], name) for name in names)


def refused(raw: Raw, kind: str) -> None:
    """The daemon must refuse without naming its members, and close the connection."""
    answer = raw.answer()
    assert isinstance(answer, peer.PeerRefused), answer
    assert answer.kind == kind
    assert "node1, " not in answer.reason
    assert ", node1" not in answer.reason
    raw.write(pack_frame(peer.Pull("red", bytes(32))))
    assert raw.closed()


def challenged(raw: Raw, hello: peer.PeerHello) -> peer.PeerChallenge:
    """Send a hello. Returns the daemon's challenge, which does not name its cluster."""
    raw.send(hello)
    challenge = raw.answer()
    assert isinstance(challenge, peer.PeerChallenge)
    return challenge


@pytest.mark.parametrize("purpose", get_args(peer.Purpose))
def test_a_stranger_cannot_pose_as_a_dead_member(cluster: Cluster, purpose: peer.Purpose) -> None:
    node, member = cluster.nodes
    keys, address, posing = keys_of(cluster), peer_address(node), identity_of(member)
    hello, proof = record(address, posing, purpose)
    member.kill()
    wait_until(lambda: total(node, "tokenlake_peers_connected") == 0, "the member is gone, the recording too")
    watched = believed(cluster)
    before = watched()
    # 1. The stranger repeats a recorded handshake word for word.
    with Raw(address) as raw:
        challenged(raw, hello)
        raw.send(proof)
        refused(raw, "CredentialRefused")
    # 2. It proves itself with a guessed secret, and with the constant that stands in for a missing secret.
    for secret in (Secret(b"guess" * 4), Secret()):
        with Raw(address) as raw:
            challenge = challenged(raw, replace(hello, nonce=secrets.token_bytes(32)))
            raw.send(peer.PeerProof(dialler_proof(secret, hello, challenge)))
            refused(raw, "CredentialRefused")
    # 3. It sends no proof, before and after the hello.
    for said in ((), (hello,)):
        with Raw(address) as raw:
            for each in said:
                challenged(raw, each)
            raw.send(peer.Pull("red", keys))
            refused(raw, "ProtocolRefused")
    assert watched() == before
    assert "did not prove to 'node0'" in node.log.read_text()
    member.start()
    cluster.wait_ready()
    with cluster.connect(1, LAYOUT) as pool:
        store(pool, PROMPT)
        wait_told(cluster)
        assert read(pool, PROMPT) == PROMPT.segments


def record(
    address: tuple[str, int], posing: PeerIdentity, purpose: peer.Purpose
) -> tuple[peer.PeerHello, peer.PeerProof]:
    """The messages of a member in an accepted handshake. A control connection replaces the member's own."""
    dialler = Dialler(posing, "node0", secrets.token_bytes(NONCE_BYTES), purpose)
    with Raw(address) as raw:
        proof = dialler.answer(challenged(raw, dialler.hello))
        raw.send(proof)
        assert isinstance(raw.answer(), peer.PeerWelcome)
    return dialler.hello, proof


def test_refusals_of_two_nodes_are_logged_once_each() -> None:
    """The log has one line for each of two nodes with another secret, though they take turns, ten attempts a second."""
    with daemons(peers=f"x=127.0.0.1:{reserve_port()},y=127.0.0.1:{reserve_port()}") as cluster:
        node = cluster.nodes[0]
        for _ in range(10):
            for name in ("x", "y"):
                identity = replace(identity_of(node), node=name)
                with Raw(peer_address(node)) as raw:
                    challenged(raw, Dialler(identity, node.name, secrets.token_bytes(NONCE_BYTES), "control").hello)
                    raw.send(peer.PeerRefused("CredentialRefused", f"'node0' did not prove to '{name}'"))
                    assert raw.closed()
        text = node.log.read_text()
        assert [text.count(f"did not prove to '{name}'") for name in ("x", "y")] == [1, 1]


def test_a_stranger_at_a_members_address_learns_nothing(cluster: Cluster) -> None:
    """node0 dials node1, at whose port another process listens."""
    node, member = cluster.nodes
    with Raw(peer_address(member)) as raw:
        recorded = challenged(raw, Dialler(identity_of(node), "node1", bytes(NONCE_BYTES), purpose="control").hello)
    member.kill()
    with socket.create_server(peer_address(member)) as listener:
        listener.settimeout(LIMIT_S)
        for challenge in (recorded, replace(recorded, proof=bytes(32))):
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(LIMIT_S)
                hello = decode(peer.handshake_decoder, frame(sock))
                assert isinstance(hello, peer.PeerHello)
                sock.sendall(pack_frame(challenge))
                answer = decode(peer.handshake_decoder, frame(sock))
                assert isinstance(answer, peer.PeerRefused)
                assert answer.kind == "CredentialRefused"
                assert "node0, " not in answer.reason
                assert sock.recv(1) == b""
        # The stranger sends a welcome without a handshake, and a message that only a peer may send.
        for message in (peer.PeerWelcome(), peer.Owned("red", bytes(32))):
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(LIMIT_S)
                frame(sock)
                sock.sendall(pack_frame(message))
                assert isinstance(decode(peer.handshake_decoder, frame(sock)), peer.PeerRefused)
    assert total(node, "tokenlake_peers_connected") == 0
    assert "'node1' did not prove to 'node0'" in node.log.read_text()


def frame(sock: socket.socket) -> bytes:
    size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    return sock.recv(size, socket.MSG_WAITALL)
