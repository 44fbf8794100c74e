"""Query engines and daemons die or freeze between the layers of a step: answers stay right or are LOST within the
deadline, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.query.scene import (
    LAYOUT,
    Text,
    close_to,
    draw_queries,
    engine_of,
    open_view,
    spread,
    wait_serving,
)
from tests.robustness.live import freeze, wait_until
from tokenlake.attention import Partial
from tokenlake_client import Pool
from tokenlake_client.deadlines import DEFAULT_DEADLINES
from tokenlake_client.queries import View
from tokenlake_testing.cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.live

LATE_S = 2.0
"""A process may be this late on a busy machine; a process that hangs is later."""
STEP_S = 4.0
"""Deadline of a query in these tests: long enough for the first query of a process on a busy machine."""


class Step:
    """Queries of one view that are sent repeatedly."""

    def __init__(self, pool: Pool, text: Text, view: View, tokens: int) -> None:
        self.pool = pool
        self.text = text
        self.parts = [(view, tokens)]
        self.buffer = pool.queries.init_query(self.parts)
        self.asked = 0

    def retry(self) -> bool:
        """As `ask`, with a new buffer after a LOST query."""
        if self.buffer.spent:
            self.buffer.close()
            self.buffer = self.pool.queries.init_query(self.parts)
        return self.ask()

    def ask(self) -> bool:
        """Send one query and compare its result; False when it is LOST."""
        self.asked += 1
        layer = self.asked % LAYOUT.layers
        self.buffer.queries[...] = draw_queries(self.asked, len(self.buffer.queries))
        began = time.monotonic()
        answer = self.pool.queries.query(self.buffer, layer, deadline_s=STEP_S).wait()
        assert time.monotonic() - began < STEP_S + DEFAULT_DEADLINES.grace_s + LATE_S
        if answer.lost:
            return False
        close_to(Partial(answer.output, answer.sums), self.text.attention(self.buffer.queries, layer), 1e-5)
        return True


@contextlib.contextmanager
def step(pool: Pool, text: Text, tokens: int = 3) -> Iterator[Step]:
    with open_view(pool, text) as view:
        asking = Step(pool, text, view, tokens)
        try:
            yield asking
        finally:
            asking.buffer.close()


@pytest.fixture(autouse=True)
def restored(cluster: Cluster) -> Iterator[None]:
    """All processes of the cluster serve again after each test."""
    yield
    for node in cluster.nodes:
        if node.running:
            node.thaw()
        else:
            node.start()
    cluster.wait_ready()
    for number in range(len(cluster.nodes)):
        wait_serving(cluster, number)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [kill, freeze])
def test_segments_are_fetched_from_a_dead_query_engine(cluster: Cluster, end: Callable[[int], None]) -> None:
    """The fetched segments are local segments of the view from then on."""
    text = Text(20, 16)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, step(pool, text) as asking:
        assert asking.ask()
        victim = engine_of(cluster.nodes[2])
        end(victim)
        try:
            # Fetching may take longer than one query's deadline.
            wait_until(asking.retry, "its segments are fetched")
            for _ in range(10):
                assert asking.ask()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)


@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_a_lost_daemon_makes_no_answer_wrong(cluster: Cluster, end: str) -> None:
    text, other = Text(23, 16), Text(24, 3)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, step(pool, text) as asking:
        other.store(pool)
        assert asking.ask()
        node = cluster.nodes[2]
        query_engine = engine_of(node)
        getattr(node, end)()
        if end == "freeze":
            # The query engine of this node still answers from its leased segments.
            assert asking.ask()
            kill(query_engine)
        # Segments that only this node had are lost, unless they were fetched before.
        outcomes = [asking.ask() for _ in range(10)]
        assert outcomes == sorted(outcomes, reverse=True), "a lost view is not found again"
        with step(pool, other) as elsewhere:
            assert elsewhere.ask()
