"""Query engines and daemons that die or freeze between the layers of a step: answers stay right, or are LOST within the
deadline, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.query.scene import (
    DEADLINE_S,
    LAYOUT,
    Text,
    close_to,
    draw_queries,
    engine_of,
    freeze,
    open_view,
    serving,
    spread,
    wait_serving,
)
from tests.robustness.live import wait_until
from tokenlake.attention import Partial
from tokenlake_client import Pool
from tokenlake_client.queries import GRACE_S, QueryBuffer
from tokenlake_testing.cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.live

LATE_S = 2.0
"""A process that gets no turn on a busy machine may be this late; a hang is longer."""
STEP_S = 1.0
"""Deadline of a query in these tests."""


class Step:
    """Queries of one view, asked about again and again."""

    def __init__(self, pool: Pool, text: Text, buffer: QueryBuffer) -> None:
        self.pool = pool
        self.text = text
        self.buffer = buffer
        self.asked = 0

    def ask(self) -> bool:
        """One query, compared; False when it is LOST."""
        self.asked += 1
        layer = self.asked % LAYOUT.layers
        self.buffer.queries[...] = draw_queries(self.asked, len(self.buffer.queries))
        began = time.monotonic()
        answer = self.pool.query(self.buffer, layer, deadline_s=STEP_S).wait()
        assert time.monotonic() - began < STEP_S + GRACE_S + LATE_S
        if answer.lost:
            return False
        close_to(Partial(answer.output, answer.sums), self.text.attention(self.buffer.queries, layer), 1e-5)
        return True


@contextlib.contextmanager
def step(pool: Pool, text: Text, tokens: int = 3) -> Iterator[Step]:
    with open_view(pool, text) as view, pool.init_query([(view, tokens)]) as buffer:
        yield Step(pool, text, buffer)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(3) as cluster:
        yield cluster


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", [kill, freeze])
def test_without_its_query_engine_a_node_still_gives_its_segments(cluster: Cluster, end: Callable[[int], None]) -> None:
    """They are brought here, and attended to here from then on."""
    text = Text(20, 16)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, step(pool, text) as asking:
        assert asking.ask()
        victim = engine_of(cluster.nodes[2])
        end(victim)
        try:
            # The daemon of this node may take longer to bring them than one query may take.
            wait_until(asking.ask, "its segments are here")
            for _ in range(10):
                assert asking.ask()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)


def test_a_late_result_changes_nothing(cluster: Cluster) -> None:
    """A query engine wakes up and answers what nobody waits for any more, and is asked again by later views."""
    texts = [Text(21, 16), Text(22, 16)]
    spread(cluster, texts)
    with cluster.connect(0, LAYOUT) as pool, step(pool, texts[0]) as first, step(pool, texts[1], 5) as second:
        assert first.ask()
        assert second.ask()
        victim = engine_of(cluster.nodes[2])
        freeze(victim)
        wait_until(first.ask, "the frozen one's segments are here")
        os.kill(victim, signal.SIGCONT)
        for _ in range(50):
            assert first.ask()
            assert second.ask()
        with step(pool, texts[1]) as third:
            assert third.ask()


@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_a_daemon_that_goes_costs_answers_but_never_makes_them_wrong(cluster: Cluster, end: str) -> None:
    text, other = Text(23, 16), Text(24, 3)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, step(pool, text) as asking:
        other.store(pool)
        assert asking.ask()
        node = cluster.nodes[2]
        query_engine = engine_of(node)
        getattr(node, end)()
        if end == "freeze":
            # Its query engine goes on answering from its memory.
            assert asking.ask()
            kill(query_engine)
        # What only it had is lost, or was brought here before it went.
        outcomes = [asking.ask() for _ in range(10)]
        assert outcomes == sorted(outcomes, reverse=True), "what was lost is not found again"
        with step(pool, other) as elsewhere:
            assert elsewhere.ask()


def test_the_query_engine_of_this_node_dies_and_another_takes_its_place(cluster: Cluster) -> None:
    text = Text(25, 16)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool:
        with step(pool, text) as asking:
            assert asking.ask()
            dead = engine_of(cluster.nodes[0])
            kill(dead)
            assert not asking.ask()
        wait_serving(cluster, 0, other_than=dead)
        with step(pool, text) as asking:
            assert asking.ask()


def test_a_frozen_query_engine_of_this_node_costs_one_deadline(cluster: Cluster) -> None:
    text = Text(26, 16)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, step(pool, text) as asking:
        assert asking.ask()
        frozen = engine_of(cluster.nodes[0])
        freeze(frozen)
        try:
            assert not asking.ask()
        finally:
            os.kill(frozen, signal.SIGCONT)
        with step(pool, text) as again:
            wait_until(again.ask, "it answers again")
            assert again.ask()


def test_a_deadline_that_nobody_can_keep_is_answered_all_the_same(cluster: Cluster) -> None:
    text = Text(27, 16)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, open_view(pool, text) as view:
        with pool.init_query([(view, 512)]) as buffer:
            buffer.queries[...] = draw_queries(0, 512)
            ticket = pool.query(buffer, 0, deadline_s=1e-5)
            answer = ticket.wait()
            assert answer.lost == [0]
        with pool.init_query([(view, 2)]) as buffer:
            buffer.queries[...] = draw_queries(1, 2)
            answer = pool.query(buffer, 0, deadline_s=DEADLINE_S).wait()
            assert not answer.lost
            close_to(Partial(answer.output, answer.sums), text.attention(buffer.queries, 0), 1e-5)
