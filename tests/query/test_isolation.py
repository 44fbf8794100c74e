"""A tenant that does its worst to a query engine neither ends it nor keeps another tenant's queries waiting."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.query.raw import memfd, raw_engine
from tests.query.scene import HEADS, LAYOUT, SCALE, Text, close_to, draw_queries, engine_of, open_view, serving
from tests.robustness.live import LIMIT_S, PATIENT, descriptors_of, wait_until
from tests.server import raw as server
from tests.server.scene import BLUE, RED, tenants
from tokenlake.attention import Partial
from tokenlake.errors import LimitReached
from tokenlake.wire import Code, engine, pack_frame
from tokenlake.wire import query as wire
from tokenlake.wire.engine import HERE
from tokenlake.wire.slots import join_keys
from tokenlake_client import Pool
from tokenlake_query.connection import READ_BYTES
from tokenlake_query.tenant_limits import TOTALS
from tokenlake_testing.cluster import Cluster, Node

pytest.importorskip("torch")
pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tenants(tmp_path_factory.mktemp("tenants"))
    with serving(1, "16MiB", credential=BLUE, config=file) as cluster:
        yield cluster


def pool_of(node: Node, token: str) -> Pool:
    return Pool.connect(node.socket, LAYOUT, token, deadlines=PATIENT)


def ask(pool: Pool, text: Text, times: int = 1) -> None:
    """Open a view and compare the results of some queries."""
    with open_view(pool, text) as view, pool.queries.init_query([(view, 2)]) as buffer:
        for number in range(times):
            buffer.queries[...] = draw_queries(number, 2)
            answer = pool.queries.query(buffer, number % LAYOUT.layers, deadline_s=LIMIT_S).wait()
            assert not answer.lost
            close_to(Partial(answer.output, answer.sums), text.attention(buffer.queries, number % LAYOUT.layers), 1e-5)


def test_pipelined_connections(cluster: Cluster) -> None:
    """250 requests for a connection to the query engine, in one write: each is answered, and the process goes on."""
    node = cluster.nodes[0]
    text = Text(1, 4)
    with pool_of(node, RED) as red, pool_of(node, BLUE) as blue, server.Raw(node.socket) as raw:
        text.store(blue)
        text.store(red)
        before = engine_of(node)
        raw.send(server.hello(token=RED))
        assert isinstance(raw.reply(), engine.Welcome)
        raw.write(b"".join(pack_frame(engine.OpenQuery(number)) for number in range(2, 252)))
        # The descriptors are closed by the kernel, because the test does not receive them.
        replies = [raw.reply() for _ in range(250)]
        assert [reply.id for reply in replies] == list(range(2, 252))
        assert {type(reply) for reply in replies} <= {engine.QueryOpened, engine.Failed}
        ask(blue, text)
        ask(red, text)
        assert engine_of(node) == before


def test_segments_of_another_tenant_are_missing(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    text = Text(4, 4)
    with pool_of(node, RED) as red, pool_of(node, BLUE) as blue:
        text.store(red)
        ask(red, text)
        keys = join_keys(red.prefix(text.tokens).keys)
        opening = wire.OpenView(1, "", b"", keys, (), bytes([HERE]) * text.segments, HEADS, SCALE)
        for pool, expected in (
            (blue, wire.Viewed(1, 0, bytes([Code.MISSING]) * text.segments)),
            (red, wire.Viewed(1, text.segments, bytes([Code.LOCAL]) * text.segments)),
        ):
            with raw_engine(pool) as raw:
                raw.send(opening)
                assert raw.receive() == expected


def test_connections_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    """Each of 96 tenants has its share of 768."""
    tenants = [
        f'[[tenants]]\nname = "{name}"\nsecret = "{name:0>32}"\ntokens = ["{name:0>16}"]\n' for name in range(96)
    ]
    file = tmp_path / "tokenlake.toml"
    file.write_text(f"allow_uids = [{os.getuid()}]\n{''.join(tenants)}")
    file.chmod(0o600)
    red, blue = f"{1:0>16}", f"{2:0>16}"
    with serving(1, credential=blue, config=str(file)) as cluster:
        node = cluster.nodes[0]
        with pool_of(node, red) as pool, pool_of(node, blue) as other, contextlib.ExitStack() as opened:
            for _ in range(8):
                opened.enter_context(raw_engine(pool))
            with pytest.raises(LimitReached, match="serves 8 connections of this tenant"), raw_engine(pool):
                pass
            with raw_engine(other):
                pass
            opened.close()

            def opens() -> bool:
                try:
                    with raw_engine(pool):
                        return True
                except LimitReached:
                    return False

            wait_until(opens, "the ended connections no longer count")


def test_a_huge_query(cluster: Cluster) -> None:
    """The queries of the other tenant are answered before it."""
    node = cluster.nodes[0]
    text, long_text = Text(2, 4), Text(3, 400)
    tokens = 1 << 16
    queries, outputs = tokens * HEADS * LAYOUT.key_dim * 4, tokens * HEADS * LAYOUT.value_dim * 4
    nbytes = queries + outputs + tokens * HEADS * 4
    with pool_of(node, RED) as red, pool_of(node, BLUE) as blue, raw_engine(red) as raw:
        text.store(blue)
        long_text.store(red)
        with long_text.match(red) as lease:
            keys = join_keys(lease.keys)
            raw.send(wire.OpenView(1, "", b"", keys, (), bytes([HERE]) * len(lease.keys), HEADS, SCALE))
            assert raw.receive().hits == len(lease.keys)
        descriptor = memfd(nbytes)
        raw.send(wire.OpenBuffer(1, nbytes), descriptor=descriptor)
        os.close(descriptor)
        raw.send(wire.Step(1, 1, "float32", ((1, tokens),), 0, queries, queries + outputs))
        raw.send(wire.Query(1, 1, 0, 1, 1e9))
        ask(blue, text, 10)
        assert not select.select([raw.sock], [], [], 0)[0], "the huge query is not answered yet"
        # It ends without an answer, as soon as its buffer is closed.
        raw.send(wire.OpenBuffer(1, 0))
        ask(blue, text)


def test_cheap_frames(cluster: Cluster) -> None:
    """32 connections of one tenant, whose sender is another process, send frames that cost little as fast as they are
    read; without a share, a query of the other tenant takes seconds."""
    node = cluster.nodes[0]
    text = Text(1, 4)
    with pool_of(node, RED) as red, pool_of(node, BLUE) as blue, contextlib.ExitStack() as opened:
        text.store(blue)
        ask(blue, text)
        sockets = [opened.enter_context(raw_engine(red)).sock for _ in range(32)]
        sender = os.fork()
        if not sender:
            _flood(sockets, pack_frame(wire.CloseView((1,))))
        try:
            began = time.monotonic()
            ask(blue, text, 20)
            assert time.monotonic() - began < LIMIT_S
        finally:
            os.kill(sender, signal.SIGKILL)
            os.waitpid(sender, 0)


def _flood(sockets: list[socket.socket], frame: bytes) -> NoReturn:
    """Send frames on all sockets until this process is killed."""
    for sock in sockets:
        sock.setblocking(False)
    data = frame * (READ_BYTES // len(frame))
    unsent = dict.fromkeys(sockets, data)
    while True:
        for sock in select.select([], sockets, [])[1]:
            unsent[sock] = unsent[sock][sock.send(unsent[sock]) :] or data


def test_buffers_of_a_tenant_are_bounded_and_take_no_descriptors(cluster: Cluster) -> None:
    """A refused buffer ends nothing; each tenant has half of all bytes."""
    node = cluster.nodes[0]
    text = Text(1, 4)
    sparse = memfd(TOTALS["buffer_bytes"] // 4)
    with pool_of(node, RED) as red, pool_of(node, BLUE) as blue, raw_engine(red) as raw:
        text.store(blue)
        ask(blue, text)
        before = descriptors_of(engine_of(node))
        try:
            for number in range(1, 4):
                raw.send(wire.OpenBuffer(number, TOTALS["buffer_bytes"] // 4), descriptor=sparse)
        finally:
            os.close(sparse)
        assert "'red' would have" in raw.refused().reason
        for number in range(4, 200):
            small = memfd(4096)
            raw.send(wire.OpenBuffer(number, 4096), descriptor=small)
            os.close(small)
            assert "buffer_bytes at this query engine" in raw.refused().reason
        raw.send(wire.OpenBuffer(1, 0))
        for number in range(4, 200):
            small = memfd(4096)
            raw.send(wire.OpenBuffer(number, 4096), descriptor=small)
            os.close(small)
        raw.send(wire.Query(1, 1, 0, 1, 1.0))
        assert "no step" in raw.refused().reason, "all buffers before it were opened"
        assert descriptors_of(engine_of(node)) <= before
        ask(blue, text)
