"""Attention in place, from the client: memory, tickets, and a query engine that freezes, dies or refuses."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.query.scene import (
    DEADLINE_S,
    HEADS,
    LAYOUT,
    SCALE,
    Text,
    close_to,
    draw_queries,
    engine_of,
    open_view,
    serving,
    spread,
)
from tests.robustness.live import freeze, wait_until
from tokenlake.attention import Partial
from tokenlake.errors import DeadlinePassed, LayoutRefused, LimitReached, TokenLakeError, Unreachable
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.queries import View
from tokenlake_client.query_link import QueryLink
from tokenlake_testing.cluster import Cluster

TOKENS = 3
SHORT_S = 0.2
"""Deadline of queries to a frozen query engine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("torch")
    with serving(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def text(cluster: Cluster) -> Text:
    text = Text(300, 8)
    spread(cluster, [text])
    return text


@pytest.fixture
def pool(cluster: Cluster) -> Iterator[Pool]:
    with cluster.connect(0, LAYOUT) as pool:
        yield pool


def query_memories() -> int:
    """Memories for queries that are mapped into this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:tokenlake-query")


def ask(pool: Pool, text: Text, view: View, tokens: int = TOKENS, seed: int = 0) -> bool:
    """Query every layer once; False when one was LOST. AssertionError when one was wrong."""
    with pool.queries.init_query([(view, tokens)]) as buffer:
        for layer in range(LAYOUT.layers):
            buffer.queries[...] = draw_queries(seed + layer, tokens)
            answer = pool.queries.query(buffer, layer, DEADLINE_S).wait()
            if answer.lost:
                return False
            close_to(Partial(answer.output, answer.sums), text.attention(buffer.queries, layer), 1e-5)
    return True


@pytest.mark.live
def test_memory_is_reused_where_it_is_large_enough(pool: Pool, text: Text) -> None:
    with open_view(pool, text) as view:
        numbers = []
        for tokens in (1, 2, 400, 1, 400):
            with pool.queries.init_query([(view, tokens)]) as buffer:
                numbers.append(buffer.number)
            assert ask(pool, text, view, tokens)
        assert numbers[0] == numbers[1] == numbers[3] != numbers[2] == numbers[4]


@pytest.mark.live
def test_threads_share_one_connection(pool: Pool, text: Text) -> None:
    done: list[bool] = []
    links: set[QueryLink] = set()

    def work(number: int) -> None:
        with open_view(pool, text) as view:
            links.add(view.link)
            done.append(all(ask(pool, text, view, number + 1, 100 * number + turn) for turn in range(10)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4
    assert len(links) == 1


@pytest.mark.live
def test_wrong_arguments_raise_to_their_caller_alone(pool: Pool, text: Text) -> None:
    """A view that is open before them answers after them, and the lease stays with the caller."""
    queries = pool.queries
    with (
        open_view(pool, text) as view,
        open_view(pool, text, heads=2 * HEADS) as other,
        queries.init_query([(view, TOKENS)]) as buffer,
        text.match(pool) as lease,
    ):
        wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
            *((LayoutRefused, "", partial(queries.open_view, lease, heads, SCALE)) for heads in (0, 1 << 40)),
            *((LayoutRefused, "", partial(queries.open_view, lease, HEADS, scale)) for scale in (-1.0, math.nan, 1e9)),
            (LayoutRefused, "multiple", partial(queries.open_view, lease, 3, SCALE)),
            (LimitReached, "", partial(queries.open_view, lease, 1 << 16, SCALE)),
            (LayoutRefused, "expected the layout's float32", partial(queries.init_query, [(view, TOKENS)], "float16")),
            *(
                (LayoutRefused, "expected", partial(queries.init_query, parts))
                for parts in ([], [(view, 0)], [(view, 1), (other, 1)])
            ),
            (LimitReached, "tokens", partial(queries.init_query, [(view, 1 << 40)])),
            (LimitReached, "parts", partial(queries.init_query, [(view, 1)] * 5000)),
            *((LayoutRefused, "layer", partial(queries.query, buffer, at)) for at in (-1, LAYOUT.layers, 1 << 40)),
            *(
                (ValueError, "deadline_s", partial(queries.query, buffer, 0, each))
                for each in (-1.0, math.nan, math.inf)
            ),
        ]
        for error, named, call in wrong:
            with pytest.raises(error, match=named):
                call()
        with queries.open_view(lease, HEADS, SCALE) as last:
            assert ask(pool, text, last)
        assert ask(pool, text, view)


def test_an_ended_lease_opens_no_view(pool: Pool, text: Text) -> None:
    lease = text.match(pool)
    lease.release()
    with pytest.raises(Unreachable, match="ended"):
        pool.queries.open_view(lease, HEADS, SCALE)


@pytest.mark.live
def test_a_frozen_query_engine_costs_one_deadline(cluster: Cluster, pool: Pool, text: Text) -> None:
    before = query_memories()
    with open_view(pool, text) as view:
        pid = engine_of(cluster.nodes[0])
        freeze(pid)
        try:
            late = pool.queries.init_query([(view, TOKENS)])
            late.queries[...] = draw_queries(1, TOKENS)
            assert pool.queries.query(late, 0, SHORT_S).wait().codes == bytes([Code.LOST])
            # The client sends no further query to a frozen query engine, and does not reuse a buffer that it may still
            # access.
            for _ in range(100):
                with pool.queries.init_query([(view, TOKENS)]) as buffer:
                    assert buffer.number != late.number
                    assert pool.queries.query(buffer, 0, 60.0).wait().lost == [0]
            with text.match(pool) as lease, pytest.raises(DeadlinePassed):
                pool.queries.open_view(lease, HEADS, SCALE)
            assert pool.queries.query(late, 0, 60.0).wait().lost == [0]
            late.close()
            del late, buffer
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: ask(pool, text, view), "the query engine answers again")
        with open_view(pool, text) as other:
            assert other.link is view.link
    # The memory of the late answer was given back when the next buffer was made; that of the last buffer is kept.
    assert query_memories() == before + 1


@pytest.mark.live
def test_a_closed_buffer_is_not_reused_before_its_answer(pool: Pool, text: Text) -> None:
    before = query_memories()
    with open_view(pool, text) as view:
        for _ in range(50):
            first = pool.queries.init_query([(view, TOKENS)])
            pool.queries.query(first, 0, DEADLINE_S)
            number = first.number
            first.close()
            with pool.queries.init_query([(view, TOKENS)]) as second:
                assert second.number != number
            assert ask(pool, text, view)
        # One memory is kept for the next batch, one belongs to `first`, and the reply for another may not have arrived
        # yet.
        assert query_memories() <= before + 3


@pytest.mark.live
def test_queries_of_a_closed_pool_are_lost(cluster: Cluster, text: Text) -> None:
    pool = cluster.connect(0, LAYOUT)
    view = open_view(pool, text)
    buffer = pool.queries.init_query([(view, TOKENS)])
    pool.close()
    assert pool.queries.query(buffer, 0).wait().lost == [0]
    buffer.close()
    view.close()
    with pytest.raises(TokenLakeError):
        pool.queries.open_view(view.lease, HEADS, SCALE)
