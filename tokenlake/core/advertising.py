"""Telling a home what this node holds, after the home may have missed it."""

from __future__ import annotations

from tokenlake.core.context import Context
from tokenlake.core.peers import Peers
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.store import Kind, Segment, State
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys

__all__ = ["Advertising"]

BATCH = 1024
"""Segments looked at per turn: less than a millisecond of the loop."""
PAUSE_S = 0.005


class Advertising:
    """One sweep over the home copies per peer; a new sweep replaces an unfinished one."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._sweeps: dict[NodeId, int] = {}

    def begin(self, node: NodeId) -> None:
        """Tell `node` all home copies here whose home it is, then `Advertised`."""
        sweep = self._context.next_id()
        self._sweeps[node] = sweep
        segments = [s for s in self._context.store.segments() if s.state is State.READY and s.kind is Kind.HOME]
        self._turn(node, sweep, segments, 0)

    def _turn(self, node: NodeId, sweep: int, segments: list[Segment], start: int) -> None:
        if self._sweeps.get(node) != sweep or not self._peers.reachable(node):
            return
        batch = [s for s in segments[start : start + BATCH] if s.state is State.READY and s.kind is Kind.HOME]
        by_tenant: dict[TenantId, list[SegmentKey]] = {}
        for segment in batch:
            by_tenant.setdefault(segment.tenant, []).append(segment.key)
        for tenant, keys in by_tenant.items():
            homed = self._context.by_home(keys).get(node)
            if homed:
                self._peers.tell(node, wire.Held(tenant, join_keys(homed)))
        if start + BATCH < len(segments):
            self._context.after(PAUSE_S, lambda: self._turn(node, sweep, segments, start + BATCH))
        else:
            del self._sweeps[node]
            self._peers.tell(node, wire.Advertised())

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"sweeps": len(self._sweeps)}
