"""What the homes are told of segments that engines here write, or are about to.

A match that may wait claims the first segment that it misses (`pendings`). An engine that computes a prompt in several
steps stores a part of it after each, so it claims the rest as well: else whoever waits would be told to compute what
comes after the first part.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenlake.core.context import Context
from tokenlake.core.home import Home
from tokenlake.core.peers import Peers
from tokenlake.core.pendings import MAX_PENDING_S
from tokenlake.core.sessions import Process
from tokenlake.identity import ConnectionId, SegmentKey, TenantId
from tokenlake.wire import engine
from tokenlake.wire import peer as wire
from tokenlake.wire.slots import join_keys, split_keys

__all__ = ["MAX_CLAIMED", "Claims"]

MAX_CLAIMED = 1024
"""Segments of one process: directories are bounded, and what is only claimed must not fill them."""


class Claims:
    """Claimed by engines, until they take it back or end. A home forgets a claim when its time is over, or when the
    segment is there."""

    def __init__(self, context: Context, peers: Peers, home: Home) -> None:
        self._context = context
        self._peers = peers
        self._home = home
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
        self.announce(tenant, absent, min(request.seconds, MAX_PENDING_S))

    def gone(self, connection: ConnectionId) -> None:
        """The process is dead, or left."""
        tenant, mine = self._claimed.pop(connection, (TenantId(""), {}))
        self._end(tenant, list(mine))

    def announce(self, tenant: TenantId, keys: Sequence[SegmentKey], deadline_s: float) -> None:
        """Tell their homes that they are PENDING here, for so long at most."""
        for home, homed in self._context.by_home(keys).items():
            message = wire.Announce(tenant, join_keys(homed), deadline_s)
            if home == self._context.node:
                self._home.announce(home, message, homed)
            else:
                self._peers.tell(home, message)

    def withdraw(self, tenant: TenantId, keys: Sequence[SegmentKey]) -> None:
        """Tell their homes that nobody writes them here any more."""
        for home, homed in self._context.by_home(keys).items():
            if home == self._context.node:
                for key in homed:
                    self._context.directory.withdraw(tenant, key, home)
            else:
                self._peers.tell(home, wire.Withdraw(tenant, join_keys(homed)))

    def _end(self, tenant: TenantId, keys: list[SegmentKey]) -> None:
        """What is here, or being written, is not claimed any more but announced."""
        self.withdraw(tenant, [key for key in keys if self._context.store.get(tenant, key) is None])

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {"claims": sum(len(mine) for _, mine in self._claimed.values())}
