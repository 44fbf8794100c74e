"""The link to a query engine: answers in time and late ones, refusals, and its end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.robustness.live import wait_until
from tokenlake.errors import DeadlinePassed, Unreachable
from tokenlake.wire import Code, pack_frame
from tokenlake.wire.frames import FrameDecoder
from tokenlake.wire.query import Answered, CloseView, QueryRequest, Refused, Viewed, query_decoder
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


def test_no_send_waits_for_a_query_engine_that_reads_nothing(ends: tuple[QueryLink, socket.socket]) -> None:
    """The bytes that the socket does not take are sent when the query engine reads again; the connection ends when they
    are too many."""
    link, engine = ends
    sent: list[CloseView] = []

    def send(times: int) -> None:
        for _ in range(times):
            sent.append(CloseView(tuple(range(len(sent), len(sent) + 1000))))
            link.send(sent[-1])

    # A message that waited would wait for ever: the query engine reads nothing until all were sent.
    send(200)
    with pytest.raises(DeadlinePassed), open("/dev/null") as file:
        link.send(CloseView((1,)), file.fileno())
    decoder, got = FrameDecoder(1 << 20), list[QueryRequest]()
    engine.setblocking(False)

    def read_on() -> bool:
        with contextlib.suppress(BlockingIOError):
            while data := engine.recv(1 << 20):
                got.extend(query_decoder.decode(body) for body in decoder.feed(data))
        link.wait(link.expect("none"), 0.0)
        return len(got) == len(sent)

    wait_until(read_on, "the query engine has all")
    assert got == sent
    with pytest.raises(Unreachable, match="does not read"):
        send(2000)
    assert not link.alive
