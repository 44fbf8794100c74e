"""Telling a directory node what this node holds, after the directory node may have missed it."""

from __future__ import annotations

from tokenlake.core.context import Context
from tokenlake.core.peers import Peers
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.store import Cursor, Kind, State
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys

__all__ = ["Advertising"]

SLOTS = 512
"""Looked at per slice."""


class Advertising:
    """One walk over the primary copies per peer; a new one replaces an unfinished one."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._walks: dict[NodeId, int] = {}

    def begin(self, node: NodeId) -> None:
        """Send `node` the keys of all primary copies here whose directory node it is, then `AdvertisingDone`. The node
        is reachable, so it hears of new primary copies meanwhile as every directory node does."""
        number = self._context.next_id()
        self._walks[node] = number
        cursor: Cursor | None = Cursor()

        def work() -> bool:
            nonlocal cursor
            if self._walks.get(node) != number or cursor is None:
                return False
            reachable = self._peers.reachable(node)
            cursor = self._tell(node, cursor) if reachable else None
            if cursor is not None:
                return True
            del self._walks[node]
            if reachable:
                self._peers.tell(node, wire.AdvertisingDone())
            return False

        self._context.in_slices(work)

    def _tell(self, node: NodeId, start: Cursor) -> Cursor | None:
        segments, following = self._context.store.walk(start, SLOTS)
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        for segment in segments:
            if segment.state is State.READY and segment.kind is Kind.PRIMARY:
                by_tenant.setdefault(segment.tenant, []).append(segment.key)
        for tenant, keys in by_tenant.items():
            its_keys = self._context.by_directory_node(keys).get(node)
            if its_keys:
                self._peers.tell(node, wire.PrimaryCopies(tenant, join_keys(its_keys)))
        return following

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"advertisings": len(self._walks)}
