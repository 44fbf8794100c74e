"""A collector, daemons that send it spans, and what a tree of spans must be."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.robustness.live import daemons
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.collector import Collector, Span, tree

DELAY = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
"""Spans are sent at once."""


@contextlib.contextmanager
def traced_daemons(count: int, collector: str, **settings: str) -> Iterator[Cluster]:
    """Daemons that send spans to this URL soon."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in DELAY.items():
            patch.setenv(name, value)
        with daemons(count, otlp=collector, **settings) as cluster:
            yield cluster


class Caller:
    """The span of a client of the engine: the root of a trace."""

    def __init__(self) -> None:
        self.trace, self.span = os.urandom(16).hex(), os.urandom(8).hex()

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.span}-01"

    def wait(self, collector: Collector, **names: int) -> list[Span]:
        """The spans of the trace, once there are so many of each name (without the prefix); checks that they are one
        tree."""

        def there(spans: list[Span]) -> bool:
            counted = Counter(span.name.removeprefix("tokenlake.") for span in spans if span.trace == self.trace)
            return all(counted[name] >= count for name, count in names.items())

        spans = [span for span in collector.wait_for(there, str(names)) if span.trace == self.trace]
        check_tree(spans, self.span)
        return spans


def check_tree(spans: list[Span], root: str) -> None:
    """Each span has its parent among the others, or the root; it begins after its parent, and ends before it where both
    are of one process. The end of a send is noted by its thread, which may be later than the receiver."""
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    shown = tree(spans, root)
    for span in spans:
        assert span.begin_ns <= span.end_ns, shown
        if span.parent == root:
            continue
        parent = by_id[span.parent]
        assert parent.begin_ns <= span.begin_ns, shown
        if parent.node == span.node:
            assert span.end_ns <= parent.end_ns, shown
        elif parent.node:
            assert (parent.kind, span.kind) == ("client", "server"), shown


def named(spans: list[Span], name: str) -> list[Span]:
    """The spans of this name, without the prefix, in the order of their begin."""
    return sorted((each for each in spans if each.name == f"tokenlake.{name}"), key=lambda each: each.begin_ns)
