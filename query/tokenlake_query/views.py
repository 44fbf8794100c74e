"""A view: the segments that an engine's queries attend to, here and at the query engines of other nodes.

`ViewOpener` opens a view: it leases the segments that lie here and asks the other nodes' query engines to open the
rest. When one of them stops answering, its share of the view is fetched and lies here from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake.wire.engine import HERE
from tokenlake.wire.slots import join_keys, split_keys
from tokenlake_client import Pool
from tokenlake_query.compute_thread import Attention
from tokenlake_query.peer_client import PeerClient, PeerClients
from tokenlake_query.segments import Pools, Segments, fetch_segments, open_local

log = logging.getLogger(__name__)

OPEN_S = 1.0
"""Seconds within which all other query engines must have answered the requests to open their shares of a view; includes
the time in which the daemon connects to them."""


class Share(NamedTuple):
    """The segments of a view that the query engine of one other node attends to."""

    peer: PeerClient
    """The connection to the other node's query engine, over which this share of the view was opened."""
    view: int
    """The number of the view at the other node's query engine."""
    keys: Sequence[SegmentKey]


class Placement(NamedTuple):
    """The places of a view's segments: each segment is either in this node's memory (`local`), or in the `Share` of one
    other node, whose query engine attends to it."""

    local: Segments
    shares: tuple[Share, ...]


class View:
    """A view that one engine opened: the places of its segments. Thread-safe."""

    def __init__(self, pool: Pool, attention: Attention, local: Segments, shares: Sequence[Share]) -> None:
        self.pool = pool
        self.attention = attention
        self.placement = Placement(local, tuple(shares))
        """The places of the view's segments now. The attribute is replaced as a whole, so that a thread that reads it
        once sees every segment exactly once."""
        self.lost = False
        """True once a segment of the view could not be fetched from any node: every query of the view is then LOST."""
        self._fetching = threading.Lock()
        self._fetched: dict[Share, Segments] = {}

    def fetch(self, share: Share, until: float) -> Segments | None:
        """Fetch the segments of `share` into this node; they are local segments of the view from then on. None if they
        are not fetched by `until` (monotonic seconds). Blocks; a share that several threads ask for is fetched once."""
        if not self._fetching.acquire(timeout=max(0.0, until - time.monotonic())):
            return None
        try:
            if share not in self._fetched:
                left = until - time.monotonic()
                if self.lost or left <= 0:
                    return None
                segments = fetch_segments(self.pool, share.keys, left)
                if len(segments) < len(share.keys):
                    # The segments are gone only if there was time left; else the deadline may have been too short.
                    self.lost = time.monotonic() < until
                    return None
                self._fetched[share] = segments
                others = tuple(other for other in self.placement.shares if other is not share)
                self.placement = Placement(self.placement.local + segments, others)
                # The view is closed at the peer too, so that the peer, if it answers again, neither computes the
                # results that it owes nor keeps the segments leased.
                share.peer.close_view(share.view)
            return self._fetched[share]
        except TokenLakeError:
            return None
        finally:
            self._fetching.release()

    def close(self) -> None:
        """Close the view: its shares at the other query engines are closed. The local segments are released when the
        last computation over them is done."""
        for share in self.placement.shares:
            share.peer.close_view(share.view)


class ViewOpener:
    """Opens views for the engines of one tenant and layout."""

    def __init__(self, tenant: str, layout: Layout, pools: Pools, peers: PeerClients) -> None:
        self.layout = layout
        self._tenant = tenant
        self._pools = pools
        self._peers = peers

    def open(self, message: wire.OpenView) -> tuple[View, bytes]:
        """Open a view. Returns it, and one code per key: LOCAL or REMOTE up to the first segment that cannot be leased,
        MISSING from there on.

        Blocks for the daemon and for other nodes. Raises as `Attention.of`, ProtocolRefused for a message that
        contradicts itself, and the errors of `Pools.get`.
        """
        attention = Attention.of(self.layout, message.heads, message.scale)
        keys = _keys_of(message)
        pool = self._pools.get(self._tenant, self.layout)
        here = [index for index, owner in enumerate(message.owners) if owner == HERE]
        for node in message.nodes:
            # The connections to the other nodes' query engines are requested here, so that the daemon dials while this
            # thread leases the local segments.
            self._peers.get(node, self._tenant)
        local = open_local(pool, [keys[index] for index in here])
        hits = len(keys) if len(local) == len(here) else here[len(local)]
        shares: dict[str, Share] = {}
        try:
            hits = self._open_shares(message, keys, hits, shares)
        except BaseException:
            for share in shares.values():
                share.peer.close_view(share.view)
            raise
        local = Segments(local.slots[: sum(index < hits for index in here)])
        found = bytes(Code.LOCAL if owner == HERE else Code.REMOTE for owner in message.owners[:hits])
        codes = found + bytes([Code.MISSING]) * (len(keys) - hits)
        return View(pool, attention, local, list(shares.values())), codes

    def _open_shares(
        self, message: wire.OpenView, keys: Sequence[SegmentKey], hits: int, shares: dict[str, Share]
    ) -> int:
        """Open the first `hits` keys at their owners and put the shares into `shares`. Returns the number of keys that
        the view has. A segment that one node lacks shortens the view, and the other nodes are then asked again for
        fewer keys."""
        while True:
            expected = {
                node: [index for index in range(hits) if message.owners[index] == number]
                for number, node in enumerate(message.nodes)
            }
            stale = [node for node in expected if len(expected[node]) != _count(shares, node)]
            if not stale:
                return hits
            for node in stale:
                if node in shares:
                    shares[node].peer.close_view(shares[node].view)
                    del shares[node]
            asked = {node: [keys[index] for index in expected[node]] for node in stale if expected[node]}
            shares |= self._request_shares(message, asked)
            for node in asked:
                opened = _count(shares, node)
                if opened < len(expected[node]):
                    hits = min(hits, expected[node][opened])

    def _request_shares(self, message: wire.OpenView, keys: dict[str, list[SegmentKey]]) -> dict[str, Share]:
        """Ask all nodes of `keys` at once to open their keys. Returns a share for each node that has at least the first
        of its keys, with the keys up to the first that it lacks."""
        until = time.monotonic() + OPEN_S
        asked: list[tuple[str, PeerClient, int, Future[bytes]]] = []
        for node, connecting in {node: self._peers.get(node, self._tenant) for node in keys}.items():
            try:
                peer = connecting.result(max(0.0, until - time.monotonic()))
            except (TokenLakeError, TimeoutError) as error:
                log.info("the query engine of %s cannot open its part of a view: %s", node, error)
                continue
            packed, layout = join_keys(keys[node]), self.layout.encode()
            number, opening = peer.open_view(
                lambda number, packed=packed, layout=layout: wire.OpenView(  # type: ignore[misc]
                    number, self._tenant, layout, packed, (), b"", message.heads, message.scale
                )
            )
            asked.append((node, peer, number, opening))
        shares: dict[str, Share] = {}
        for node, peer, number, opening in asked:
            found = 0
            try:
                found = _local_prefix(opening.result(max(0.0, until - time.monotonic())))
            except TimeoutError:
                peer.deadline_missed()
            except TokenLakeError as error:
                log.warning("the query engine of %s did not open its part of a view: %s", node, error)
                continue
            if found:
                shares[node] = Share(peer, number, tuple(keys[node][:found]))
            else:
                peer.close_view(number)
        return shares


def _count(shares: dict[str, Share], node: str) -> int:
    return len(shares[node].keys) if node in shares else 0


def _local_prefix(codes: bytes) -> int:
    return next((index for index, code in enumerate(codes) if code != Code.LOCAL), len(codes))


def _keys_of(message: wire.OpenView) -> list[SegmentKey]:
    try:
        keys = split_keys(message.keys)
    except ValueError as error:
        raise ProtocolRefused(str(error)) from error
    if len(message.owners) != len(keys):
        raise ProtocolRefused(f"{len(message.owners)} owners for {len(keys)} keys; expected one each")
    if len(set(keys)) < len(keys) or len(set(message.nodes)) < len(message.nodes):
        raise ProtocolRefused("a key or a node is named twice; expected each once")
    if any(owner != HERE and owner >= len(message.nodes) for owner in message.owners):
        raise ProtocolRefused(f"an owner beyond the {len(message.nodes)} nodes; expected an index of one of them")
    return keys
