"""The client's side of attention in place: what a ticket says when the query engine does not."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

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
    freeze,
    open_view,
    serving,
    spread,
    wait_serving,
)
from tests.robustness.live import wait_until
from tokenlake.attention import Partial
from tokenlake.errors import DeadlinePassed, LayoutRefused, TokenLakeError, Unreachable
from tokenlake.wire import Code, pack_frame
from tokenlake.wire.query import Answered, Refused, Viewed
from tokenlake_client import Pool
from tokenlake_client.queries import View
from tokenlake_client.query_link import QueryLink
from tokenlake_testing.cluster import Cluster

TOKENS = 3
SHORT_S = 0.2
"""Deadline of queries to somebody who stands still."""


def answered(attempt: int, layer: int = 0) -> Answered:
    return Answered(1, 1, layer, attempt, bytes([Code.LOCAL]), 0, 0)


@pytest.fixture
def ends() -> Iterator[tuple[QueryLink, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = QueryLink(ours)
    with theirs:
        yield link, theirs
    link.close()


def test_answers_find_who_waits_and_late_ones_nobody(ends: tuple[QueryLink, socket.socket]) -> None:
    link, engine = ends
    first, second = link.expect((1, 1, 0, 1)), link.expect((1, 1, 1, 2))
    assert link.wait(first, SHORT_S) is None
    assert link.overdue
    with pytest.raises(DeadlinePassed):
        link.check()
    view = link.expect(("view", 7))
    assert link.wait(view, 0.0) is None
    frames = b"".join(map(pack_frame, (answered(1), answered(2, layer=1), Viewed(7, 0, b""))))
    engine.sendall(frames[:-3])
    assert link.wait(second, DEADLINE_S) == answered(2, layer=1)
    assert first.reply == answered(1)
    assert not link.late_views
    engine.sendall(frames[-3:])
    third = link.expect(("view", 8))
    engine.sendall(pack_frame(answered(3)) + pack_frame(Refused(8, "LayoutRefused", "no")))
    assert link.wait(third, DEADLINE_S) == Refused(8, "LayoutRefused", "no")
    assert list(link.late_views) == [7]
    link.check()


def test_a_refused_query_is_lost_to_whoever_waits_for_one(ends: tuple[QueryLink, socket.socket]) -> None:
    link, engine = ends
    query, view = link.expect((1, 1, 0, 1)), link.expect(("view", 3))
    refused = Refused(0, "ProtocolRefused", "no such step")
    engine.sendall(pack_frame(refused) + pack_frame(Viewed(3, 1, b"\1")))
    assert link.wait(view, DEADLINE_S) == Viewed(3, 1, b"\1")
    assert link.wait(query, DEADLINE_S) == refused
    assert link.alive


@pytest.mark.parametrize("last", [b"", b"\x01\x00\x00\x00\xc1", b"\xff\xff\xff\xff"])
def test_a_connection_that_ends_or_talks_nonsense_ends_all_waiting(
    ends: tuple[QueryLink, socket.socket], last: bytes
) -> None:
    link, engine = ends
    waiting = [link.expect((1, 1, 0, attempt)) for attempt in range(3)]
    got: list[object] = []
    threads = [threading.Thread(target=lambda each=each: got.append(link.wait(each, 60.0))) for each in waiting]
    for thread in threads:
        thread.start()
    engine.sendall(last)
    engine.shutdown(socket.SHUT_WR)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert got == [None] * 3
    assert not link.alive
    for call in (link.check, lambda: link.send(answered(1))):
        with pytest.raises(Unreachable):
            call()


# -- with a real query engine


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


def ask(pool: Pool, text: Text, view: View, tokens: int = TOKENS, seed: int = 0) -> bool:
    """Every layer once; False when one was LOST, AssertionError when one was wrong."""
    with pool.init_query([(view, tokens)]) as buffer:
        for layer in range(LAYOUT.layers):
            buffer.queries[...] = draw_queries(seed + layer, tokens)
            answer = pool.query(buffer, layer, DEADLINE_S).wait()
            if answer.lost:
                return False
            close_to(Partial(answer.output, answer.sums), text.attention(buffer.queries, layer), 1e-5)
    return True


@pytest.mark.live
def test_memory_is_used_again_and_only_where_it_is_large_enough(pool: Pool, text: Text) -> None:
    with open_view(pool, text) as view:
        numbers = []
        for tokens in (1, 2, 400, 1, 400):
            with pool.init_query([(view, tokens)]) as buffer:
                numbers.append(buffer.number)
            assert ask(pool, text, view, tokens)
        assert numbers[0] == numbers[1] == numbers[3] != numbers[2] == numbers[4]


@pytest.mark.live
def test_threads_share_one_connection(pool: Pool, text: Text) -> None:
    done: list[bool] = []

    def work(number: int) -> None:
        with open_view(pool, text) as view:
            done.append(all(ask(pool, text, view, number + 1, 100 * number + turn) for turn in range(10)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4
    assert pool._queries.connections == 1


@pytest.mark.live
def test_what_does_not_fit_is_refused_with_what_was_expected(pool: Pool, text: Text) -> None:
    with text.match(pool) as lease:
        with pytest.raises(LayoutRefused, match="multiple"):
            pool.open_view(lease, 3, SCALE)
        # It is still the caller's.
        with pool.open_view(lease, HEADS, SCALE) as view, open_view(pool, text, heads=2 * HEADS) as other:
            for parts in ([], [(view, 0)], [(view, 1), (other, 1)]):
                with pytest.raises(LayoutRefused, match="expected"):
                    pool.init_query(parts)
            with pool.init_query([(view, 1)]) as buffer:
                assert pool.query(buffer, LAYOUT.layers).wait().lost == [0]
                assert pool.query(buffer, 0).wait().lost == [0]
            assert ask(pool, text, view)


@pytest.mark.live
def test_a_lease_that_has_ended_opens_no_view(pool: Pool, text: Text) -> None:
    lease = text.match(pool)
    lease.release()
    with pytest.raises(Unreachable, match="ended"):
        pool.open_view(lease, HEADS, SCALE)


@pytest.mark.live
def test_a_frozen_query_engine_costs_one_deadline(cluster: Cluster, pool: Pool, text: Text) -> None:
    with open_view(pool, text) as view:
        pid = engine_of(cluster.nodes[0])
        freeze(pid)
        try:
            late = pool.init_query([(view, TOKENS)])
            late.queries[...] = draw_queries(1, TOKENS)
            assert pool.query(late, 0, SHORT_S).wait().codes == bytes([Code.LOST])
            # Nobody asks it again, and nobody writes where it may still read and write.
            for _ in range(100):
                with pool.init_query([(view, TOKENS)]) as buffer:
                    assert buffer.number != late.number
                    assert pool.query(buffer, 0, 60.0).wait().lost == [0]
            with text.match(pool) as lease, pytest.raises(DeadlinePassed):
                pool.open_view(lease, HEADS, SCALE)
            assert pool.query(late, 0, 60.0).wait().lost == [0]
            late.close()
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: ask(pool, text, view), "it answers again")
    assert pool._queries.connections == 1
    # What came late was given back when the next buffer was made.
    assert not pool._queries._in_use


@pytest.mark.live
def test_a_buffer_that_is_closed_with_its_query_out_is_used_by_nobody_until_the_answer(pool: Pool, text: Text) -> None:
    with open_view(pool, text) as view:
        for _ in range(50):
            first = pool.init_query([(view, TOKENS)])
            pool.query(first, 0, DEADLINE_S)
            number = first.number
            first.close()
            with pool.init_query([(view, TOKENS)]) as second:
                assert second.number != number
            assert ask(pool, text, view)
        assert len(pool._queries._in_use) <= 1


@pytest.mark.live
def test_a_killed_query_engine_loses_its_views_and_is_connected_to_again(
    cluster: Cluster, pool: Pool, text: Text
) -> None:
    view = open_view(pool, text)
    pid = engine_of(cluster.nodes[0])
    with pool.init_query([(view, TOKENS)]) as buffer:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(pool.query(buffer, 0, DEADLINE_S).wait().lost), "its answers are lost")
    assert not view.alive
    assert not ask(pool, text, view)
    view.close()
    wait_serving(cluster, 0, other_than=pid)
    with open_view(pool, text) as again:
        assert ask(pool, text, again)
    assert pool._queries.connections == 2


@pytest.mark.live
def test_a_closed_pool_loses_everything_and_raises_nothing(cluster: Cluster, text: Text) -> None:
    pool = cluster.connect(0, LAYOUT)
    view = open_view(pool, text)
    buffer = pool.init_query([(view, TOKENS)])
    pool.close()
    assert pool.query(buffer, 0).wait().lost == [0]
    buffer.close()
    view.close()
    with pytest.raises(TokenLakeError):
        pool.open_view(view.lease, HEADS, SCALE)
