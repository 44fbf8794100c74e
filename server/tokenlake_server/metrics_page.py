"""The pages /metrics (for Prometheus), /health and /ready, and the page for browsers, over HTTP. They only read.

`/health` reports that the daemon works, with the state of its membership and its peers; `/ready` reports that the node
is a member of its cluster. A node that lost its membership is healthy: a restart would discard its cache.

Counters and histograms are declared beside the code that counts (`tokenlake.metrics`). Gauges are read from the state
of the rules on the control loop, all at one moment, when a page is requested.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import itertools
import json
import logging
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from tokenlake.config import Address
from tokenlake.core import NodeCore
from tokenlake.identity import TenantId
from tokenlake.memory import Kind
from tokenlake.metrics import BOUNDS_S, Level, Metric
from tokenlake.wire import supervision
from tokenlake_server.cold.state import ColdState
from tokenlake_server.disk.device import DeviceState
from tokenlake_server.engines.contents import StreamState
from tokenlake_server.engines.query_engine import QueryEngine
from tokenlake_server.membership import MembershipState
from tokenlake_server.page.http import PATHS, PageServer
from tokenlake_server.peers.states import PEER_STATES, PeerState
from tokenlake_server.start.start_errors import address_error
from tokenlake_server.version import VERSION

log = logging.getLogger(__name__)

SNAPSHOT_S = 2.0
"""Seconds: when the control loop takes longer than this to take a snapshot, the daemon reports itself as unhealthy."""
LATE = f"the control loop did not answer within {SNAPSHOT_S:.0f} s"
REQUEST_S = 10.0
"""Seconds after which a connection without a whole request is closed, so that it frees its thread."""
MAX_THREADS = 32
"""Limit of the requests for pages that are served at the same time; further connections are closed without a reply."""


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"tokenlake_{name}", help, *labels, kind="gauge")


NODE = _gauge(
    "node_info", "1. `peer`: the name of this node, as `tokenlake_peer_state` of others has it", "peer", "version"
)
STARTED = _gauge("start_time_seconds", "Time of the daemon's start, in seconds since 1970")
ENGINES = _gauge("engines", "Engines (sessions) that are connected, or of which a process may still access the arena")
PROCESSES = _gauge("processes", "Processes of these engines, such as a scheduler and ranks: one connection each")
PEERS_CONNECTED = _gauge("peers_connected", "Other nodes that are connected")
PEER_STATE = _gauge(
    "peer_state",
    "1 for the state of a peer, which is `connected`, `refused`, `unreachable` or `other ring`; 0 for the others",
    "peer",
    "state",
)
KNOWN = _gauge("membership_known", "1 while this node is a member of its cluster")
PROBLEM = _gauge("membership_problem", "1 while the members cannot be read, or not be followed")
ABSENT = _gauge("members_absent", "Members whose daemons are not registered in etcd")
EPOCH = _gauge("ring_epoch", "Epoch of the ring record that this node knows; equal on all nodes within a second")
CERTIFICATE_BEGIN = _gauge("certificate_begin_seconds", "Begin of the certificate's validity, in seconds since 1970")
CERTIFICATE_END = _gauge("certificate_end_seconds", "End of the certificate's validity, in seconds since 1970")
MEMORY = _gauge("memory_bytes", "Memory of this node for segments")
SPARE = _gauge("spare_bytes", "Memory that no tenant has")
UNUSABLE = _gauge("unusable_bytes", "Memory that can hold no segment: rests of regions, and what is left beside them")
UNPREPARED = _gauge("unprepared_bytes", "Memory that has not been allocated yet since the start of the daemon")
FREE = _gauge("free_share", "Share of this node's memory that holds no segment, 0 to 1")
VICTIM_AGE = _gauge(
    "victim_age_seconds",
    "Seconds since the last access of the primary copy that would be evicted next: the time for which memory keeps "
    "segments without an access, once it is full",
)
QUOTA = _gauge("quota_bytes", "Memory that the tenant may have at most", "tenant")
TAKEN = _gauge("taken_bytes", "Memory of the regions that the tenant has", "tenant")
USED = _gauge("used_bytes", "Memory of the tenant's slots that hold a segment, or are in quarantine", "tenant")
REGIONS = _gauge("regions", "Regions of a tenant and slot size", "tenant", "slot_bytes")
SLOTS = _gauge("slots", "Slots of a tenant and slot size", "tenant", "slot_bytes")
FREE_SLOTS = _gauge("free_slots", "Slots that hold no segment", "tenant", "slot_bytes")
QUARANTINED = _gauge(
    "quarantined_slots", "Slots without a segment that a process may still access", "tenant", "slot_bytes"
)
SEGMENTS = _gauge(
    "segments", "Segments by kind: `dirty` (being written), `cached`, `primary`", "tenant", "slot_bytes", "kind"
)
MAP_ENTRIES = _gauge(
    "map_entries",
    "Entries of each map in the state of the rules (`sessions`, `leases`, `directory` and others); one that only grows "
    "is a leak",
    "map",
)
_QUERY_ENGINE = {
    name: _gauge(f"query_engine_{name}", help)
    for name, help in {
        "starts": "Processes of the query engine that were started",
        "ready": "1 while the query engine serves",
        "connections": "Connections of engines and of other query engines",
        "views": "Views that are open: sequences of segments that engines send queries to",
        "answers": "Queries of engines that were answered, one per step and layer",
        "lost_parts": "Parts of the answers to engines that were LOST",
        "results": "Answers that were sent to other query engines",
        "result_bytes": "Bytes of partial attention in the answers to other query engines",
        "result_seconds": "Seconds in which attention for other query engines was computed. The time of a batch is "
        "divided among its requests by queries times segments",
        "late_results": "Answers of other query engines that arrived too late",
    }.items()
}


class PoolState(NamedTuple):
    """The slots of one size of a tenant."""

    tenant: str
    slot_bytes: int
    regions: int
    slots: int
    free_slots: int
    quarantined_slots: int
    segments: dict[Kind, int]

    def plain(self) -> dict[str, Any]:
        """The fields by name, as the control plane has them."""
        return {**self._asdict(), "segments": {kind.name.lower(): count for kind, count in self.segments.items()}}


class Snapshot:
    """All counters, histograms and gauges of the daemon at one moment. Made on the control loop."""

    def __init__(
        self,
        core: NodeCore,
        engines: int,
        processes: int,
        peers: Mapping[str, PeerState],
        membership: MembershipState,
        query_engine: QueryEngine | None,
        disks: Sequence[DeviceState] = (),
        unproven: Mapping[str, PeerState] = MappingProxyType({}),
    ) -> None:
        """`unproven`: see `Members.unproven`."""
        self.peers = peers
        self.unproven = unproven
        self.membership = membership
        self.disks = disks
        """The devices of the disk tier, by number."""
        self.cold: ColdState | None = None
        """The cold tier; None without one."""
        self.streams: Sequence[StreamState] = ()
        """The streams of KV events."""
        self.disk_usage = core.disk_usage()
        self.engines = engines
        self.processes = processes
        regions = core.store.regions
        self.spare_bytes = regions.free
        self.unusable_bytes = core.store.unusable()
        self.pools = [
            PoolState(
                pool.tenant,
                pool.slot_bytes,
                len(pool.regions),
                pool.slots,
                len(pool.free),
                pool.quarantined,
                {kind: pool.counts[kind] for kind in Kind},
            )
            for pool in core.store.pools()
        ]
        self.counters = {metric: core.counters[metric] for metric in Metric.all()}
        """The value of each counter: with labels, the sum over all values of the labels."""
        self.labelled = {metric: core.counters.by_labels(metric) for metric in Metric.all() if metric.labels}
        histograms = ((metric, core.counters.histogram(metric)) for metric in Metric.all("histogram"))
        self.histograms = {metric: (tuple(each.counts), each.total_s) for metric, each in histograms}
        """The durations of each histogram by bucket, and their sum in seconds."""
        connected = sum(each.state in ("connected", "other ring") for each in peers.values())
        vacancy = core.vacancy()
        self.gauges = [
            Level(NODE, (core.config.node, VERSION), 1),
            Level(ENGINES, (), engines),
            Level(PROCESSES, (), processes),
            Level(PEERS_CONNECTED, (), connected),
            Level(MEMORY, (), regions.total),
            Level(SPARE, (), self.spare_bytes),
            Level(UNUSABLE, (), self.unusable_bytes),
            Level(FREE, (), vacancy.free_share),
            Level(VICTIM_AGE, (), vacancy.victim_age_s),
            Level(KNOWN, (), membership.known),
            Level(PROBLEM, (), bool(membership.problem)),
            Level(ABSENT, (), len(membership.absent)),
            Level(EPOCH, (), membership.epoch),
        ]
        for name, peer in peers.items():
            self.gauges += (Level(PEER_STATE, (name, state), peer.state == state) for state in PEER_STATES)
        self.gauges += (Level(MAP_ENTRIES, (name,), entries) for name, entries in core.census().items())
        if query_engine is not None:
            self._add_query_engine(query_engine)
        named = dict.fromkeys([*core.config.quotas, *(pool.tenant for pool in self.pools)])
        self.tenants = [(name, regions.quota(name), regions.taken(name)) for name in map(TenantId, named)]
        """Each tenant, with the bytes that it may have at most and those that it has."""

    def levels(self) -> Iterator[Level]:
        """All gauges. Those of tenants, which may be many, are made here, and not on the control loop."""
        yield from self.gauges
        used: Counter[str] = Counter()
        for pool in self.pools:
            used[pool.tenant] += (sum(pool.segments.values()) + pool.quarantined_slots) * pool.slot_bytes
        for tenant, quota, taken in self.tenants:
            yield Level(QUOTA, (tenant,), quota)
            yield Level(TAKEN, (tenant,), taken)
            yield Level(USED, (tenant,), used[tenant])
        for pool in self.pools:
            yield from _levels(pool)

    def _add_query_engine(self, engine: QueryEngine) -> None:
        report = engine.report or supervision.Report(0, 0, 0, 0, 0, 0, 0, 0)
        values: dict[str, float] = {"starts": engine.starts, "ready": engine.ready, **msgspec.structs.asdict(report)}
        values["result_seconds"] = values.pop("result_ns") / 1e9
        self.gauges += (Level(_QUERY_ENGINE[name], (), value) for name, value in values.items())


def _levels(pool: PoolState) -> Iterator[Level]:
    at = pool.tenant, str(pool.slot_bytes)
    yield Level(REGIONS, at, pool.regions)
    yield Level(SLOTS, at, pool.slots)
    yield Level(FREE_SLOTS, at, pool.free_slots)
    yield Level(QUARANTINED, at, pool.quarantined_slots)
    for kind in Kind:
        yield Level(SEGMENTS, (*at, kind.name.lower()), pool.segments[kind])


class _Collector:
    def __init__(self, take: Callable[[], Snapshot], aliases: Mapping[str, str]) -> None:
        """`aliases`: the names that are shown in place of tenants' names."""
        self._take = take
        self._aliases = aliases

    def _shown(self, metric: Metric, values: Sequence[str]) -> list[str]:
        """The values of the metric's labels, with an alias in place of a tenant's name."""
        return [
            self._aliases.get(value, "other") if label == "tenant" and self._aliases else value
            for label, value in zip(metric.labels, values, strict=True)
        ]

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        snapshot = self._take()
        for metric, value in snapshot.counters.items():
            family = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            for values, count in snapshot.labelled[metric].items() if metric.labels else [((), value)]:
                family.add_metric(self._shown(metric, values), count)
            yield family
        for metric, (counts, total_s) in snapshot.histograms.items():
            bounds = [*map(str, BOUNDS_S), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
            yield HistogramMetricFamily(metric.name, metric.help, buckets=buckets, sum_value=total_s)
        gauges: dict[Metric, Any] = {}
        for metric, values, level in snapshot.levels():
            if metric not in gauges:
                gauges[metric] = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            gauges[metric].add_metric(self._shown(metric, values), level)
        yield from gauges.values()


class MetricsServer:
    """Serves the pages, with a thread per request."""

    def __init__(
        self,
        address: Address,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[], Snapshot],
        node: str,
        aliases: Mapping[str, str],
    ) -> None:
        """`aliases`: the names that are shown in place of tenants' names; empty to show these."""
        self._loop = loop
        self._take_now = take
        self._node = node
        self.page = PageServer()
        """The page for browsers."""
        registry = CollectorRegistry()
        registry.register(_Collector(self.take, aliases))
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(address.host, address.port, self._serve, _server_of(address), _Quiet)
        except OSError as error:
            raise address_error("metrics", address, error) from error
        self.address = Address(address.host, self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def take(self) -> Snapshot:
        """All counters and gauges at one moment, for any thread except the loop's. Raises TimeoutError when the control
        loop does not answer within `SNAPSHOT_S`."""

        async def on_loop() -> Snapshot:
            return self._take_now()

        waiting: concurrent.futures.Future[Snapshot] = asyncio.run_coroutine_threadsafe(on_loop(), self._loop)
        return waiting.result(timeout=SNAPSHOT_S)

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO") or "/"
        status, body = "", dict[str, object]()
        headers = [("Content-Type", "application/json")]
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", {"error": "the pages can only be read"}
            headers.append(("Allow", "GET, HEAD"))
        elif path == "/metrics":
            try:
                return self._metrics(environ, start_response)  # type: ignore[no-any-return]
            except TimeoutError:
                # The snapshot is taken before `start_response` is called.
                status, body = "503 Service Unavailable", {"error": LATE}
        elif path in PATHS:
            return self.page.serve(environ, start_response)
        elif path == "/health":
            status, body = self._answer(self._health)
        elif path == "/ready":
            status, body = self._answer(self._ready)
        else:
            status, body = "404 Not Found", {"error": "unknown page; expected /, /metrics, /health or /ready"}
        start_response(status, headers)
        return [json.dumps(body).encode() + b"\n"]

    def _answer(self, describe: Callable[[Snapshot], tuple[bool, dict[str, object]]]) -> tuple[str, dict[str, object]]:
        try:
            good, body = describe(self.take())
        except TimeoutError:
            good, body = False, {"healthy": False, "reason": LATE}
        return "200 OK" if good else "503 Service Unavailable", {"node": self._node, **body}

    def _health(self, snapshot: Snapshot) -> tuple[bool, dict[str, object]]:
        gauges = {metric.name: value for metric, values, value in snapshot.gauges if not values}
        peers, unproven = self._described(snapshot.peers), self._described(snapshot.unproven)
        membership = msgspec.to_builtins(snapshot.membership)
        disks = [each._asdict() for each in snapshot.disks]
        body = {"healthy": True, **gauges, "membership": membership, "peers": peers, "unproven": unproven}
        cold = {} if snapshot.cold is None else {"cold": snapshot.cold._asdict()}
        return True, {**body, "disks": disks, **cold}

    def _described(self, peers: Mapping[str, PeerState]) -> dict[str, object]:
        now = self._loop.time()
        return {
            name: {"state": state, "for_s": round(now - since, 1)} | ({"reason": reason} if reason else {})
            for name, (state, reason, since) in peers.items()
        }

    def _ready(self, snapshot: Snapshot) -> tuple[bool, dict[str, object]]:
        if snapshot.membership.known:
            return True, {"ready": True}
        return False, {"ready": False, "reason": f"it serves its engines alone: {snapshot.membership.problem}"}

    def close(self) -> None:
        """Stop serving the pages and close the port."""
        # Wakes the serving thread. Otherwise it sees `shutdown` only at its next poll, up to 0.5 s later.
        self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """The HTTP server of the pages, which serves at most `MAX_THREADS` requests at the same time."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._room = threading.BoundedSemaphore(MAX_THREADS)
        super().__init__(*args)

    def server_bind(self) -> None:
        """Bind as `TCPServer` does. The method of `HTTPServer` would also ask a name server for the name of this
        machine."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started, because of a limit of the machine: the thread that accepts serves this request.
            self.process_request_thread(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


def _server_of(address: Address) -> type[_Server]:
    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET

    return Server


class _Until(io.RawIOBase):
    """The bytes that a socket receives before a deadline. A read after it raises TimeoutError."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._sock.recv_into(buffer)


class _Reply(io.BufferedIOBase):
    """Sends a reply whose reader takes it within some seconds from the first byte on. Otherwise a write raises
    ConnectionAbortedError, which ends the request: it would hold its thread for as long as the reader likes."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._seconds = seconds
        self._until = 0.0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        now = time.monotonic()
        self._until = self._until or now + self._seconds
        try:
            if now >= self._until:
                raise TimeoutError
            self._sock.settimeout(self._until - now)
            self._sock.sendall(data)
        except TimeoutError:
            raise ConnectionAbortedError from None
        return len(data)


class _Quiet(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Until(self.connection, REQUEST_S))
        self.wfile = _Reply(self.connection, REQUEST_S)

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
