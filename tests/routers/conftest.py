"""The real proxy of LiteLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, daemons
from tests.routers.between import Between
from tests.routers.scene import DEADLINE_MS, Engine, Proxy
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with daemons(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pools(two: Cluster) -> Iterator[list[Pool]]:
    """One pool at each node."""
    pools = [two.connect(number, LAYOUT) for number in range(2)]
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Engine]]:
    """An engine at each node."""
    engines = [Engine("A"), Engine("B")]
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def between(two: Cluster, pools: list[Pool]) -> Iterator[Between]:
    """Between the proxy and the first node."""
    between = Between(two.nodes[0])
    yield between
    between.close()


@pytest.fixture(scope="module")
def proxy(
    two: Cluster, between: Between, engines: list[Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    directory: Path = tmp_path_factory.mktemp("litellm")
    nodes = [(engine, node.name) for engine, node in zip(engines, two.nodes, strict=True)]
    settings = {"control": [str(between.socket)], "deadline_ms": DEADLINE_MS}
    proxy = Proxy(directory, nodes, settings)
    try:
        proxy.ready()
        proxy.wait_log("is asked where requests start soonest")
        yield proxy
    finally:
        proxy.close()
