"""Daemons that dial, prove themselves and are gone before they are welcomed: a fetch was given up, or a kill."""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.robustness.live import daemons
from tests.server.raw import Raw, identity_of, introduce, peer_address
from tokenlake.wire import peer
from tokenlake_server.handshake import NONCE_BYTES, Dialler
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

TIMES = 5
"""Whether the daemon finds out when it writes its welcome, or right after, is the kernel's choice."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(2) as cluster:
        cluster.nodes[0].kill()
        yield cluster


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("purpose", ["control", "bulk", "query"])
def test_one_who_is_gone_is_forgotten(cluster: Cluster, purpose: peer.Purpose, reset: bool) -> None:
    """The control loop's callback failed, and the log said so with a traceback each time."""
    member, node = cluster.nodes
    identity = identity_of(member)
    for _ in range(TIMES):
        with Raw(peer_address(node)) as raw:
            dialler = Dialler(identity, node.name, secrets.token_bytes(NONCE_BYTES), purpose)
            raw.send(dialler.hello)
            challenge = raw.answer()
            assert isinstance(challenge, peer.PeerChallenge)
            if reset:
                raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.send(dialler.answer(challenge))
    with Raw(peer_address(node)) as raw:
        assert isinstance(introduce(raw, identity, node.name, "bulk"), peer.PeerWelcome)
    assert "Traceback" not in node.log.read_text()
