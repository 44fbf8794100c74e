"""Requests that do not fit are refused with the expected value, and the connection goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from tests.query.raw import Raw, memfd, raw_engine, raw_peer
from tests.query.scene import HEADS, LAYOUT, SCALE, Text, layout_of, spread
from tokenlake.errors import LayoutRefused
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake.wire.engine import HERE
from tokenlake.wire.query import MAX_STEP_BYTES
from tokenlake.wire.slots import join_keys
from tokenlake_testing.cluster import Cluster

pytest.importorskip("torch")
pytestmark = pytest.mark.live

NBYTES = 1 << 16
TWO_KEYS = bytes(range(64))
STEP = wire.Step(1, 1, "float32", ((1, 2),), 0, 8192, 16384)
"""Two tokens of four heads of 32."""
OPAQUE = OpaqueLayout(
    model_id="test",
    weights_digest="00",
    engine="vllm 0.32.0",
    cache="one group",
    shards=2,
    shard_bytes=8192,
    segment_tokens=16,
)


@pytest.fixture
def engine(cluster: Cluster) -> Iterator[Raw]:
    """An engine with view 1 of three segments, buffer 1 and a valid step 1."""
    text = Text(40, 3)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, text.match(pool) as lease, raw_engine(pool) as raw:
        lease.fetch()
        raw.send(open_message(1, join_keys(lease.keys), bytes([HERE]) * 3))
        assert raw.receive() == wire.Viewed(1, 3, bytes([Code.LOCAL]) * 3)
        descriptor = memfd(NBYTES)
        raw.send(wire.OpenBuffer(1, NBYTES), descriptor=descriptor)
        os.close(descriptor)
        raw.send(STEP)
        yield raw
        # The connection serves after every refusal.
        raw.send(STEP)
        raw.send(wire.Query(1, 1, 0, 9, 10.0))
        assert raw.receive() == wire.Answered(1, 1, 0, 9, bytes([Code.LOCAL]), 0, 0)


def open_message(
    view: int, keys: bytes, owners: bytes, heads: int = HEADS, nodes: tuple[str, ...] = ()
) -> wire.OpenView:
    return wire.OpenView(view, "", b"", keys, nodes, owners, heads, SCALE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "bfloat16"}, "expected the layout's float32"),
        ({"parts": ((2, 2),)}, "view 2 is not open"),
        ({"parts": ()}, "at least one part"),
        ({"parts": ((1, 0),)}, "at least one token"),
        ({"buffer": 2}, "buffer 2 is not open"),
        ({"queries": 32}, "a multiple of 64"),
        ({"outputs": NBYTES - 64}, "that fits"),
        ({"sums": NBYTES}, "that fits"),
        ({"parts": ((1, 1 << 30),)}, f"at most {MAX_STEP_BYTES}"),
    ],
)
def test_steps(engine: Raw, changes: dict[str, object], expected: str) -> None:
    engine.send(msgspec.structs.replace(STEP, **changes))
    assert expected in engine.refused().reason
    if changes.get("buffer", 1) == 1:
        engine.send(wire.Query(1, 1, 0, 1, 1.0))
        assert "no step 1" in engine.refused().reason, "the step before it is dropped too"
        assert engine.receive() == wire.Answered(1, 1, 0, 1, b"", 0, 0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (wire.Query(1, 1, LAYOUT.layers, 1, 1.0), f"expected 0 to {LAYOUT.layers - 1}"),
        (wire.Query(1, 2, 0, 1, 1.0), "no step 2"),
        (wire.Query(3, 1, 0, 1, 1.0), "buffer 3 has no step"),
    ],
)
def test_queries(engine: Raw, query: wire.Query, expected: str) -> None:
    """The answer names the query, so that the engine takes no other one for refused."""
    engine.send(query)
    assert expected in engine.refused().reason
    assert engine.receive() == wire.Answered(query.buffer, query.step, query.layer, query.attempt, b"", 0, 0)


@pytest.mark.parametrize(
    ("message", "kind", "expected"),
    [
        (open_message(2, TWO_KEYS, bytes([HERE, HERE]), heads=3), "LayoutRefused", "a multiple of its 2 KV heads"),
        (open_message(2, TWO_KEYS[1:], bytes([HERE, HERE])), "ProtocolRefused", "no multiple of 32"),
        (open_message(2, TWO_KEYS, bytes([HERE])), "ProtocolRefused", "1 owners for 2 keys"),
        (open_message(2, TWO_KEYS, bytes([HERE, 0])), "ProtocolRefused", "beyond the 0 nodes"),
        (open_message(2, bytes(64), bytes([HERE, HERE])), "ProtocolRefused", "named twice"),
        (open_message(2, TWO_KEYS, bytes([0, 1]), nodes=("b", "b")), "ProtocolRefused", "named twice"),
        (open_message(1, bytes(32), bytes([HERE])), "ProtocolRefused", "open already"),
        (open_message(2, TWO_KEYS, bytes([HERE, HERE]), heads=1 << 16), "LimitReached", "65536 heads; at most 1024"),
    ],
)
def test_views(engine: Raw, message: wire.OpenView, kind: str, expected: str) -> None:
    engine.send(message)
    refused = engine.refused()
    assert (refused.view, refused.kind) == (message.view, kind)
    assert expected in refused.reason


def test_a_view_of_unknown_segments_is_empty(engine: Raw) -> None:
    engine.send(open_message(2, TWO_KEYS, bytes([HERE, HERE])))
    assert engine.receive() == wire.Viewed(2, 0, bytes([Code.MISSING]) * 2)


@pytest.mark.parametrize(("nbytes", "sealed"), [(NBYTES, False), (NBYTES // 2, True)])
def test_an_unsealed_or_short_buffer_is_refused(cluster: Cluster, nbytes: int, sealed: bool) -> None:
    with cluster.connect(0, LAYOUT) as pool, raw_engine(pool) as raw:
        descriptor = memfd(nbytes, sealed=sealed)
        raw.send(wire.OpenBuffer(1, NBYTES), descriptor=descriptor)
        os.close(descriptor)
        assert f"expected a sealed memfd of at least {NBYTES} bytes" in raw.refused().reason
        raw.wait_for_end()


def test_views_between_nodes(cluster: Cluster) -> None:
    with raw_peer(cluster, 0, asker=1) as raw:
        layout = LAYOUT.encode()
        raw.send(wire.OpenView(1, "default", layout, bytes(32), (), b"", 3, SCALE))
        assert "a multiple of its 2 KV heads" in raw.refused().reason
        raw.send(wire.OpenView(2, "default", b"nonsense", bytes(32), (), b"", HEADS, SCALE))
        assert raw.refused().kind == LayoutRefused.__name__
        raw.send(wire.OpenView(7, "default", OPAQUE.encode(), bytes(32), (), b"", HEADS, SCALE))
        assert "the layout is opaque: only its 'engine' 'vllm 0.32.0' understands" in raw.refused().reason
        raw.send(wire.OpenView(3, "nobody", layout, bytes(32), (), b"", HEADS, SCALE))
        assert raw.refused().kind == "CredentialRefused"
        raw.send(wire.OpenView(6, "default", layout, bytes(32), (), b"", 1 << 16, SCALE))
        assert "65536 heads; at most 1024" in raw.refused().reason
        wide = msgspec.structs.replace(LAYOUT, kv_heads=1, key_dim=1, value_dim=1 << 20).encode()
        raw.send(wire.OpenView(6, "default", wide, bytes(32), (), b"", 1, SCALE))
        assert "elements per query token" in raw.refused().reason
        raw.send(wire.OpenView(5, "default", layout, bytes(64), (), b"", HEADS, SCALE))
        assert "named twice" in raw.refused().reason
        raw.send(wire.OpenView(4, "default", layout, bytes(32), (), b"", HEADS, SCALE))
        assert raw.receive() == wire.Viewed(4, 0, bytes([Code.MISSING]))


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (wire.Ask(1, LAYOUT.layers, "float32", ((1, 1),), 512), f"layers 0 to {LAYOUT.layers - 1}"),
        (wire.Ask(1, 0, "float16", ((1, 1),), 256), "expected float32"),
        (wire.Ask(1, 0, "float32", ((1, 1),), 511), "expected 512"),
        (wire.Ask(1, 0, "float32", ((1, 0),), 0), "expected 0"),
        (wire.Ask(1, 0, "float32", (), 0), "expected 0"),
    ],
)
def test_a_wrong_ask_ends_the_connection(cluster: Cluster, ask: wire.Ask, expected: str) -> None:
    with raw_peer(cluster, 0, asker=1) as raw:
        raw.send(wire.OpenView(1, "default", LAYOUT.encode(), bytes(32), (), b"", HEADS, SCALE))
        assert isinstance(raw.receive(), wire.Viewed)
        raw.send(ask, bytes(ask.nbytes))
        assert expected in raw.refused().reason
        raw.wait_for_end()


def test_a_request_with_results_that_are_too_large_is_lost(cluster: Cluster) -> None:
    """Its queries take few bytes, its outputs 512 MiB; the connection goes on."""
    layout = msgspec.structs.replace(LAYOUT, layers=1, segment_tokens=1, kv_heads=1, key_dim=1, value_dim=1 << 17)
    with raw_peer(cluster, 0, asker=1) as raw:
        raw.send(wire.OpenView(1, "default", layout.encode(), bytes(32), (), b"", 1, SCALE))
        assert isinstance(raw.receive(), wire.Viewed)
        for number, (tokens, code) in enumerate([(1 << 10, Code.LOST), (1, Code.LOCAL)]):
            raw.send(wire.Ask(number, 0, "float32", ((1, tokens),), 4 * tokens), bytes(4 * tokens))
            assert raw.receive().codes == bytes([code])
            raw.exactly(4 * (layout.value_dim + 1) * tokens * (code == Code.LOCAL))


def test_queries_of_a_closed_view_are_lost(cluster: Cluster) -> None:
    """A view may be closed while a request is under way: the connection goes on behind the queries."""
    with raw_peer(cluster, 0, asker=1) as raw:
        raw.send(wire.OpenView(1, "default", LAYOUT.encode(), bytes(32), (), b"", HEADS, SCALE))
        assert isinstance(raw.receive(), wire.Viewed)
        for number, parts in enumerate([((9, 1),), ((1, 1), (9, 200))]):
            nbytes = 512 * sum(tokens for _, tokens in parts)
            raw.send(wire.Ask(number, 0, "float32", parts, nbytes), bytes(nbytes))
            assert raw.receive() == wire.Result(number, 0, bytes([Code.LOST]) * len(parts), 0)
        raw.send(wire.CloseView((1,)))
        raw.send(wire.Ask(5, 0, "float32", ((1, 1),), 512), bytes(512))
        assert raw.receive() == wire.Result(5, 0, bytes([Code.LOST]), 0)


def test_segments_of_another_layout_are_missing(cluster: Cluster) -> None:
    text = Text(41, 2)
    spread(cluster, [text])
    with cluster.connect(0, LAYOUT) as pool, cluster.connect(0, layout_of("float16")) as other:
        keys = pool.prefix(text.tokens).keys
        with raw_engine(other) as raw:
            raw.send(open_message(1, join_keys(keys), bytes([HERE, HERE])))
            assert raw.receive() == wire.Viewed(1, 0, bytes([Code.MISSING]) * 2), "the slots have another size"
