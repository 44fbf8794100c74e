"""Segments that this node found when it started, in kept memory or on disk: directory nodes are told of them at a
bounded rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.context import Context
from tokenlake.identity import SegmentKey, TenantId

TOLD = 128
"""Segments that are told to directory nodes at once, before other events are handled."""


class Found:
    """The segments of which directory nodes are still to be told that this node owns them."""

    def __init__(
        self, context: Context, directory_node: DirectoryNode, owned: Callable[[TenantId, SegmentKey], bool]
    ) -> None:
        """`owned`: whether this node still owns a segment that was found."""
        self._context = context
        self._directory_node = directory_node
        self._owned = owned
        self._left: deque[tuple[TenantId, list[SegmentKey]]] = deque()

    def __len__(self) -> int:
        return sum(len(keys) for _, keys in self._left)

    def add(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """Tell the directory nodes of these segments, some at a time, behind those that were added before."""
        if not keys:
            return
        begin = not self._left
        self._left.append((tenant, keys))
        if begin:
            self._context.in_slices(self._tell_some, later=True)

    def _tell_some(self) -> bool:
        tenant, keys = self._left[0]
        some = [key for key in keys[:TOLD] if self._owned(tenant, key)]
        del keys[:TOLD]
        if not keys:
            self._left.popleft()
        self._directory_node.tell_owned(tenant, some)
        return bool(self._left)
