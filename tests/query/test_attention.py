"""Results of the query engines equal attention over the concatenated segments."""

from __future__ import annotations

import pytest

from tests.query.scene import (
    DEADLINE_S,
    HEADS,
    LAYOUT,
    Text,
    close_to,
    draw_queries,
    layout_of,
    open_view,
    serving,
    spread,
    wait_serving,
)
from tests.robustness.live import wait_until
from tests.server.certified import encrypted
from tokenlake.attention import Partial
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.queries import View
from tokenlake_testing.cluster import Cluster, Node

pytest.importorskip("torch")
pytestmark = pytest.mark.live

TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def check(pool: Pool, parts: list[tuple[View, Text, int]], tolerance: float = 1e-5, rounds: int = 1) -> int:
    """Query every layer and compare; returns the bytes that went over the network."""
    moved = 0
    layout = parts[0][1].layout
    with pool.queries.init_query([(view, tokens) for view, _, tokens in parts]) as buffer:
        for layer in [layer for layer in range(layout.layers) for _ in range(rounds)]:
            buffer.queries[...] = draw_queries(layer, len(buffer.queries), layout)
            answer = pool.queries.query(buffer, layer, deadline_s=DEADLINE_S).wait()
            assert not answer.lost
            start = 0
            for _, text, tokens in parts:
                rows = slice(start, start + tokens)
                start += tokens
                expected = text.attention(buffer.queries[rows], layer)
                close_to(Partial(answer.output[rows], answer.sums[rows]), expected, tolerance)
            moved += answer.sent_bytes + answer.received_bytes
    return moved


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_segments_of_three_nodes(cluster: Cluster, dtype: str) -> None:
    layout = layout_of(dtype)
    text = Text(2, 16, layout=layout)
    spread(cluster, [text])
    with cluster.connect(0, layout) as pool, open_view(pool, text) as view:
        assert set(view.codes) == {Code.LOCAL, Code.REMOTE}
        assert check(pool, [(view, text, 3)], TOLERANCE[dtype]) > 0
        assert pool.match(pool.prefix(text.tokens).keys).local_hits < text.segments, "nothing was fetched"


def test_segments_of_an_encrypted_node() -> None:
    """The daemons hand the query engines the keys of their connections."""
    with encrypted(2, "8MiB", query_engine="true") as cluster:
        for number in range(2):
            wait_serving(cluster, number)
        text = Text(7, 6)
        spread(cluster, [text])
        with cluster.connect(0, LAYOUT) as pool, open_view(pool, text) as view:
            assert set(view.codes) == {Code.LOCAL, Code.REMOTE}
            assert check(pool, [(view, text, 5)]) > 0


def test_attention_for_other_nodes_is_counted() -> None:
    """At the node that computes it, in bytes and seconds; attention that a node computes for its own engine is not."""
    text, tokens = Text(20, 16), 3
    each = tokens * HEADS * (LAYOUT.value_dim + 1) * 4

    def counted(node: Node) -> list[float]:
        metrics = node.metrics()
        return [metrics[f"tokenlake_query_engine_result{suffix}"] for suffix in ("s", "_bytes", "_seconds")]

    with serving(2) as cluster:
        spread(cluster, [text])
        with cluster.connect(0, LAYOUT) as pool, open_view(pool, text) as view:
            assert set(view.codes) == {Code.LOCAL, Code.REMOTE}
            check(pool, [(view, text, tokens)])
        reader, other = cluster.nodes
        wait_until(lambda: counted(other)[0] == LAYOUT.layers, "the query engine reported")
        results, nbytes, seconds = counted(other)
        assert nbytes == results * each
        assert seconds > 0
        assert counted(reader) == [0, 0, 0]


def test_a_batch_with_a_shared_prefix(cluster: Cluster) -> None:
    head = Text(3, 6)
    texts = [head, Text(4, 5, shared=head), Text(5, 2, shared=head), Text(6, 9)]
    spread(cluster, texts)
    with cluster.connect(0, LAYOUT) as pool:
        views = [open_view(pool, text) for text in texts]
        parts = [(view, text, tokens) for view, text, tokens in zip(views, texts, (1, 7, 2, 33), strict=True)]
        check(pool, parts)
        # One step has the same view twice, as two requests with the same prompt do.
        check(pool, [parts[1], parts[1], parts[3]])
