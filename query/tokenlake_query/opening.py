"""Opening a view for an engine: its segments here, and at the query engines of the nodes that have the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from tokenlake.attention import AttentionShape
from tokenlake.errors import ProtocolRefused, TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake.wire import query as wire
from tokenlake.wire.engine import HERE
from tokenlake.wire.slots import join_keys, split_keys
from tokenlake_query.asking import Asker, Peers
from tokenlake_query.segments import Pools, Segments, open_here
from tokenlake_query.views import Share, View
from tokenlake_query.work import Attention

__all__ = ["Opener"]

log = logging.getLogger(__name__)

OPEN_S = 1.0
"""For the daemon to connect and the other query engines to answer."""


class Opener:
    """For the engines of one tenant and layout."""

    def __init__(self, tenant: str, layout: Layout, pools: Pools, peers: Peers) -> None:
        self.layout = layout
        self._tenant = tenant
        self._pools = pools
        self._peers = peers

    def open(self, message: wire.OpenView) -> tuple[View, bytes]:
        """The view, and one code per key: LOCAL or REMOTE for those that it has, and MISSING from the first on that
        cannot be had.

        Waits for the daemon and for other nodes. Raises LayoutRefused for heads that do not fit the layout,
        ProtocolRefused for a message that contradicts itself, and what connecting to the daemon raises.
        """
        attention = Attention(self.layout, AttentionShape.of(self.layout, message.heads, message.scale))
        keys = _keys_of(message)
        pool = self._pools.get(self._tenant, self.layout)
        here = [index for index, owner in enumerate(message.owners) if owner == HERE]
        for node in message.nodes:
            # Connects while this process looks at home.
            self._peers.get(node)
        segments = open_here(pool, [keys[index] for index in here])
        hits = len(keys) if len(segments) == len(here) else here[len(segments)]
        shares: dict[str, Share] = {}
        try:
            hits = self._open_shares(message, keys, hits, shares)
        except BaseException:
            for share in shares.values():
                share.asker.close_view(share.view)
            raise
        segments = Segments(segments.slots[: sum(index < hits for index in here)])
        held = bytes(Code.LOCAL if owner == HERE else Code.REMOTE for owner in message.owners[:hits])
        codes = held + bytes([Code.MISSING]) * (len(keys) - hits)
        return View(pool, attention, segments, list(shares.values())), codes

    def _open_shares(
        self, message: wire.OpenView, keys: Sequence[SegmentKey], hits: int, shares: dict[str, Share]
    ) -> int:
        """Open the first `hits` keys where they are; how many can be had. What one node lacks makes the view shorter,
        and the others are asked again for less."""
        while True:
            wanted = {
                node: [index for index in range(hits) if message.owners[index] == number]
                for number, node in enumerate(message.nodes)
            }
            stale = [node for node in wanted if len(wanted[node]) != _held(shares, node)]
            if not stale:
                return hits
            for node in stale:
                if node in shares:
                    shares[node].asker.close_view(shares[node].view)
                    del shares[node]
            asked = {node: [keys[index] for index in wanted[node]] for node in stale if wanted[node]}
            shares |= self._ask(message, asked)
            for node in asked:
                held = _held(shares, node)
                if held < len(wanted[node]):
                    hits = min(hits, wanted[node][held])

    def _ask(self, message: wire.OpenView, keys: dict[str, list[SegmentKey]]) -> dict[str, Share]:
        """All nodes at once; those that have anything, with as many keys as they have."""
        until = time.monotonic() + OPEN_S
        asked: list[tuple[str, Asker, int, Future[bytes]]] = []
        for node, connecting in {node: self._peers.get(node) for node in keys}.items():
            try:
                asker = connecting.result(max(0.0, until - time.monotonic()))
            except (TokenLakeError, TimeoutError) as error:
                log.info("no view at %s: %s", node, error)
                continue
            packed, layout = join_keys(keys[node]), self.layout.encode()
            number, opened = asker.open_view(
                lambda number, packed=packed, layout=layout: wire.OpenView(  # type: ignore[misc]
                    number, self._tenant, layout, packed, (), b"", message.heads, message.scale
                )
            )
            asked.append((node, asker, number, opened))
        shares: dict[str, Share] = {}
        for node, asker, number, opened in asked:
            held = 0
            try:
                held = _prefix(opened.result(max(0.0, until - time.monotonic())))
            except TimeoutError:
                asker.let_deadline_pass()
            except TokenLakeError as error:
                log.warning("no view at %s: %s", node, error)
                continue
            if held:
                shares[node] = Share(asker, number, tuple(keys[node][:held]))
            else:
                asker.close_view(number)
        return shares


def _held(shares: dict[str, Share], node: str) -> int:
    return len(shares[node].keys) if node in shares else 0


def _prefix(codes: bytes) -> int:
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
        raise ProtocolRefused(f"an owner beyond the {len(message.nodes)} nodes")
    return keys
