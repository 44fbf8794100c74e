"""One cluster with query engines for the tests of this package: each of its processes takes seconds to import torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.query.scene import serving
from tokenlake_testing.cluster import Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with serving(3) as cluster:
        yield cluster
