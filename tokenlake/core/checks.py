"""Checks of an event before the rules change anything.

::

    event --> its numbers and names exist on this node (here)
          --> its message is consistent by itself (`tokenlake.wire.checks`)
          --> its message fits the requests of this node (here)
          --> the handler, which cannot fail on its input

A message may name a node that is no member, because its sender may have a newer ring, or an older one. Such a name is
treated as that of a node that is down.

The decoders check the types and bounds of single fields (`tokenlake.wire.fields`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tokenlake.core import events
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.serve import Serving
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.context import Context
from tokenlake.core.disk import Disk
from tokenlake.core.engines.sessions import Sessions
from tokenlake.core.engines.survey import MAX_LOCATED
from tokenlake.core.orders import MAX_ORDERED
from tokenlake.core.regions import Regions
from tokenlake.disk import NOTE_BYTES, PLACE_BYTES
from tokenlake.identity import ConnectionId, NodeId
from tokenlake.keys import KEY_BYTES
from tokenlake.layout import MAX_SEGMENT_BYTES, MAX_SHARDS
from tokenlake.wire import engine, peer
from tokenlake.wire.checks import check_peer_message, check_request

MOST = 1 << 62
"""Limit of the numbers of a device: bytes, and bytes per second."""


class Checks:
    """Checks the events of one node against the state of its rules, which it never changes."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        peers: Peers,
        transfers: Transfers,
        serving: Serving,
        regions: Regions,
        disk: Disk,
    ) -> None:
        self._context = context
        self._sessions = sessions
        self._peers = peers
        self._serving = serving
        self._disk = disk
        self._events: dict[type, Callable[[Any], None]] = {
            events.Joined: self._joined,
            events.Requested: self._requested,
            events.ProcessGone: _any,
            events.ExplainRequested: self._explain_requested,
            events.PeerUp: lambda e: self._peer(e.node),
            events.PeerDown: lambda e: self._peer(e.node),
            events.PeerSent: self._peer_sent,
            events.FetchDone: lambda e: transfers.check_done(e.fetch, e.codes, e.checksums, e.held),
            events.FetchSettled: lambda e: transfers.check_settled(e.fetch),
            events.PullRequested: self._pull_requested,
            events.SendDone: _any,
            events.SlotChecked: _any,
            events.RegionReady: lambda e: regions.check_ready(e.region),
            events.RingChanged: _any,
            events.LocateRequested: lambda e: _packed(e, MAX_LOCATED),
            events.HintGiven: lambda e: _packed(e, MAX_LOCATED),
            events.EvictRequested: lambda e: _packed(e, MAX_ORDERED),
            events.DiskReady: _disk_ready,
            events.DiskFound: self._found,
            events.DiskRecovered: disk.check_device,
            events.DiskGone: _any,
            events.DiskWritten: disk.check_written,
            events.DiskErased: disk.check_erased,
            events.SaveRequested: _save,
            events.Tick: _any,
        }
        self._messages: dict[type, Callable[[NodeId, Any], None]] = {
            peer.Pong: lambda node, m: peers.check_reply(node, m, 0),
            peer.LookupReply: lambda node, m: peers.check_reply(node, m, len(m.codes)),
            peer.OfferReply: lambda node, m: peers.check_reply(node, m, len(m.codes)),
            peer.ExplainMissingReply: lambda node, m: peers.check_reply(node, m, len(m.rules)),
        }

    def check(self, event: events.Event, now: float) -> None:
        """Raises `ValueError` with the reason for an event that the rules cannot take."""
        if not self._context.now <= now < math.inf:
            raise ValueError(f"an event at {now} s after one at {self._context.now} s")
        check = self._events.get(type(event))
        if check is None:
            raise ValueError(f"{type(event).__name__} is not an event of the rules")
        check(event)

    # -- engines

    def _joined(self, event: events.Joined) -> None:
        connection = ConnectionId(event.connection)
        if any(connection in session.processes for session in self._sessions):
            raise ValueError(f"connection {event.connection} has joined already")
        for name, value, least, most in (
            ("slot_bytes", event.slot_bytes, 1, MAX_SEGMENT_BYTES),
            ("shards", event.shards, 1, MAX_SHARDS),
            ("segment_tokens", event.segment_tokens, 0, 1 << 32),
        ):
            if not least <= value <= most:
                raise ValueError(f"connection {event.connection} joins with {name!r} of {value}; {least} to {most}")

    def _requested(self, event: events.Requested) -> None:
        message = event.message
        check_request(message)
        if type(message) is engine.Commit:
            process = self._sessions.process(ConnectionId(event.connection))
            if process is not None and message.shards >> process.session.shards:
                raise ValueError(
                    f"a Commit of shards {message.shards:#b}, where segments have {process.session.shards} shards"
                )

    def _explain_requested(self, event: events.ExplainRequested) -> None:
        if type(event.message) is not engine.Explain:
            raise ValueError(f"an ExplainRequested carries a {type(event.message).__name__}")

    def _found(self, event: events.DiskFound) -> None:
        """Raise `ValueError` for a `DiskFound` whose parts are of different lengths, or that is too long."""
        self._disk.check_device(event)
        count = len(event.keys) // KEY_BYTES
        whole = count * KEY_BYTES, count * PLACE_BYTES, count * NOTE_BYTES
        if (len(event.keys), len(event.places), len(event.notes)) != whole or count > events.MAX_FOUND:
            raise ValueError(f"a DiskFound with {count} keys, and places or notes of another number")
        if not (1 <= event.slot_bytes <= MAX_SEGMENT_BYTES and 1 <= event.shards <= MAX_SHARDS):
            raise ValueError(f"a DiskFound of segments of {event.slot_bytes} bytes in {event.shards} shards")

    # -- peers

    def _peer(self, node: str) -> None:
        if self._peers.get(NodeId(node)) is None:
            raise ValueError(f"{node!r} is not another member of the cluster")

    def _peer_sent(self, event: events.PeerSent) -> None:
        self._peer(event.node)
        message = event.message
        check_peer_message(message)
        check = self._messages.get(type(message))
        if check is not None:
            check(NodeId(event.node), message)

    def _pull_requested(self, event: events.PullRequested) -> None:
        self._peer(event.node)
        if len(event.keys) % KEY_BYTES:
            raise ValueError(f"keys of a Pull take {len(event.keys)} bytes, which is not a multiple of {KEY_BYTES}")
        if len(event.keys) > peer.MAX_PULLED * KEY_BYTES:
            raise ValueError(f"a Pull of {len(event.keys) // KEY_BYTES} segments; the limit is {peer.MAX_PULLED}")
        self._serving.check_pull(event.stream)


def _any(event: Any) -> None:
    """The check of event types that need none: their handlers accept any values, and ignore an event about an object
    that has ended."""


def _disk_ready(event: events.DiskReady) -> None:
    """Raise `ValueError` for a number of a device, a capacity or a rate that is negative, too large or not a number."""
    for name in ("device", "capacity_bytes", "read_bytes_per_s", "write_bytes_per_s"):
        if not 0 <= getattr(event, name) <= MOST:
            raise ValueError(f"a DiskReady with {name!r} of {getattr(event, name)}")


def _save(event: events.SaveRequested) -> None:
    """Raise `ValueError` for a limit that is negative, infinite or not a number."""
    if not 0 <= event.limit_s < math.inf:
        raise ValueError(f"a SaveRequested with a limit of {event.limit_s} s")


def _packed(event: Any, most: int) -> None:
    """Raise `ValueError` for packed keys of another length, or of more than `most` segments."""
    kind = type(event).__name__
    if len(event.keys) % KEY_BYTES:
        raise ValueError(f"keys of a {kind} take {len(event.keys)} bytes, which is no multiple of {KEY_BYTES}")
    if len(event.keys) > most * KEY_BYTES:
        raise ValueError(f"a {kind} of {len(event.keys) // KEY_BYTES} segments; the limit is {most}")
