"""The spans under way, each with the table in which the end of its work finds it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from tokenlake.core.engines.sessions import Session
from tokenlake.core.report.account import Account
from tokenlake_server.tracing.export import Export

MAX_OPEN = 8192
"""Limit of the spans under way: those of leases and writes end with their engines."""
Attributes = Mapping[str, str | int | bool]
Table = dict[Any, "Work"]


class Work:
    """One span under way."""

    __slots__ = (
        "_span",
        "account",
        "children",
        "committed",
        "context",
        "key",
        "left",
        "of",
        "parent",
        "request",
        "session",
        "slot_bytes",
        "table",
        "tenant",
    )

    def __init__(self, span: Span, context: bytes, parent: bytes, table: Table, key: Any) -> None:
        self._span = span
        self.context = context
        """The context of this span, for messages."""
        self.parent = parent
        """The context below which the span lies; empty for the first span of a trace."""
        self.table = table
        self.key = key
        self.children: dict[Work, None] = {}
        """Spans below this one that cannot outlast it."""
        self.of: Work | None = None
        """The span among whose `children` this one is."""
        self.tenant = self.request = ""
        self.session: Session | None = None
        """Of a lease or a write: the session that holds it."""
        self.account: Account | None = None
        """Of a lease: the tokens of its match."""
        self.slot_bytes = 0
        """Of a transfer: the bytes of a segment."""
        self.left = self.committed = 0
        """Of a write: the numbers of segments that are reserved, and that were committed."""

    def note(self, attributes: Attributes) -> None:
        """Add attributes, whose names get the prefix `tokenlake.`."""
        for name, value in attributes.items():
            self._span.set_attribute(f"tokenlake.{name}", value)

    def end(self, error: str) -> None:
        """End the span. `error`: the outcome of a failure; empty for a success."""
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Works:
    """Begins and ends spans. Used on the control loop only."""

    def __init__(self, export: Export, node: str) -> None:
        self._export = export
        self._node = node
        self._open: dict[Work, None] = {}
        self._by_name: dict[tuple[str, str], Work] = {}
        """By tenant and name: the newest request of an engine that is not answered."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        name: str,
        kind: SpanKind,
        parent: bytes,
        table: Table,
        key: Hashable,
        attributes: Attributes,
        *,
        of: Work | None = None,
    ) -> Work | None:
        """Begin a span that is found in `table` by `key` until it ends. `parent`: the context below which it lies;
        empty: it is the first one of a trace. `of`: the span of this node that it cannot outlast. Returns None where
        the sampler does not want it."""
        if len(self._open) >= MAX_OPEN:
            # Works whose end never came, such as those of a write that expired.
            self.end(next(iter(self._open)), {}, "unfinished")
        span = self._export.tracer.start_span(f"tokenlake.{name}", _context(parent, remote=of is None), kind)
        if not span.is_recording():
            return None
        own = span.get_span_context()
        context = own.trace_id.to_bytes(16) + own.span_id.to_bytes(8) + bytes([own.trace_flags])
        work = Work(span, context, parent, table, key)
        if of is not None:
            work.of, work.tenant, work.request = of, of.tenant, of.request
            of.children[work] = None
        work.note({"node": self._node, **attributes})
        if (earlier := table.get(key)) is not None:
            self.end(earlier, {}, "unfinished")
        table[key] = work
        self._open[work] = None
        return work

    def belongs(self, work: Work, tenant: str, request: str) -> None:
        """Note to which request a span belongs."""
        work.tenant, work.request = tenant, request
        work.note({"tenant": tenant, "request": request})

    def name(self, work: Work) -> None:
        """Let `named` find a request of an engine until it is answered."""
        if work.request:
            self._by_name[work.tenant, work.request] = work

    def named(self, tenant: str, request: str) -> Work | None:
        """The newest request of an engine of this tenant and name that is not answered."""
        return self._by_name.get((tenant, request))

    def answered(self, work: Work) -> None:
        """A request of an engine is answered: `named` does not find it any more."""
        if self._by_name.get((work.tenant, work.request)) is work:
            del self._by_name[work.tenant, work.request]

    def move(self, work: Work, table: Table, key: Hashable) -> None:
        """Let the end of the work be found in another table."""
        work.table.pop(work.key, None)
        if (earlier := table.get(key)) is not None:
            self.end(earlier, {}, "unfinished")
        work.table, work.key = table, key
        table[key] = work

    def end(self, work: Work, attributes: Attributes, error: str = "") -> None:
        """End a span, and before it those below it that have not ended: they got no answer. `error`: the outcome of a
        failure; empty for a success."""
        for child in list(work.children):
            self.end(child, {"outcome": "unanswered"}, "unanswered")
        self.answered(work)
        if work.of is not None:
            work.of.children.pop(work, None)
        work.table.pop(work.key, None)
        del self._open[work]
        work.note(attributes)
        work.end(error)


def _context(parent: bytes, *, remote: bool) -> Context:
    """The context of the SDK for a context of a message."""
    if not parent:
        return Context()
    trace, span = int.from_bytes(parent[:16]), int.from_bytes(parent[16:24])
    above = SpanContext(trace, span, is_remote=remote, trace_flags=TraceFlags(parent[24]))
    return set_span_in_context(NonRecordingSpan(above), Context())
