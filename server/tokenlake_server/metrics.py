"""Metrics and health over HTTP on loopback, for Prometheus and for people.

Counters are declared beside the code that counts (`tokenlake.metrics`); gauges are read from the state of the
rules when somebody asks, on the control loop, so that they always add up.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tokenlake.config import Address
from tokenlake.core import NodeCore
from tokenlake.errors import ConfigurationError
from tokenlake.metrics import Metric
from tokenlake.store import Kind
from tokenlake.wire import supervision
from tokenlake_server.query_engine import QueryEngine

__all__ = ["MetricsServer", "Snapshot"]

log = logging.getLogger(__name__)

SNAPSHOT_S = 2.0
"""A loop that does not answer within this is reported as unhealthy."""
MAX_THREADS = 32
"""Requests served at a time."""


class Snapshot:
    """Values of one moment, taken on the control loop."""

    def __init__(self, core: NodeCore, processes: int, peers: list[str], query_engine: QueryEngine | None) -> None:
        self.counters = {metric: core.counters[metric] for metric in Metric.all() if not metric.label}
        self.labelled = {metric: core.counters.by_label(metric) for metric in Metric.all() if metric.label}
        self.gauges: list[tuple[str, str, dict[str, str], float]] = [
            ("tokenlake_processes", "Engines' processes that may look at the arena", {}, processes),
            ("tokenlake_peers_connected", "Other nodes with a connection", {}, len(peers)),
            ("tokenlake_spare_regions", "Regions that belong to no tenant yet", {}, core.store.regions.spare),
        ]
        if query_engine is not None:
            self._of_query_engine(query_engine)
        for name, count in core.hot().items():
            self._gauge(
                "tokenlake_hot_segments",
                "Hot segments: known, of this directory node, copies here",
                {"of": name},
                count,
            )
        for name, entries in core.census().items():
            self._gauge("tokenlake_map_entries", "Entries of each map of the rules", {"map": name}, entries)
        for pool in core.store.pools():
            labels = {"tenant": pool.tenant, "slot_bytes": str(pool.slot_bytes)}
            self._gauge("tokenlake_regions", "Regions", labels, len(pool.regions))
            self._gauge("tokenlake_slots", "Slots", labels, pool.slots)
            self._gauge("tokenlake_free_slots", "Slots that hold nothing", labels, len(pool.free))
            self._gauge("tokenlake_quarantined_slots", "Slots that somebody may still touch", labels, pool.quarantined)
            for kind in Kind:
                at = labels | {"kind": kind.name.lower()}
                self._gauge("tokenlake_segments", "Segments, being written ones included", at, pool.counts[kind])

    def _of_query_engine(self, engine: QueryEngine) -> None:
        report = engine.report or supervision.Report(0, 0, 0, 0, 0, 0)
        values = {"starts": engine.starts, "ready": engine.ready, **msgspec.structs.asdict(report)}
        for name, value in values.items():
            self._gauge(f"tokenlake_query_engine_{name}", "Of the query engine's process", {}, value)

    def _gauge(self, name: str, help: str, labels: dict[str, str], value: float) -> None:
        self.gauges.append((name, help, labels, value))


class _Collector:
    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        snapshot = self._take()
        for metric, value in snapshot.counters.items():
            yield CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, value=value)
        for metric, counted in snapshot.labelled.items():
            labelled = CounterMetricFamily(metric.name.removesuffix("_total"), metric.help, labels=[metric.label])
            for label, value in counted.items():
                labelled.add_metric([label], value)
            yield labelled
        families: dict[str, Any] = {}
        for name, help, labels, level in snapshot.gauges:
            family = families.setdefault(name, GaugeMetricFamily(name, help, labels=list(labels)))
            family.add_metric(list(labels.values()), level)
        yield from families.values()


class MetricsServer:
    """Serves /metrics and /health from threads of its own."""

    def __init__(self, address: Address, loop: asyncio.AbstractEventLoop, take: Callable[[], Snapshot], node: str):
        self._loop = loop
        self._take_now = take
        self._node = node
        registry = CollectorRegistry()
        registry.register(_Collector(self.take))
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(address.host, address.port, self._serve, _Server, _Quiet)
        except OSError as error:
            raise ConfigurationError("metrics", str(address), f"an address that is free ({error.strerror})") from error
        self.address = Address(address.host, self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def take(self) -> Snapshot:
        """From any thread but the loop's. Raises TimeoutError when the loop does not answer."""

        async def on_loop() -> Snapshot:
            return self._take_now()

        waiting: concurrent.futures.Future[Snapshot] = asyncio.run_coroutine_threadsafe(on_loop(), self._loop)
        return waiting.result(timeout=SNAPSHOT_S)

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return self._metrics(environ, start_response)  # type: ignore[no-any-return]
        if path in ("/", "/health"):
            status, body = self._health()
        else:
            status, body = "404 Not Found", {"error": "known pages are /metrics and /health"}
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode() + b"\n"]

    def _health(self) -> tuple[str, dict[str, object]]:
        try:
            snapshot = self.take()
        except (TimeoutError, concurrent.futures.TimeoutError):
            return "503 Service Unavailable", {"node": self._node, "healthy": False, "reason": "control loop is stuck"}
        gauges = {name: value for name, _, labels, value in snapshot.gauges if not labels}
        return "200 OK", {"node": self._node, "healthy": True, **gauges}

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """Beyond `MAX_THREADS` requests at a time, connections are closed unanswered."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._room = threading.BoundedSemaphore(MAX_THREADS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Quiet(WSGIRequestHandler):
    timeout = 10.0
    """Seconds; who connects and asks nothing holds a thread no longer than that."""

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
