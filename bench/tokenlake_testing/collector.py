"""A stand-in for an OpenTelemetry collector: it takes spans as OTLP over HTTP and keeps them."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

WAIT_S = 60.0
KINDS = {SpanMessage.SPAN_KIND_CLIENT: "client", SpanMessage.SPAN_KIND_SERVER: "server"}


class Span(NamedTuple):
    """One span that arrived."""

    name: str
    kind: str
    """`client`, `server` or `internal`."""
    node: str
    """The node whose daemon sent it; empty for other programs."""
    trace: str
    id: str
    parent: str
    begin_ns: int
    end_ns: int
    error: str
    """The text of its status; empty for a success."""
    attributes: dict[str, str | int | bool]

    @property
    def outcome(self) -> str:
        return str(self.attributes.get("tokenlake.outcome", ""))


class Collector:
    """Listens on loopback in a thread until its `with` block is left."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        """All bytes of the spans, for searches."""
        taking = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                taking._take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait_for(self, found: Callable[[list[Span]], bool], what: str) -> list[Span]:
        """The spans so far, once `found` says that they are all there."""
        until = time.monotonic() + WAIT_S
        with self._changed:
            while not found(self.spans):
                if time.monotonic() > until:
                    raise TimeoutError(f"{what} did not arrive; there are {[span.name for span in self.spans]}")
                self._changed.wait(0.2)
            return list(self.spans)

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        spans = list(_spans(ExportTraceServiceRequest.FromString(body)))
        with self._changed:
            self.raw += body
            self.spans += spans
            self._changed.notify_all()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for of_program in request.resource_spans:
        resource = {each.key: each.value.string_value for each in of_program.resource.attributes}
        node = resource["service.instance.id"] if resource.get("service.name") == "tokenlake" else ""
        for scope in of_program.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    KINDS.get(span.kind, "internal"),
                    node,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.message,
                    {each.key: _value(each.value) for each in span.attributes},
                )


def _value(value: object) -> str | int | bool:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]
    found: str | int | bool = getattr(value, kind)
    return found


def tree(spans: list[Span], parent: str = "", depth: int = 0) -> str:
    """The spans as text, those below `parent` indented, in the order of their begin."""
    lines = ""
    for span in sorted((each for each in spans if each.parent == parent), key=lambda each: each.begin_ns):
        shown = " ".join(f"{name.removeprefix('tokenlake.')}={value}" for name, value in span.attributes.items())
        millis = (span.end_ns - span.begin_ns) / 1e6
        lines += f"{'  ' * depth}{span.name} {span.kind} {span.node} {millis:.2f} ms {shown} {span.error}\n"
        lines += tree(spans, span.id, depth + 1)
    return lines
