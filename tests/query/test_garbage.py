"""Noise on a socket of a query engine ends that connection and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.query.raw import Raw, raw_engine, raw_peer
from tests.query.scene import HEADS, LAYOUT, SCALE, Text, close_to, draw_queries, engine_of, open_view, spread
from tokenlake.attention import Partial
from tokenlake.wire import pack_frame
from tokenlake.wire import query as wire
from tokenlake.wire.query import MAX_FRAME
from tokenlake_testing.cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.live

OPEN = wire.OpenView(1, "default", LAYOUT.encode(), bytes(32), (), b"", HEADS, SCALE)


@pytest.fixture(autouse=True)
def others_are_served(cluster: Cluster) -> Iterator[None]:
    """The same processes serve another connection and its view before and after each test."""
    text = Text(50, 16)
    spread(cluster, [text])
    processes = [engine_of(node) for node in cluster.nodes]
    with (
        cluster.connect(0, LAYOUT) as pool,
        open_view(pool, text) as view,
        pool.queries.init_query([(view, 2)]) as buffer,
    ):

        def ask() -> None:
            buffer.queries[...] = draw_queries(0, 2)
            answer = pool.queries.query(buffer, 0, deadline_s=10.0).wait()
            assert not answer.lost
            close_to(Partial(answer.output, answer.sums), text.attention(buffer.queries, 0), 1e-5)

        ask()
        yield
        ask()
    assert [engine_of(node) for node in cluster.nodes] == processes


def noise(seed: int) -> list[bytes]:
    """Streams that are not of the protocol."""
    draw = random.Random(seed)
    frame = pack_frame(OPEN)
    damaged = bytearray(frame)
    damaged[draw.randrange(4, len(frame))] ^= 1 << draw.randrange(8)
    return [
        draw.randbytes(5000),
        (MAX_FRAME + 1).to_bytes(4, "little") + bytes(100),
        (4).to_bytes(4, "little") + b"\xff" * 4,
        (0).to_bytes(4, "little"),
        frame[: draw.randrange(1, len(frame))],
        bytes(damaged) + frame[:3],
        pack_frame(wire.Viewed(1, 1, b"\1")),
        pack_frame(wire.Ask(1, 0, "float32", ((1, 1),), 512)) + bytes(100),
    ]


def send(raw: Raw, stream: bytes) -> None:
    """Send a stream and its end; the query engine must close the connection."""
    try:
        raw.sock.sendall(stream)
        raw.sock.shutdown(1)
    except (BrokenPipeError, ConnectionResetError):
        return
    raw.wait_for_end()


@pytest.mark.parametrize("seed", range(3))
def test_from_an_engine(cluster: Cluster, seed: int) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        for stream in noise(seed):
            with raw_engine(pool) as raw:
                send(raw, stream)


@pytest.mark.parametrize("seed", range(3))
def test_from_another_node(cluster: Cluster, seed: int) -> None:
    for stream in noise(seed):
        with raw_peer(cluster, 0, asker=1) as raw:
            send(raw, stream)


def test_unclaimed_descriptors(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool, raw_engine(pool) as raw:
        for _ in range(20):
            try:
                raw.send(wire.CloseView((1,)), descriptor=0)
            except (BrokenPipeError, ConnectionResetError):
                break
        raw.wait_for_end()


def test_a_peer_that_reads_no_results(cluster: Cluster) -> None:
    """The peer sends many requests and reads no result; other connections are served meanwhile."""
    text = Text(51, 2)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, raw_peer(cluster, 0, asker=1) as raw:
        keys = b"".join(pool.prefix(text.tokens).keys)
        with text.match(pool) as lease:
            lease.fetch()
            raw.send(wire.OpenView(1, pool.engine.tenant, LAYOUT.encode(), keys, (), b"", HEADS, SCALE))
            assert raw.receive() == wire.Viewed(1, 2, b"\1\1")
        tokens = 4096
        queries = draw_queries(0, tokens).tobytes()
        raw.sock.settimeout(0.5)
        ask = wire.Ask(1, 0, "float32", ((1, tokens),), len(queries))
        with pytest.raises(TimeoutError):
            # The query engine stops reading once too many results are unsent.
            raw.sock.sendall((pack_frame(ask) + queries) * 300)
