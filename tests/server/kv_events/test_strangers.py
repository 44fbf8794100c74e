"""Connections of strangers and of too many readers: refused, counted, and without a cost for the daemon's others."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

from tests.robustness.live import LAYOUT, LIMIT_S, descriptors_of, memory_of, pid_of
from tests.server.kv_events.readers import Llmd, Subscriber
from tests.server.kv_events.scene import BLOCK, MODEL, Prompts, Stream, agree, publishing, store, until
from tokenlake_server.kv_events import listener, reader, zmtp
from tokenlake_server.kv_events.listener import MAX_READERS_OF_ONE
from tokenlake_testing.cluster import Node

pytestmark = pytest.mark.live

HELLO = zmtp.opening("SUB")
SUBSCRIBE = zmtp.message((b"\1",))


def figure(node: Node, name: str) -> float:
    return node.metrics()[f'tokenlake_kv_event_{name}{{model="{MODEL}",tenant="default"}}']


def dial(endpoint: str) -> socket.socket:
    kind, _, place = endpoint.partition("://")
    if kind == "ipc":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(place)
        return sock
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


def is_closed(sock: socket.socket) -> bool:
    """Waits until the other side has closed the connection; False after the deadline."""
    sock.settimeout(LIMIT_S)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture(params=["tcp", "ipc"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Node, Stream]]:
    paths = {"endpoint": f"ipc://{tmp_path}/kv", "replay": f"{tmp_path}/replay"}
    more: dict[str, Any] = {} if request.param == "tcp" else paths
    with publishing(**more) as (cluster, (each,)):
        yield cluster.nodes[0], each


def test_a_reader_at_a_unix_socket(tmp_path: Path) -> None:
    """The default, which only the daemon's user, its group and root may open."""
    with publishing(endpoint=None, replay=f"ipc://{tmp_path}/replay") as (cluster, (stream,)):
        node, router, prompts = cluster.nodes[0], Llmd(BLOCK), Prompts()
        path = node.socket.with_suffix(".kv")
        assert path.stat().st_mode & 0o777 == 0o660
        with cluster.connect(0, LAYOUT) as pool, Subscriber(f"ipc://{path}", f"ipc://{tmp_path}/replay", router.take):
            store(pool, prompts.new())
            agree(node, stream, pool, router, prompts.all)
        users = ", ".join(map(str, sorted({0, os.getuid()})))
        assert f"are for uid {users} at ipc://{path}" in node.log.read_text()
        node.stop()
        assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("uids", [[], [65534]])
def test_another_user_reads_what_it_may(uids: list[int]) -> None:
    """At a port of loopback the kernel says whose connection it is; nothing is sent to a stranger."""
    program = (
        "import socket, sys\nat = '127.0.0.1', int(sys.argv[1])\n"
        "try: print(len(socket.create_connection(at).recv(64)))\nexcept ConnectionError: print('reset')"
    )
    with publishing(uids=uids) as (cluster, (stream,)):
        for endpoint in (stream.events, stream.replay):
            words = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-c", program]
            done = subprocess.run([*words, endpoint.split(":")[1]], capture_output=True, text=True, check=False)
            assert done.stdout.strip() == ("64" if uids else "reset"), done.stderr
        assert figure(cluster.nodes[0], "refused_readers") == (0 if uids else 2)
        assert ("uid 65534 may not read" in cluster.nodes[0].log.read_text()) == (not uids)


def test_subscriptions_are_not_kept(stream: tuple[Node, Stream]) -> None:
    """What a reader sends is read at a pace, and what cannot be a beginning of the topic is forgotten."""
    node, each = stream
    before = memory_of(pid_of(node))
    with dial(each.endpoints[0]) as sock:
        sock.sendall(HELLO)
        for number in range(400):
            sock.sendall(zmtp.message((b"\1" + number.to_bytes(4, "big") + bytes(1000),)))
        until(1, lambda: figure(node, "readers"))
        assert memory_of(pid_of(node)) - before < 8 << 20
    until(0, lambda: figure(node, "readers"))


def test_the_limit_of_one_user(stream: tuple[Node, Stream]) -> None:
    """Further connections are closed; those that are open go on, and there is room again when one ends."""
    node, each = stream
    before = descriptors_of(pid_of(node))
    with contextlib.ExitStack() as opened:
        socks = [opened.enter_context(dial(each.endpoints[0])) for _ in range(MAX_READERS_OF_ONE)]
        for sock in socks:
            sock.sendall(HELLO + SUBSCRIBE)
        until(MAX_READERS_OF_ONE, lambda: figure(node, "readers"))
        for _ in range(5):
            # The reset may come before the end of the connect.
            with contextlib.suppress(ConnectionError), dial(each.endpoints[0]) as further:
                assert is_closed(further)
        until(5, lambda: figure(node, "refused_readers"))
        assert figure(node, "readers") == MAX_READERS_OF_ONE
        assert descriptors_of(pid_of(node)) <= before + MAX_READERS_OF_ONE + 2
        socks[0].close()
        until(MAX_READERS_OF_ONE - 1, lambda: figure(node, "readers"))
        with dial(each.endpoints[0]) as again:
            again.sendall(HELLO + SUBSCRIBE)
            until(MAX_READERS_OF_ONE, lambda: figure(node, "readers"))


def test_what_no_reader_sends() -> None:
    """`test_zmtp.py` has the other refusals."""
    with publishing() as (cluster, (stream,)), dial(stream.endpoints[0]) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        assert is_closed(sock)
        until(1, lambda: figure(cluster.nodes[0], "refused_readers"))
        assert "it does not speak ZMTP 3" in cluster.nodes[0].log.read_text()


def test_the_limits_in_numbers() -> None:
    """They are in the documents."""
    assert (listener.MAX_READERS_OF_ALL, listener.MAX_READERS, listener.MAX_READERS_OF_ONE) == (128, 64, 32)
    assert (reader.READY_S, reader.IDLE_S, reader.STALL_S, reader.MAX_REPLAYS) == (5, 60, 5, 8)
