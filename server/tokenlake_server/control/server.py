"""The gRPC server of a daemon: its ports, its services and its limits. In the admin thread, with the client of etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# gRPC's core would write several lines to stderr for each refused connection.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor

from tokenlake.config import Address, ServerConfig, parse_address
from tokenlake.core.events import Event
from tokenlake.errors import ConfigurationError, LimitReached
from tokenlake.metrics import Level, Metric
from tokenlake_proto.v1 import admin_pb2, events_pb2, scheduling_pb2
from tokenlake_server.control.bridge import Bridge
from tokenlake_server.control.callers import Callers
from tokenlake_server.control.event_stream import Events
from tokenlake_server.control.limits import ADMIN_CALLS, MAX_CALLS, MAX_MESSAGE, Calls
from tokenlake_server.control.node_parts import NodeParts
from tokenlake_server.control.operations import Admin
from tokenlake_server.control.service import Serving, Stream, Unary, handlers_of
from tokenlake_server.control.work import Work
from tokenlake_server.engines.local_socket import prepare
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.page.page import Page
from tokenlake_server.page.tokens import PageTokens
from tokenlake_server.peers.certificates import CertificateFiles
from tokenlake_server.scheduling.service import Scheduling

log = logging.getLogger(__name__)

CALLS = Metric("tokenlake_control_calls", "Calls of the control plane under way, streams included", kind="gauge")
CALL_BYTES = Metric(
    "tokenlake_control_call_bytes", "Bytes that are charged for messages of the control plane under way", kind="gauge"
)
REFUSED_CALLS = Metric(
    "tokenlake_control_refused_calls",
    "Calls of the control plane that were refused since the start, because too many were under way",
    kind="gauge",
)
MAX_RPCS = MAX_CALLS + ADMIN_CALLS + 64
"""Calls at a time before their caller is known; further ones are refused."""
MAX_CONNECTIONS = 256
"""Connections at a time on each port; further ones are closed."""
MAX_CALLS_PER_CONNECTION = 96
ACCOUNT_S = 2.0
"""Seconds for which the end of a daemon that drained waits for the caller that wants to read its account."""
GOODBYE_S = 0.5
"""Seconds for which the end of the daemon waits for calls."""
START_S = 20.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    # Bytes of a message that arrive before there is room for it.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    # By default the buffer of a connection grows with its messages, to 4 MiB.
    ("grpc.experimental.tcp_max_read_chunk_size", 64 << 10),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 600_000),
    # A caller that is gone without a word is noticed, so that its streams end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    # Two daemons never share a port.
    ("grpc.so_reuseport", 0),
]


class ControlServer:
    """Serves the control plane until `close`. Made and closed on the control loop, after the parts that it reads."""

    def __init__(self, node: NodeParts, thread: AdminThread, loop: asyncio.AbstractEventLoop) -> None:
        """`thread`: the caller closes it. Raises `ConfigurationError` for a port or a socket that cannot be opened."""
        config, driver = node.config, node.driver
        self._thread = thread
        self._bridge = Bridge(driver, loop)
        node.engines.on_other_answer = self._bridge.answered
        self._calls = Calls()
        try:
            self._work = Work()
        except RuntimeError as error:
            raise LimitReached(f"the thread of the control plane cannot be started: {error}") from error
        self.socket = Path(config.control_socket) if config.control_socket else None
        serving = Serving(Callers(config.cluster, node.tenants), self._calls, self._work, self.socket)
        tokens = PageTokens()
        self._admin = Admin(self._bridge, node, tokens)
        self.page = Page(node, self._bridge, self._admin, self._work, thread, tokens)
        """The state of the node for browsers."""
        self._scheduling = Scheduling(self._bridge, driver, node.engines, self._work, node.tenants.count)
        services: dict[FileDescriptor, Mapping[str, Unary] | Mapping[str, Stream]] = {
            scheduling_pb2.DESCRIPTOR: self._scheduling.functions,
            admin_pb2.DESCRIPTOR: self._admin.functions,
            events_pb2.DESCRIPTOR: Events(self._bridge, driver).functions,
        }
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for file, functions in services.items():
            self._handlers |= handlers_of(file, functions, serving)
        self.address: Address | None = None
        """The address at which the server listens with TLS; None without the setting `control`."""
        self._server: grpc.aio.Server | None = None
        if self.socket is not None:
            prepare(self.socket, "control_socket")
        try:
            self._thread.submit(self._start(config)).result(START_S)
        except BaseException:
            self._work.close()
            self._remove_socket()
            raise

    def refuse(self, event: Event, error: Exception) -> None:
        """The rules did not take an event of this server. Called on the control loop."""
        self._bridge.refuse(event, error)

    # -- in the admin thread

    async def _start(self, config: ServerConfig) -> None:
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_RPCS)
        server.add_generic_rpc_handlers((_Handlers(self._handlers),))
        if self.socket is not None:
            previous = os.umask(0o177)
            try:
                server.add_insecure_port(f"unix:{self.socket}")
            except RuntimeError as error:
                raise ConfigurationError(
                    "control_socket", str(self.socket), "a path where a socket can be created"
                ) from error
            finally:
                os.umask(previous)
        if config.control:
            address = parse_address(config.control)
            files = CertificateFiles(Path(config.certificate), Path(config.key), Path(config.ca))
            try:
                port = server.add_secure_port(str(address), _Credentials(files).credentials)
            except RuntimeError as error:
                raise ConfigurationError(
                    "control", config.control, "an address of this machine that is free"
                ) from error
            self.address = Address(address.host, port)
        await server.start()
        self._server = server
        if config.metrics:
            self._watching = asyncio.create_task(self.page.watch())

    def gauges(self) -> list[Level]:
        """Gauges for the metrics page."""
        return [
            Level(CALLS, (), self._calls.under_way),
            Level(CALL_BYTES, (), self._calls.kept_bytes),
            Level(REFUSED_CALLS, (), self._calls.refused),
            *self._scheduling.gauges(),
        ]

    # -- the end

    async def account_read(self) -> None:
        """Wait until the caller that let this node drain has read its account, if it wants to; at most
        `ACCOUNT_S`."""
        if self._admin.awaited:
            reading = self._thread.submit(self._admin.account_read.wait())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(reading), ACCOUNT_S)

    async def close(self) -> None:
        """End all calls, and close the ports."""
        if self._server is not None:
            stopping = self._thread.submit(self._server.stop(GOODBYE_S))
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(asyncio.wrap_future(stopping), 4 * GOODBYE_S)
        self._work.close()
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self.socket is not None:
            self.socket.unlink(missing_ok=True)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method; None for one that this daemon does not have."""
        return self._handlers.get(handler_call_details.method)


class _Credentials:
    """The certificate of the server, read again when its files change."""

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._seen: list[tuple[int, int]] = []
        # gRPC asks in a thread of its own for each new connection.
        self._lock = threading.Lock()
        first = self._read()
        assert first is not None
        # The stubs of gRPC do not know that a fetcher may return None.
        fetch: Any = self._read
        self.credentials = grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)

    def _read(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificate, if its files have changed; None leaves the former one in use."""
        try:
            with self._lock:
                states = [(each.stat().st_ino, each.stat().st_mtime_ns) for each in self._files]
                if states == self._seen:
                    return None
                certificate, key, ca = (each.read_bytes() for each in self._files)
                self._seen = states
        except OSError as error:
            log.error("the former certificates stay in use for the control plane: %s", error)
            return None
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)
