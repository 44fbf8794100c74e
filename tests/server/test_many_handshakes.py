"""TLS handshakes of many nodes at once do not stop the control loop."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.robustness.live import LIMIT_S, daemons, total, wait_until
from tests.server.certified import authority, files, nodes
from tests.server.raw import peer_address
from tokenlake_server.peers.certificates import CertificateFiles, Certificates
from tokenlake_testing.cluster import Node

pytestmark = pytest.mark.live

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
