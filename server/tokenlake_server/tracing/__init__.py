"""Spans of traced requests for OpenTelemetry, made of the events and instructions of the rules. The modules are
imported only where the setting `otlp` asks for them."""

from tokenlake.metrics import Metric

SPANS = Metric(
    "tokenlake_trace_spans",
    "Spans of traced requests since the start, by outcome: `exported`, `refused` (the collector did not take them) or "
    "`dropped` (the queue was full)",
    "outcome",
    kind="gauge",
)
