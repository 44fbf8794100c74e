"""Sums the counters of the nodes' daemons over a whole run, including those of a daemon that was killed."""

from __future__ import annotations

from tokenlake_testing.cluster import Cluster

SENT_BYTES = "tokenlake_sent_bytes_total"


class NodeTotals:
    """Sums of the daemons' counters over a run. The counters of a daemon begin at 0 when it starts again, so those from
    before a kill are added."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._counters: list[dict[str, float]] = [{} for _ in cluster.nodes]

    def before_kill(self, node: int) -> None:
        """Read the counters of a daemon that is about to be killed; a later call replaces the values of an earlier
        one."""
        self._counters[node] = self._cluster.nodes[node].metrics()

    def finish(self) -> None:
        """Add the present counters of all daemons to the sums. Must be called once, at the end of the run."""
        for known, node in zip(self._counters, self._cluster.nodes, strict=True):
            for name, value in node.metrics().items():
                known[name] = known.get(name, 0.0) + value

    def total(self, counter: str) -> int:
        """The value of one counter, summed over all nodes and the whole run."""
        return int(sum(known[counter] for known in self._counters))

    def sent_bytes(self) -> dict[str, int]:
        """Bytes of segments that each node sent to other nodes, by name of the node."""
        return {
            node.name: int(known[SENT_BYTES]) for node, known in zip(self._cluster.nodes, self._counters, strict=True)
        }
