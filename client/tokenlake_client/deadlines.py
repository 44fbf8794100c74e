"""How long the calls of a pool may block."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_DEADLINES", "Deadlines"]


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. For `Pool.connect`; a call whose `deadline_s` is given uses that one instead.

    A call that misses its deadline raises `DeadlinePassed`. Further calls then raise it at once until the daemon sends
    something (`tokenlake.liveness`), so that a frozen daemon costs an engine one deadline and not one per call. Raise
    the deadlines where the daemon shares its processors with other programs and may not run for longer than that.
    """

    connect_s: float = 5.0
    """To open a connection: until the daemon answers the handshake."""
    send_s: float = 1.0
    """To dial, and to send one request. Requests are far smaller than the socket's buffer: a send blocks only while the
    daemon reads nothing."""
    call_s: float = 0.250
    """For calls that the daemon answers from its own memory: attach, nodes, heartbeat, map a region to read."""
    match_s: float = 0.020
    """For `match` and `begin_match`: how long the daemon may ask other nodes."""
    fetch_s: float = 0.0
    """For `Lease.fetch` and `Lease.copy_into`, until segments of other nodes have been transferred to this one. 0: the
    daemon predicts it from the rate of earlier transfers, and the client waits as long as the daemon is alive."""
    store_s: float = 2.0
    """For calls that reserve or commit slots, and to map a region to write. Engines store in the background, and a
    longer wait loses less than a store that fails."""
    view_s: float = 1.5
    """For `open_view`: longer than the query engine waits for the query engines of other nodes."""
    query_s: float = 2.0
    """For `query`: attention over one layer."""
    grace_s: float = 0.030
    """Where the daemon or the query engine keeps the deadline itself (match, fetch, view, query), the client stops
    waiting this much later than it, so that the answer that says so still arrives."""
    wakeup_s: float = 0.1
    """How much longer a caller waits when its deadline passed while the answer was received but not read: threads of a
    busy process are scheduled late."""


DEFAULT_DEADLINES = Deadlines()
