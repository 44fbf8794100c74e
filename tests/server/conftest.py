"""Daemons that must serve after each test."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, outcomes, read, store
from tokenlake.wire import Code
from tokenlake_testing.cluster import Cluster, Node


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with daemons(2) as cluster:
        yield cluster


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    """A daemon that serves before and after."""
    yield cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        prompt = Prompt(random.randrange(1 << 30), 3)
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 3
