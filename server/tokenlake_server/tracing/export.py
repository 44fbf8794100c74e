"""The way of spans to a collector: a bounded queue, a thread of the SDK that sends batches as OTLP over HTTP, and
counts of those that were sent and lost. A collector that does not answer delays nothing but this thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import Tracer

from tokenlake.metrics import Level
from tokenlake_server.tracing import SPANS
from tokenlake_server.version import VERSION

log = logging.getLogger(__name__)

MAX_QUEUED, BATCH = 4096, 128
"""Limit of the spans that wait for the collector, and of those in one request to it."""
END_S = 2.0
"""Seconds for which the end of the daemon waits until the spans that are left are sent."""
ROOTS = "OTEL_TRACES_SAMPLER"
"""The variable that asks for spans of requests without a context of a trace."""
PATH = "/v1/traces"
_SDK_LOG = "opentelemetry"


class Export:
    """Sends spans to one collector until `close`."""

    def __init__(self, collector: str, node: str, cluster: str) -> None:
        """`collector`: its URL, for instance `http://collector:4318`; `PATH` is added. Variables of the SDK
        (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER` and others) apply."""
        own = Resource(
            {
                "service.name": "tokenlake",
                "service.namespace": cluster,
                "service.instance.id": node,
                "service.version": VERSION,
            }
        )
        self.roots = ROOTS in os.environ
        """True: requests without a context of a trace get spans too, as the sampler of the variable says."""
        url = collector if collector.endswith(PATH) else collector.rstrip("/") + PATH
        self._exporter = _Counted(OTLPSpanExporter(endpoint=url), url)
        self._provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()),
            sampler=None if self.roots else ParentBased(ALWAYS_OFF),
            shutdown_on_exit=False,
        )
        self._queue = _Bounded(self._exporter)
        self._provider.add_span_processor(self._queue)
        self.tracer: Tracer = self._provider.get_tracer("tokenlake", VERSION)

    def gauges(self) -> list[Level]:
        """Gauges for the metrics page."""
        counts = {
            "exported": self._exporter.exported,
            "refused": self._exporter.refused,
            "dropped": self._queue.dropped,
        }
        return [Level(SPANS, (outcome,), count) for outcome, count in counts.items()]

    def close(self) -> None:
        """Send the spans that are left, for at most `END_S`. Blocks."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        ending.start()
        ending.join(END_S)
        if ending.is_alive():
            # Ends the pause between two attempts of the exporter, and with it the thread.
            self._exporter.shutdown()


class _Bounded(BatchSpanProcessor):  # type: ignore[misc]  # untyped, as mypy skips it
    """The SDK's queue, which drops new spans and counts them where `MAX_QUEUED` wait; the SDK alone would drop old ones
    without a count."""

    def __init__(self, exporter: _Counted) -> None:
        super().__init__(exporter, max_queue_size=2 * MAX_QUEUED, max_export_batch_size=BATCH)
        self._counted = exporter
        self._ended = 0
        self.dropped = 0

    def on_start(self, span: Span, parent_context: object = None) -> None:
        """Nothing: spans are counted when they end."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, in the control loop."""
        if self._ended - self._counted.taken >= MAX_QUEUED:
            self.dropped += 1
            return
        self._ended += 1
        super().on_end(span)


class _Counted(SpanExporter):  # type: ignore[misc]
    """The exporter of the SDK, with counts, and one line in the log when the collector stops to take spans."""

    def __init__(self, inner: OTLPSpanExporter, url: str) -> None:
        self._inner = inner
        self._url = url
        self._failing = False
        self._reasons = _Reasons()
        self.taken = self.exported = self.refused = 0
        sdk = logging.getLogger(_SDK_LOG)
        # The SDK logs each failure of each batch.
        sdk.propagate = False
        sdk.handlers[:] = [self._reasons]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch, in the thread of the SDK."""
        try:
            result = self._inner.export(spans)
        except Exception as error:
            self._reasons.last = str(error)
            result = SpanExportResult.FAILURE
        self.taken += len(spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            if self._failing:
                log.info("the collector at %s takes spans again", self._url)
        else:
            self.refused += len(spans)
            if not self._failing:
                log.warning(
                    "the collector at %s takes no spans, and they are lost until it does (not logged again): %s",
                    self._url,
                    self._reasons.last,
                )
        self._failing = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._inner.force_flush(timeout_millis))


class _Reasons(logging.Handler):
    """Keeps the last line that the SDK logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = "no reason given"

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()
