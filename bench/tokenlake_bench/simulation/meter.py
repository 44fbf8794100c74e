"""Log of the bytes that simulated nodes send to each other, each with the nodes that could have sent it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.identity import SegmentKey, TenantId
from tokenlake.memory import SegmentStore, State
from tokenlake_bench.balance import SendLog


class Meter:
    """Logs each segment that a simulated node sends. Times are those of the workload."""

    def __init__(self, stores: Sequence[SegmentStore], segment_bytes: int, begins_s: float, most: int = 0) -> None:
        """`stores`: the segment stores by node, which are only read. `begins_s`: time of the simulated clock at which
        the workload begins. `most`: number of nodes with those that join later (`add`), if any do."""
        self.log = SendLog(max(len(stores), most))
        self._stores = list(stores)
        self._segment_bytes = segment_bytes
        self._begins_s = begins_s

    def add(self, store: SegmentStore) -> None:
        """Count the segments of another node, which joins."""
        self._stores.append(store)

    def read(self, now: float, node: int, reader: int, tenant: str, keys: Sequence[bytes]) -> None:
        """Log that `node` sends these segments to an engine of node `reader`. As possible senders of each segment the
        nodes other than the reader's with a READY copy are noted."""
        others = [(index, store.index(TenantId(tenant))) for index, store in enumerate(self._stores) if index != reader]
        ready = State.READY
        for key in map(SegmentKey, keys):
            holders = [
                index
                for index, segments in others
                if (segment := segments.get(key)) is not None and segment.state is ready
            ]
            self.log.add(now - self._begins_s, node, self._segment_bytes, tuple(holders))

    def handed_over(self, now: float, node: int, segments: int) -> None:
        """Log that `node` hands this number of segments over to another node, which becomes their owner."""
        self.log.add(now - self._begins_s, node, segments * self._segment_bytes)
