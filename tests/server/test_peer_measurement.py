"""The measurement of the paths from another node: the reasons why there is none."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tokenlake.config import Address
from tokenlake_server.bulk.blocking_sockets import no_keys
from tokenlake_server.peers import measurement as peer_measurement
from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.handshake import PeerIdentity
from tokenlake_server.peers.measurement import PeerMeasurement


def measured(port: int) -> str:
    """The problem of the path to a node at this port."""
    addresses = PeerAddresses({"b": Address("127.0.0.1", port)})
    with contextlib.closing(addresses):
        [path] = PeerMeasurement(PeerIdentity("a", 1, (), "c"), addresses, no_keys).measure("b")
    return path.problem


def test_each_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that takes no connection, and one that takes it and answers nothing."""
    monkeypatch.setattr(peer_measurement, "DIAL_S", 0.125)
    monkeypatch.setattr(peer_measurement, "STALL_S", 0.25)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert measured(silent.getsockname()[1]) == "no answer within 0.25 s"
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        # The kernel drops further handshakes.
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        assert measured(full.getsockname()[1]) == "no answer within 0.125 s"
