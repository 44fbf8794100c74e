"""The link to a query engine: answers in time and late ones, refusals, and its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tokenlake.errors import DeadlinePassed, Unreachable
from tokenlake.wire import Code, pack_frame
from tokenlake.wire.query import Answered, Refused, Viewed
from tokenlake_client.query_link import QueryLink

DEADLINE_S = 10.0
SHORT_S = 0.2
"""Deadline of a query that is not answered."""


def answered(attempt: int, layer: int = 0, buffer: int = 1) -> Answered:
    return Answered(buffer, 1, layer, attempt, bytes([Code.LOCAL]), 0, 0)


@pytest.fixture
def ends() -> Iterator[tuple[QueryLink, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = QueryLink(ours)
    with theirs:
        yield link, theirs
    link.close()


def test_answers_in_time_and_late(ends: tuple[QueryLink, socket.socket]) -> None:
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


def test_a_refusal_of_one_query_ends_no_other(ends: tuple[QueryLink, socket.socket]) -> None:
    """The refused query is answered besides, without codes."""
    link, engine = ends
    refused, other, view = link.expect((1, 1, 0, 1)), link.expect((2, 1, 0, 1)), link.expect(("view", 3))
    nothing = Answered(1, 1, 0, 1, b"", 0, 0)
    engine.sendall(pack_frame(Refused(0, "ProtocolRefused", "no such step")) + pack_frame(nothing))
    engine.sendall(pack_frame(Viewed(3, 1, b"\1")) + pack_frame(answered(1, buffer=2)))
    assert link.wait(view, DEADLINE_S) == Viewed(3, 1, b"\1")
    assert link.wait(other, DEADLINE_S) == answered(1, buffer=2)
    assert link.wait(refused, DEADLINE_S) == nothing
    assert link.alive


@pytest.mark.parametrize("last", [b"", b"\x01\x00\x00\x00\xc1", b"\xff\xff\xff\xff"])
def test_a_broken_connection_ends_all_waits(ends: tuple[QueryLink, socket.socket], last: bytes) -> None:
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
