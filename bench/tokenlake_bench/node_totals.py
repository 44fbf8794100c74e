"""Counters of the nodes over a whole run, those of a killed daemon included."""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake_testing.cluster import Cluster

__all__ = ["NodeTotals"]

SENT = "tokenlake_sent_to_readers_segments_total"


class NodeTotals:
    """Sums of the daemons' counters. A daemon's counters begin at 0 when it starts again, so those from before a kill
    are added."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._counters: list[dict[str, float]] = [{} for _ in cluster.nodes]

    def before_kill(self, node: int) -> None:
        """Read the counters of a daemon that may be killed soon; a later call replaces what an earlier one read."""
        self._counters[node] = self._cluster.nodes[node].metrics()

    def finish(self) -> None:
        """Add the daemons' present counters. Call it once, at the end."""
        for known, node in zip(self._counters, self._cluster.nodes, strict=True):
            for name, value in node.metrics().items():
                known[name] = known.get(name, 0.0) + value

    def total(self, counter: str) -> int:
        """The sum over all nodes."""
        return int(sum(known[counter] for known in self._counters))

    def read_bytes(self, local_segments: Sequence[int], segment_bytes: int) -> dict[str, int]:
        """Bytes read from each node's arena by its own engine and for readers at other nodes. `local_segments`: per
        node with an engine, the segments that its engine read there; the nodes after these have no engine."""
        local = [*local_segments, *[0] * (len(self._counters) - len(local_segments))]
        return {
            node.name: (own + int(known[SENT])) * segment_bytes
            for node, known, own in zip(self._cluster.nodes, self._counters, local, strict=True)
        }
