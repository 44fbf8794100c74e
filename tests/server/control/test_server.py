"""The server against bad callers: huge and malformed messages, streams that are not read, too many of them. The data
path stays as it was, and the memory of the daemon has a bound."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, pid_of, read, store, wait_until
from tests.server.control.scene import CALL_S, local, raw, socket_of
from tokenlake.errors import LimitReached, Unreachable
from tokenlake_client import Pool
from tokenlake_server.control.event_stream import MAX_STREAMS
from tokenlake_server.control.server import MAX_CONNECTIONS
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

STATUS, TREE = "/tokenlake.v1.Admin/GetStatus", "/tokenlake.v1.Scheduling/GetPrefixTree"
SUBSCRIBE = "/tokenlake.v1.Events/Subscribe"
ROOM = 64 << 20
"""Bytes by which bad callers may make a daemon grow."""


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with daemons(1, memory="16MiB") as cluster:
        yield cluster


def code_of(error: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = error.code()
    return code


def refused(call: Any, *arguments: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=CALL_S)
    return code_of(caught.value)


def size(cluster: Cluster) -> int:
    return int(psutil.Process(pid_of(cluster.nodes[0])).memory_info().rss)


def threads(cluster: Cluster) -> int:
    return int(psutil.Process(pid_of(cluster.nodes[0])).num_threads())


def serves(pool: Pool, seed: int) -> None:
    """The data path works."""
    prompt = Prompt(seed, 3)
    store(pool, prompt)
    assert read(pool, prompt) == 3


def test_huge_malformed_and_unknown_calls_get_a_status(one: Cluster) -> None:
    with one.connect(0, LAYOUT) as pool, raw(one.nodes[0]) as channel:
        before = size(one)
        assert refused(channel.unary_unary(STATUS), bytes(3 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for body in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", b"\x08"):
            assert refused(channel.unary_unary(TREE), body) is grpc.StatusCode.INVALID_ARGUMENT
            assert refused(channel.unary_unary(STATUS), body) is grpc.StatusCode.INVALID_ARGUMENT
        assert refused(channel.unary_unary("/tokenlake.v1.Admin/Format"), b"") is grpc.StatusCode.UNIMPLEMENTED
        assert refused(channel.unary_unary("/tokenlake.v2.Admin/GetStatus"), b"") is grpc.StatusCode.UNIMPLEMENTED
        stream = channel.unary_stream(SUBSCRIBE)(b"\xff", timeout=CALL_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert code_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(20):
            refused(channel.unary_unary(TREE), b"\x0a" * (2_000_000))
        serves(pool, 1)
        assert size(one) < before + ROOM


def test_a_hundred_event_streams_at_once(one: Cluster) -> None:
    """Some are served, the others get a status; no thread is made for a stream."""
    with one.connect(0, LAYOUT) as pool, local(one.nodes[0]) as control:
        started, limited = [], 0
        before = threads(one)
        for _ in range(100):
            stream = control.events()
            try:
                next(stream)
                started.append(stream)
            except LimitReached:
                limited += 1
        assert (len(started), limited) == (MAX_STREAMS // 4, 100 - MAX_STREAMS // 4)
        assert threads(one) <= before + 4
        serves(pool, 2)
        for stream in started:
            stream.close()

        def free() -> bool:
            again = control.events()
            try:
                next(again)
            except LimitReached:
                return False
            again.close()
            return True

        wait_until(free, "a stream after the others ended")


def test_streams_that_are_never_read_cost_no_memory(one: Cluster) -> None:
    with one.connect(0, LAYOUT) as pool, raw(one.nodes[0]) as channel:
        before = size(one)
        streams = [channel.unary_stream(SUBSCRIBE)(b"") for _ in range(8)]
        prompt = Prompt(3, 64)
        for _ in range(30):
            store(pool, prompt)
            with local(one.nodes[0]) as control:
                control.evict(everything=True)
        serves(pool, 4)
        assert size(one) < before + ROOM
        for stream in streams:
            stream.cancel()


def test_the_socket_goes_with_the_daemon() -> None:
    with daemons(1) as cluster:
        node = cluster.nodes[0]
        node.kill()
        assert socket_of(node).exists()
        node.start()
        cluster.wait_ready()
        with local(node) as control:
            stream = control.events()
            next(stream)
            began = time.monotonic()
            assert node.stop() == 0
            assert time.monotonic() - began < 10
            with pytest.raises(Unreachable):
                list(stream)
        assert not socket_of(node).exists()
        assert "Traceback" not in node.log.read_text()


def test_connections_that_say_nothing_are_bounded(one: Cluster) -> None:
    path = str(socket_of(one.nodes[0]))
    pid = pid_of(one.nodes[0])
    before, held = psutil.Process(pid).num_fds(), []
    with one.connect(0, LAYOUT) as pool:
        for _ in range(MAX_CONNECTIONS + 150):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(5)
            try:
                sock.connect(path)
            except OSError:
                sock.close()
                continue
            held.append(sock)
        serves(pool, 9)
        wait_until(lambda: psutil.Process(pid).num_fds() <= before + MAX_CONNECTIONS + 16, "a bound")
        for sock in held:
            sock.close()

        def answers() -> bool:
            try:
                with local(one.nodes[0]) as control:
                    return control.status().node == "node0"
            except Unreachable:
                return False

        wait_until(answers, "the daemon answers once the others are gone")
