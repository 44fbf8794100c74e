"""The real proxy of LiteLLM, where it is installed: `make install-routers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, daemons
from tests.routers.scene import ROUTERS, Engine, Proxy
from tests.server.control.scene import socket_of
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

if not (ROUTERS / ".installed").exists():
    pytest.skip("the routers are not installed: make install-routers", allow_module_level=True)


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
def proxy(
    two: Cluster, pools: list[Pool], engines: list[Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    directory: Path = tmp_path_factory.mktemp("litellm")
    nodes = [(engine, node.name) for engine, node in zip(engines, two.nodes, strict=True)]
    settings = {"control": [str(socket_of(two.nodes[0]))], "deadline_ms": 2000}
    proxy = Proxy(directory, nodes, settings)
    try:
        proxy.ready()
        proxy.wait_log("is asked where requests start soonest")
        yield proxy
    finally:
        proxy.close()
