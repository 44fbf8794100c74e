"""Checksums of shards, and copies that make them."""

from __future__ import annotations

import numpy as np
import pytest

from tokenlake_client.checksums import copy_with_checksums, shard_checksums
from tokenlake_client.parallel_copy import ParallelCopy


@pytest.mark.parametrize("shards", [1, 8, 32, 64])
@pytest.mark.parametrize("nbytes", [4096, 1 << 20, (9 << 20) + 64])
def test_copies_and_their_checksums(shards: int, nbytes: int) -> None:
    """Among the sizes are shards larger than the processor's cache, which are hashed in pieces."""
    parallel_copy = ParallelCopy()
    source = np.random.default_rng(shards).integers(0, 256, (3, nbytes), dtype=np.uint8)
    slots = np.zeros_like(source)
    made = copy_with_checksums(list(zip(slots, source, strict=True)), shards, parallel_copy)
    assert np.array_equal(slots, source)
    assert made == [shard_checksums(segment, shards) for segment in source]
    assert copy_with_checksums([], shards, parallel_copy) == []
