"""Reads keep segments alive: here at once, at the holders of copies in batches."""

from __future__ import annotations

from tokenlake.core.context import Context
from tokenlake.core.peers import Peers
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.store import Kind, Segment, State
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys

__all__ = ["Touches"]

MAX_TOUCHED = 4096
"""Keys in one report to one holder; more reads of copies in one gossip interval are not reported."""
_READY, _STAGED = State.READY, Kind.STAGED


class Touches:
    """What was read here of copies whose home copy is elsewhere, until it is reported."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._touched: dict[tuple[NodeId, TenantId], list[SegmentKey]] = {}

    def read(self, segments: list[Segment]) -> None:
        """Segments of one prompt, in its order, were read until now, or were written again, here."""
        segments = [segment for segment in segments if segment.state is _READY]
        self._context.store.touch(segments, self._context.now)
        for segment in reversed(segments):
            if segment.kind is _STAGED and segment.source is not None:
                batch = self._touched.setdefault((segment.source, segment.tenant), [])
                if len(batch) < MAX_TOUCHED:
                    batch.append(segment.key)

    def report(self) -> None:
        """Send the batches, deepest segments first."""
        touched, self._touched = self._touched, {}
        for (node, tenant), keys in touched.items():
            self._peers.tell(node, wire.Touched(tenant, join_keys(keys)))

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"reads to report": sum(map(len, self._touched.values()))}
