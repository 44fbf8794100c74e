"""Three daemons and a pool at each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.robustness.live import LAYOUT, daemons
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with daemons(3, "24MiB", "4MiB") as cluster:
        yield cluster


@pytest.fixture
def pools(cluster: Cluster) -> Iterator[list[Pool]]:
    """One pool at each node. None of them verifies checksums."""
    pools = [cluster.connect(number, LAYOUT) for number in range(3)]
    yield pools
    for pool in pools:
        pool.close()
