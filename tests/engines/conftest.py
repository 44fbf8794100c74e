"""Engine tests need torch and transformers; without the extra they are skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.faulty_pool import FaultyPool, opened
from tests.query.scene import serving
from tokenlake_testing.cluster import Cluster

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _quiet_transformers() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def model() -> Any:
    """A small model, whose heads share keys and values."""
    from tests.engines.models import family

    return family("llama-gqa")


@pytest.fixture
def pool(model: Any) -> FaultyPool:
    """An empty pool for the model."""
    from tests.engines.models import SEGMENT
    from tokenlake_client.engines.transformers import layout_of

    return FaultyPool(layout_of(model, segment_tokens=SEGMENT))


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Three nodes with query engines, each of which takes seconds to import torch."""
    with serving(3, "64MiB") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_open_pool() -> Iterator[None]:
    yield
    while opened:
        pool = opened.pop()
        if isinstance(pool, FaultyPool):
            pool.broken.clear()
        pool.close()
