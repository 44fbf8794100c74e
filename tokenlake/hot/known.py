"""The hot sets of all directory nodes, as one node knows them.

A directory node sends its whole hot set, with a version, to every other node when it changes. A set belongs to one
incarnation of its directory node. A node with an old version asks nodes that no longer have a copy, or misses new
copies: reads take longer, and no read is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tokenlake.hot.rule import HotItem
from tokenlake.identity import Incarnation, NodeId

__all__ = ["KnownSets"]

_NONE: tuple[NodeId, ...] = ()


class _HotSet(NamedTuple):
    incarnation: Incarnation
    version: int
    nodes: dict[HotItem, tuple[NodeId, ...]]


class KnownSets:
    """The newest known hot set of each directory node, and their union. A segment has one directory node, so the sets
    are disjoint."""

    def __init__(self) -> None:
        self._sets: dict[NodeId, _HotSet] = {}
        self._nodes: dict[HotItem, tuple[NodeId, ...]] = {}

    def __len__(self) -> int:
        """Segments in all sets."""
        return len(self._nodes)

    def learn(
        self,
        directory_node: NodeId,
        incarnation: Incarnation,
        version: int,
        nodes: Mapping[HotItem, tuple[NodeId, ...]],
    ) -> bool:
        """Replace the set of `directory_node`. `nodes`: per segment, the nodes with a copy, the owner first. Returns
        False, and changes nothing, when this or a newer version of the same incarnation is known."""
        known = self._sets.get(directory_node)
        if known is not None and known.incarnation == incarnation and known.version >= version:
            return False
        self.drop(directory_node)
        self._sets[directory_node] = _HotSet(incarnation, version, dict(nodes))
        self._nodes.update(nodes)
        return True

    def drop(self, directory_node: NodeId) -> None:
        """Forget the set of `directory_node`."""
        known = self._sets.pop(directory_node, None)
        for item in known.nodes if known is not None else ():
            del self._nodes[item]

    def version(self, directory_node: NodeId, incarnation: Incarnation) -> int:
        """The version of the known set of that incarnation; 0 where none is known."""
        known = self._sets.get(directory_node)
        return known.version if known is not None and known.incarnation == incarnation else 0

    def directory_nodes(self) -> list[NodeId]:
        """The directory nodes whose sets are known."""
        return list(self._sets)

    def of(self, directory_node: NodeId) -> Mapping[HotItem, tuple[NodeId, ...]]:
        """The known set of `directory_node`; empty where none is known."""
        known = self._sets.get(directory_node)
        return known.nodes if known is not None else {}

    def nodes(self, item: HotItem) -> tuple[NodeId, ...]:
        """The nodes with a copy, owner first; empty where the segment is in no known set."""
        return self._nodes.get(item, _NONE)

    def check_integrity(self) -> None:
        """AssertionError when the union is not that of the sets."""
        union = {item: nodes for known in self._sets.values() for item, nodes in known.nodes.items()}
        assert union == self._nodes
