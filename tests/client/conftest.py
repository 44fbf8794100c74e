"""Daemons and pools for the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.robustness.live import LAYOUT, census, daemons, total, wait_until
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One daemon of this test's own, which it may kill, freeze or fill."""
    with daemons() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """One daemon for the tests of a module."""
    with daemons() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three daemons for the tests of a module."""
    with daemons(3) as cluster:
        yield cluster


@pytest.fixture
def pool(shared: Cluster) -> Iterator[Pool]:
    """A pool at `shared` that leaves nothing behind."""
    with shared.connect(0, LAYOUT) as pool:
        yield pool
    wait_until(lambda: census(shared.nodes[0]) == 0, "the daemon processed Bye")
    assert total(shared.nodes[0], "tokenlake_quarantined_slots") == 0
