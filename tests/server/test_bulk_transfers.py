"""Large fetches, in two halves over two connections, and shards that exceed the size of a cached piece."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT_S, daemons, wait_told
from tests.server.certified import encrypted
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_server.bulk.receiver import CACHED_BYTES, HALVES_BYTES
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live

LARGE = Layout(**(msgspec.structs.asdict(LAYOUT) | {"model_id": "large", "segment_tokens": 3072}))
"""3 MiB in two shards: each is received in pieces, the last of them half as long."""
COUNT = 8


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "encrypted"])
def two(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = encrypted if request.param else daemons
    with made(2, memory="96MiB", region_size="32MiB", cached_share="0.5") as cluster:
        yield cluster


def store_at_first(two: Cluster, seed: int) -> tuple[list[SegmentKey], NDArray[np.uint8]]:
    """Store at the first node while the second is down, so that the first one keeps the segments."""
    second = two.nodes[1]
    second.kill()
    draw = np.random.default_rng(seed)
    content = draw.integers(0, 256, (COUNT, LARGE.segment_bytes), dtype=np.uint8)
    with two.connect(0, LARGE) as pool:
        keys = pool.prefix(draw.integers(0, 1 << 17, COUNT * LARGE.segment_tokens).tolist()).keys
        assert pool.store_all(keys, content, patience=LIMIT_S) == bytes([Code.COMMITTED]) * COUNT
        wait_told(two)
    second.start()
    two.wait_ready()
    return list(keys), content


def test_both_halves_of_a_large_fetch(two: Cluster) -> None:
    keys, content = store_at_first(two, 1)
    assert LARGE.segment_bytes // LARGE.shards > CACHED_BYTES
    assert content.nbytes > HALVES_BYTES
    with two.connect(1, LARGE) as pool, pool.match(keys, deadline_s=PATIENT_S) as lease:
        assert lease.codes == bytes([Code.REMOTE]) * COUNT
        out = np.zeros_like(content)
        assert lease.copy_into(list(out), deadline_s=LIMIT_S) == COUNT
        assert np.array_equal(out, content)


def test_a_flipped_bit_in_the_second_half(two: Cluster) -> None:
    """Only the segment with the flipped bit is a miss."""
    keys, content = store_at_first(two, 2)
    with two.connect(0, LARGE) as pool, pool.match(keys, deadline_s=PATIENT_S) as lease:
        region, slot, _ = lease.places[6].tolist()
        pool.link.regions.get(region, write=True).slots[slot][-1] ^= 1
    with two.connect(1, LARGE) as pool, pool.match(keys, deadline_s=PATIENT_S) as lease:
        arrays = lease.fetch(deadline_s=LIMIT_S)
        assert len(arrays) == 6
        assert np.array_equal(np.stack(arrays), content[:6])
        after = lease.fetch(7, deadline_s=LIMIT_S)
        assert np.array_equal(np.stack(after), content[7:])
        del arrays, after


def test_one_fetch_for_several_threads(two: Cluster) -> None:
    keys, content = store_at_first(two, 3)
    right: list[bool] = []
    with two.connect(1, LARGE) as pool, pool.match(keys, deadline_s=PATIENT_S) as lease:

        def read() -> None:
            out = np.zeros_like(content)
            right.append(lease.copy_into(list(out), deadline_s=LIMIT_S) == COUNT and np.array_equal(out, content))

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert right == [True] * 3
