"""The server of the pages: connections that send next to nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from tokenlake.config import Address
from tokenlake.core import CoreConfig, NodeCore
from tokenlake.ring_record import RingRecord
from tokenlake_server import metrics_page
from tokenlake_server.membership import MembershipState
from tokenlake_server.metrics_page import MetricsServer, Snapshot


def test_a_request_sent_byte_by_byte_frees_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "REQUEST_S", 0.5)
    core = NodeCore(CoreConfig("a", 1, RingRecord.of({"a": 1}), regions=1, region_bytes=1 << 20))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def take() -> Snapshot:
        return Snapshot(core, 0, {}, MembershipState("peers", known=True, epoch=0), None)

    pages = MetricsServer(Address("127.0.0.1", 0), loop, take, "a", {})
    try:
        with socket.create_connection(("127.0.0.1", pages.address.port), 5.0) as slow:
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
        with socket.create_connection(("127.0.0.1", pages.address.port), 5.0) as whole:
            whole.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert whole.recv(100).startswith(b"HTTP/1.0 200 OK")
    finally:
        pages.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
