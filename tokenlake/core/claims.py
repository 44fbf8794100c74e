"""What the directory nodes are told of segments that engines here write, or are about to.

A match that may wait claims the first segment that it misses (`pendings`). An engine that computes a prompt in several
steps stores a part of it after each, so it claims the rest as well: else whoever waits would be told to compute what
comes after the first part.
"""

from __future__ import annotations

from tokenlake.core.context import Context
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.pendings import MAX_IN_FLIGHT_WAIT_S
from tokenlake.core.sessions import Process
from tokenlake.identity import ConnectionId, SegmentKey, TenantId
from tokenlake.wire import engine
from tokenlake.wire.slots import split_keys

__all__ = ["MAX_CLAIMED", "Claims"]

MAX_CLAIMED = 1024
"""Segments of one process: directories are bounded, and what is only claimed must not fill them."""


class Claims:
    """Claimed by engines, until they take it back or end. A directory node forgets a claim when its time is over, or
    when the
    segment is there."""

    def __init__(self, context: Context, directory_node: DirectoryNode) -> None:
        self._context = context
        self._directory_node = directory_node
        self._claimed: dict[ConnectionId, tuple[TenantId, dict[SegmentKey, None]]] = {}

    def claim(self, process: Process, request: engine.Claim) -> None:
        """The oldest claims of the process make room."""
        keys = split_keys(request.keys)[:MAX_CLAIMED]
        tenant, mine = self._claimed.setdefault(process.connection, (process.session.tenant, {}))
        for key in keys:
            mine.pop(key, None)
        if not request.seconds:
            self._end(tenant, keys)
            return
        mine.update(dict.fromkeys(keys))
        over = list(mine)[: max(0, len(mine) - MAX_CLAIMED)]
        for key in over:
            del mine[key]
        self._end(tenant, over)
        absent = [key for key in keys if self._context.store.get(tenant, key) is None]
        self._directory_node.announce(tenant, absent, min(request.seconds, MAX_IN_FLIGHT_WAIT_S))

    def gone(self, connection: ConnectionId) -> None:
        """The process is dead, or left."""
        tenant, mine = self._claimed.pop(connection, (TenantId(""), {}))
        self._end(tenant, list(mine))

    def _end(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """What is here, or being written, is not claimed any more but announced."""
        self._directory_node.withdraw(tenant, [key for key in keys if self._context.store.get(tenant, key) is None])

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"claims": sum(len(mine) for _, mine in self._claimed.values())}
