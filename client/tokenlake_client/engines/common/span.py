"""Spans of an engine's own process, made by the tracer provider of the program, if it has one. OpenTelemetry is never
imported here: a program without it has no spans, and no cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from tokenlake.trace import parse_traceparent


class EngineSpan:
    """The span of a request in the engine's process."""

    def __init__(self, traceparent: str | None, span: Any = None) -> None:
        self._span = span
        self.traceparent = traceparent
        """The span as a header `traceparent`, below which those of daemons lie: that of the caller where the program
        makes no spans; None: the request is not traced."""

    def note(self, attributes: Mapping[str, int]) -> None:
        """Add attributes, whose names get the prefix `tokenlake.`."""
        if self._span is not None:
            for name, value in attributes.items():
                self._span.set_attribute(f"tokenlake.{name}", value)


@contextmanager
def engine_span(name: str, traceparent: str | None) -> Iterator[EngineSpan]:
    """A span until the block is left, and the present one of the thread meanwhile. `traceparent`: the span of the
    caller; None: the present span of the thread. Errors of the block pass, and are recorded."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        yield EngineSpan(traceparent)
        return
    with _started(api, name, traceparent) as span:
        found = span.get_span_context()
        if not span.is_recording():
            own = traceparent
            if own is None and found.is_valid:
                own = _header(found)
            yield EngineSpan(own)
            return
        yield EngineSpan(_header(found), span)


def _started(api: Any, name: str, traceparent: str | None) -> Any:
    """A context manager with a new span below that of the caller."""
    try:
        context = None
        if traceparent is not None:
            parent = parse_traceparent(traceparent)
            if not parent:
                return nullcontext(api.INVALID_SPAN)
            trace, span = int.from_bytes(parent[:16]), int.from_bytes(parent[16:24])
            above = api.SpanContext(trace, span, is_remote=True, trace_flags=api.TraceFlags(parent[24]))
            context = api.set_span_in_context(api.NonRecordingSpan(above))
        elif not api.get_current_span().get_span_context().trace_flags & 1:
            # No sampled trace: the provider would begin one.
            return nullcontext(api.INVALID_SPAN)
        return api.get_tracer("tokenlake").start_as_current_span(name, context)
    except Exception:
        # A provider that fails costs its span, and never a request.
        return nullcontext(api.INVALID_SPAN)


def _header(found: Any) -> str:
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags) & 0xFF:02x}"
