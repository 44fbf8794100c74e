"""What a node knows of everybody's hot segments.

Each directory node pushes its whole set, under a version, to every other node when it changes. A set counts for one
life of its
home. A node whose version is old asks nodes that have nothing any more, or not those that do: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tokenlake.hot.rule import HotItem
from tokenlake.identity import Incarnation, NodeId

__all__ = ["KnownSets"]

_NOBODY: tuple[NodeId, ...] = ()


class _OfDirectoryNode(NamedTuple):
    incarnation: Incarnation
    version: int
    nodes: dict[HotItem, tuple[NodeId, ...]]


class KnownSets:
    """Sets by directory node; the newest of each."""

    def __init__(self) -> None:
        self._of: dict[NodeId, _OfDirectoryNode] = {}
        self._nodes: dict[HotItem, tuple[NodeId, ...]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def learn(
        self,
        directory_node: NodeId,
        incarnation: Incarnation,
        version: int,
        nodes: Mapping[HotItem, tuple[NodeId, ...]],
    ) -> bool:
        """The whole set of `directory node`. False when a newer one of the same life is known."""
        known = self._of.get(directory_node)
        if known is not None and known.incarnation == incarnation and known.version >= version:
            return False
        self.drop(directory_node)
        self._of[directory_node] = _OfDirectoryNode(incarnation, version, dict(nodes))
        self._nodes.update(nodes)
        return True

    def drop(self, directory_node: NodeId) -> None:
        """It has none any more."""
        known = self._of.pop(directory_node, None)
        for item in known.nodes if known is not None else ():
            del self._nodes[item]

    def version(self, directory_node: NodeId, incarnation: Incarnation) -> int:
        """Of the newest set known of that life; 0: none."""
        known = self._of.get(directory_node)
        return known.version if known is not None and known.incarnation == incarnation else 0

    def directory_nodes(self) -> list[NodeId]:
        """Those of which a set is known."""
        return list(self._of)

    def of(self, directory_node: NodeId) -> Mapping[HotItem, tuple[NodeId, ...]]:
        """The set of `directory node`."""
        known = self._of.get(directory_node)
        return known.nodes if known is not None else {}

    def nodes(self, item: HotItem) -> tuple[NodeId, ...]:
        """Who has a copy, owner first; empty: it is not hot."""
        return self._nodes.get(item, _NOBODY)

    def items(self) -> Iterator[tuple[HotItem, tuple[NodeId, ...]]]:
        """All of them."""
        return iter(self._nodes.items())

    def check_integrity(self) -> None:
        """AssertionError when the sets and their union differ."""
        union = {item: nodes for known in self._of.values() for item, nodes in known.nodes.items()}
        assert union == self._nodes
