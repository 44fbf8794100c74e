"""A tenant that does its worst changes neither the hits nor the bytes of another tenant."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.robustness.neighbour import WORST, neighbours, read_all, worst

pytestmark = [pytest.mark.live, pytest.mark.rest]


@pytest.mark.parametrize("kind", WORST)
def test_a_tenant_that_does_its_worst(kind: str) -> None:
    """The other tenant connects, stores and reads meanwhile."""
    query_engine = kind == "queries"
    if query_engine and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    with neighbours(query_engine=query_engine) as cluster:
        node = cluster.nodes[0]
        alone = read_all(node, 1000, queries=query_engine)
        with worst(kind, node):
            disturbed = read_all(node, 2000, queries=query_engine)
        assert (disturbed.hits, disturbed.wrong, disturbed.lost) == (alone.hits, 0, 0)
        assert (alone.hits, alone.wrong, alone.lost) == (alone.asked, 0, 0)
