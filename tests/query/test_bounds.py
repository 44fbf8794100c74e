"""Memory, descriptors and threads of a query engine do not grow with the number of views it has served."""

from __future__ import annotations

import pytest

from tests.query.scene import LAYOUT, Text, draw_queries, engine_of, open_view, spread
from tests.robustness.live import accounted, descriptors_of, memory_of, threads_of, wait_until
from tokenlake_testing.cluster import Cluster

pytest.importorskip("torch")
pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

VIEWS = 300
GROWTH = 2 << 20
"""Growth that the allocator needs until it settles, in bytes; `VIEWS` leaked views would take much more."""


def test_closed_views_leave_no_memory_descriptors_or_threads(cluster: Cluster) -> None:
    texts = [Text(60 + number, 12) for number in range(3)]
    spread(cluster, texts)
    processes = [engine_of(node) for node in cluster.nodes]
    with cluster.connect(0, LAYOUT) as pool:

        def use(views: int) -> None:
            for number in range(views):
                text = texts[number % 3]
                with open_view(pool, text) as view, pool.queries.init_query([(view, 2)]) as buffer:
                    buffer.queries[...] = draw_queries(number, 2)
                    assert not pool.queries.query(buffer, number % LAYOUT.layers, deadline_s=10.0).wait().lost

        use(60)
        before = [(memory_of(pid), descriptors_of(pid), threads_of(pid)) for pid in processes]
        use(VIEWS)
        after = [(memory_of(pid), descriptors_of(pid), threads_of(pid)) for pid in processes]
    for (memory, descriptors, threads), (memory_now, descriptors_now, threads_now) in zip(before, after, strict=True):
        assert memory_now - memory < GROWTH
        assert descriptors_now <= descriptors + 4, "no more than a new connection with each other node"
        # Threads of a thread pool start when they are first needed.
        assert threads_now <= threads + 16


def test_closed_engines_leave_no_leases_or_descriptors(cluster: Cluster) -> None:
    """The views, buffers and leases of a closed engine end at this node and at the other nodes."""
    text = Text(70, 12)
    spread(cluster, [text])
    processes = [engine_of(node) for node in cluster.nodes]

    def come_and_go() -> None:
        with cluster.connect(0, LAYOUT) as pool:
            view = open_view(pool, text)
            assert not pool.queries.query(pool.queries.init_query([(view, 64)]), 0, deadline_s=10.0).wait().lost

    come_and_go()
    before = [descriptors_of(pid) for pid in processes]
    for _ in range(30):
        come_and_go()

    def closed() -> bool:
        # One connection with each other node may have been opened since; a leak would leave thirty times as many.
        return all(descriptors_of(pid) <= most + 4 for pid, most in zip(processes, before, strict=True))

    wait_until(closed, "their connections and buffers are closed")
    for node in cluster.nodes:
        wait_until(lambda node=node: accounted(node), f"no segment of {node.name} is leased")  # type: ignore[misc]
