"""Two nodes with the default settings store and serve segments of real models, one model after another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from tests.robustness.live import LIMIT_S, total, wait_until
from tokenlake.config import ServerConfig
from tokenlake.identity import SegmentKey
from tokenlake.memory.region import RegionShape
from tokenlake.opaque_layout import AnyLayout, OpaqueLayout
from tokenlake_client import Deadlines, MatchOptions, Pool
from tokenlake_server.start.models import MODELS
from tokenlake_testing.cluster import Cluster, Node

pytestmark = [pytest.mark.live, pytest.mark.rest]

MEMORY = ServerConfig().memory
SERVED = (
    "Llama-3.2-1B",
    "Llama-3-70B",
    "Llama-3.1-8B",
    "Llama-2-7B",
    "DeepSeek-V3",
    "Qwen3-32B",
    "gpt-oss-20b",
    "Qwen3-235B-A22B",
)
"""Small and large segments in turn, so that memory goes from each size to one that its regions do not fit."""
READ = 3
"""The number of segments of a model that the other node reads: the first, the last and one between them."""
STAMP = 64
"""The number of bytes that are written at the beginning, in the middle and at the end of a segment."""
NEARLY_ALL = 0.97
"""The share of memory that holds segments of a model, where memory has room for at least `MANY` of them."""
MANY = 34
AHEAD = 16
"""The part of all segments for which more slots are asked for at a time."""
SEGMENTS, SLOTS = "tokenlake_segments", "tokenlake_slots"
RECEIVED = "tokenlake_received_bytes_total"
FOLLOW_S = 60.0
"""Seconds within which memory has gone to the model that uses it: on a busy machine, whose pages are new to it, most of
them are those of populating."""
INDEPENDENT = MatchOptions(independent=True)
PATIENT = Deadlines(call_s=LIMIT_S, match_s=LIMIT_S, fetch_s=LIMIT_S, store_s=LIMIT_S)


class Segments:
    """As many segments of one model as fit into the memory of a node, with bytes of their own at three places."""

    def __init__(self, layout: AnyLayout, pool: Pool) -> None:
        self.layout = layout
        count = RegionShape(MEMORY, layout.segment_bytes).slots
        if isinstance(layout, OpaqueLayout):
            self.keys = pool.opaque_keys(
                (0, hashlib.sha256(bytes([at // 256, at % 256])).digest()) for at in range(count)
            )
        else:
            self.keys = list(pool.prefix(range(count * layout.segment_tokens)).keys)
        self.read = [self.keys[at] for at in np.linspace(0, count - 1, READ, dtype=int)]
        """The segments that the other node reads."""
        self._hashes: dict[SegmentKey, int] = {}

    @property
    def least(self) -> int:
        """The number of these segments that a node must hold at a time."""
        count = len(self.keys)
        nearly_all = int(-(-NEARLY_ALL * MEMORY // self.layout.segment_bytes))
        return min(count, nearly_all) if count >= MANY else count

    def stamps(self, key: SegmentKey) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
        """The three places in a segment, and the bytes that lie there."""
        size = self.layout.segment_bytes
        for number, start in enumerate((0, size // 2, size - STAMP)):
            stamp = hashlib.shake_128(key + bytes([number])).digest(STAMP)
            yield slice(start, start + STAMP), np.frombuffer(stamp, np.uint8)

    def of_size(self, node: Node, name: str) -> float:
        """A metric of the slots of this size."""
        label = f'slot_bytes="{self.layout.segment_bytes}"'
        return sum(value for key, value in node.metrics().items() if key.split("{")[0] == name and label in key)

    def store(self, pool: Pool, stop: int | None = None) -> None:
        """Store those before `stop` that the pool lacks. Between the stamps, the segments that are read are zero, and
        the others have the bytes that the slot had: most of the time of a store would be for filling it."""

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            key = self.keys[index]
            if key in self.read:
                slot[:] = 0
            for place, stamp in self.stamps(key):
                slot[place] = stamp
            if key in self.read:
                self._hashes[key] = xxhash.xxh3_64_intdigest(slot.data)

        pool.store_all(self.keys[:stop], fill, patience=LIMIT_S)

    def check(self, key: SegmentKey, array: NDArray[np.uint8]) -> None:
        """The array has the stamps of the segment, and all bytes that were stored."""
        for place, stamp in self.stamps(key):
            np.testing.assert_array_equal(array[place], stamp)
        assert xxhash.xxh3_64_intdigest(array.data) == self._hashes[key]


def fill_memory(node: Node, pool: Pool, segments: Segments) -> None:
    """Store until `segments.least` are in the memory of `node`, and those that are read. Each time some more are asked
    for than there are slots: this moves memory, and evicts few of them."""

    def filled() -> bool:
        segments.store(pool, int(segments.of_size(node, SLOTS)) + max(4, len(segments.keys) // AHEAD))
        with pool.match(segments.read, INDEPENDENT) as lease:
            readable = lease.local_hits == READ
        return readable and segments.of_size(node, SEGMENTS) >= segments.least

    wait_until(filled, f"{segments.least} segments of {segments.layout.model_id} are in memory", FOLLOW_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    pair = Cluster(2, "", "")
    for node in pair.nodes:
        del node.settings["memory"], node.settings["region-size"]
    pair.deadlines = PATIENT
    with pair:
        yield pair


def read_elsewhere(reader: Pool, writer: Pool, segments: Segments) -> None:
    """Read segments at another node, and check their bytes. A segment that was lost meanwhile is stored again."""
    left = list(segments.read)

    def read() -> bool:
        with reader.match(left, INDEPENDENT) as lease:
            for key, array in zip(lease.keys, lease.fetch(), strict=False):
                segments.check(key, array)
                left.remove(key)
        if left:
            segments.store(writer)
        return not left

    wait_until(read, f"segments of {segments.layout.model_id} are read at the other node", FOLLOW_S)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SERVED)
def test_a_model_uses_the_memory_that_another_one_had(cluster: Cluster, name: str) -> None:
    """Each model fills the memory of one node, and the other node reads some of its segments. Some may be there
    already: a full node hands segments over to an emptier one."""
    layout = next(model for model in MODELS if model.name == name).layout()
    before = total(cluster.nodes[1], RECEIVED)
    with cluster.connect(0, layout) as writer, cluster.connect(1, layout) as reader:
        segments = Segments(layout, writer)
        fill_memory(cluster.nodes[0], writer, segments)
        assert total(cluster.nodes[0], "tokenlake_used_bytes") <= MEMORY
        read_elsewhere(reader, writer, segments)
    assert total(cluster.nodes[1], RECEIVED) - before >= READ * layout.segment_bytes


def test_the_models_have_segments_of_different_sizes() -> None:
    """No model finds regions of its size, and the segments of a size are those of one model."""
    sizes = {model.layout().segment_bytes for model in MODELS if model.name in SERVED}
    assert len(sizes) == len(SERVED) >= 8
