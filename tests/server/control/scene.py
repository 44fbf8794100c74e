"""Daemons with a control plane, and clients of it, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from tests.server.certified import authority, files
from tokenlake_client.control import Certificates, Control
from tokenlake_server.ca import issue
from tokenlake_testing.cluster import Cluster, Node
from tokenlake_testing.ports import reserve_port

CALL_S = 20.0
"""Limit of a call in a test: on a busy machine a daemon may not run for seconds."""


def socket_of(node: Node) -> Path:
    """The control socket of a daemon."""
    return node.socket.with_suffix(".control")


def local(node: Node, token: str | None = None, call_s: float = CALL_S) -> Control:
    """The operator of the node."""
    return Control.local(socket_of(node), token, call_s=call_s)


def raw(node: Node) -> Any:
    """A channel to the control socket, for messages that the client does not send."""
    # A small receive window, so that a stream that is not read is soon one that cannot be written.
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    return grpc.insecure_channel(f"unix:{socket_of(node)}", [("grpc.use_local_subchannel_pool", 1), *window])


def served(cluster: Cluster, **more: str) -> dict[str, str]:
    """Give the nodes of a cluster that is not started yet certificates and a control port. Returns the addresses."""
    ca = authority(cluster.directory / "ca")
    addresses = {}
    for node in cluster.nodes:
        addresses[node.name] = f"127.0.0.1:{reserve_port()}"
        node.settings |= files(ca, node.name) | {"control": addresses[node.name]} | more
    return addresses


def certificates(ca: Path, name: str, role: str = "", tenant: str = "", **given: Any) -> Certificates:
    """A certificate of a caller, from the CA in a directory."""
    certificate, key = issue(ca, name, role=role, tenant=tenant, **given)
    return Certificates(certificate, key, ca / "ca.pem")


def remote(address: str, node: str, held: Certificates, token: str | None = None) -> Control:
    """A caller on another machine."""
    return Control.connect(address, node, held, token, call_s=CALL_S)
