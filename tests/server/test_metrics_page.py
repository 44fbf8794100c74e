"""The server of the pages: connections that send next to nothing, and what strangers may see."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, store, wait_until
from tests.server.scene import OF_THIS_USER, tenants
from tokenlake.config import Address
from tokenlake.core import CoreConfig, NodeCore
from tokenlake.directory.ring_record import RingRecord
from tokenlake_server import metrics_page
from tokenlake_server.membership import MembershipState
from tokenlake_server.metrics_page import MetricsServer, Snapshot
from tokenlake_server.page import http
from tokenlake_testing.ports import reserve_port

Pages = tuple[MetricsServer, asyncio.AbstractEventLoop]


@pytest.fixture
def pages() -> Iterator[Pages]:
    """The pages of a daemon, and its control loop, which runs in a thread."""
    core = NodeCore(CoreConfig("a", 1, RingRecord.of({"a": 1}), regions=1, region_bytes=1 << 20))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def take() -> Snapshot:
        return Snapshot(core, 0, 0, {}, MembershipState("peers", known=True, epoch=0), None)

    made = MetricsServer(Address("127.0.0.1", 0), loop, take, "a", {})
    yield made, loop
    made.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def got(pages: MetricsServer, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", pages.address.port), 5.0) as sock, sock.makefile("rb") as reply:
        sock.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return reply.read()


def test_a_loop_that_does_not_answer(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_page, "SNAPSHOT_S", 0.05)
    served, loop = pages
    answering = threading.Event()
    loop.call_soon_threadsafe(answering.wait)
    try:
        for path in ("/metrics", "/health", "/ready"):
            reply = got(served, path)
            assert reply.startswith(b"HTTP/1.0 503 Service Unavailable"), path
            assert b"the control loop did not answer" in reply
    finally:
        answering.set()
    assert "Traceback" not in capfd.readouterr().err
    monkeypatch.setattr(metrics_page, "SNAPSHOT_S", 10.0)
    assert b"tokenlake_free_share" in got(served, "/metrics")


def test_without_a_free_thread_pages_are_served(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    served, _ = pages
    for _ in range(2 * metrics_page.MAX_THREADS):
        assert got(served, "/health").startswith(b"HTTP/1.0 200 OK")


def test_a_request_sent_byte_by_byte_frees_its_thread(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "REQUEST_S", 0.5)
    served, _ = pages
    with socket.create_connection(("127.0.0.1", served.address.port), 5.0) as slow:
        slow.settimeout(0.05)
        until = time.monotonic() + 10.0
        closed = False
        while not closed and time.monotonic() < until:
            try:
                slow.send(b"G")
                closed = slow.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                closed = True
        assert closed
    assert got(served, "/health").startswith(b"HTTP/1.0 200 OK")


class Answer(NamedTuple):
    body: bytes = bytes(32 << 20)
    left_s: float = 60.0


class Source:
    """A page that no buffer of a socket can hold."""

    def read(self, token: str) -> Answer:
        return Answer()


def test_readers_that_read_nothing_hold_no_thread(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    served, _ = pages
    served.page.source = Source()
    ask = b"GET /page.json HTTP/1.0\r\nAuthorization: Bearer x\r\nAccept-Encoding: gzip\r\n\r\n"
    with contextlib.ExitStack() as stack:
        # Each request keeps its thread for as long as this says when it comes.
        monkeypatch.setattr(metrics_page, "REQUEST_S", 8.0)
        readers = []
        for _ in range(http.MAX_AT_ONCE):
            readers.append(stack.enter_context(socket.create_connection(("127.0.0.1", served.address.port), 30.0)))
            readers[-1].sendall(ask)
            # An answer begins once its request has room.
            assert readers[-1].recv(8, socket.MSG_PEEK) == b"HTTP/1.0"
        assert b"at the same time" in got(served, "/page.json")
        assert got(served, "/health").startswith(b"HTTP/1.0 200 OK")
        assert b"tokenlake_free_share" in got(served, "/metrics")
        wait_until(lambda: got(served, "/").startswith(b"HTTP/1.0 200 OK"), "the readers are given up")
    assert capfd.readouterr().err == ""


@pytest.mark.live
@pytest.mark.parametrize("shown", [False, True])
def test_pages_beyond_loopback(tmp_path: Path, shown: bool) -> None:
    """Pages beyond loopback can only be read and name no tenant."""
    port = reserve_port()
    with daemons(0) as cluster:
        node = cluster.add("a")
        node.settings |= {"config": tenants(tmp_path, blue=OF_THIS_USER), "metrics-tenants": str(shown).lower()}
        node.settings["metrics"], node.metrics_port = f"0.0.0.0:{port}", port
        node.start()
        cluster.wait_ready()
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, Prompt(1, 4))
            page = node.page("/metrics")
        assert ("blue" in page) == shown
        assert 'tenant="0"' in page or shown
        assert "tokenlake_written_bytes_total" in page
        request = urllib.request.Request(f"http://127.0.0.1:{port}/health", data=b"{}")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=5)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            node.page("/elsewhere")
