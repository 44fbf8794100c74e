"""One Fetch of an engine: it waits for the remote items of a range of its lease.

What arrives with a wrong checksum is asked of other nodes that may have a copy, one after the other, when the rest has
arrived and as long as the same deadline allows. Such a node is asked without a lease: it sends the segment if it is
there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tokenlake.core.context import Context
from tokenlake.core.fetches import Fetches, deadline_s
from tokenlake.core.instructions import Answer
from tokenlake.core.packing import pack
from tokenlake.core.peers import Peers
from tokenlake.core.sessions import Lease, Process, Sessions
from tokenlake.core.timers import Timer
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Kind, Segment
from tokenlake.wire import Code
from tokenlake.wire import engine as wire

__all__ = ["MISSING", "CopiesOf", "FetchCall", "FetchParts"]

FETCHED = Metric("tokenlake_fetched_tokens_total", "Tokens fetched from other nodes")
MISSING = Metric("tokenlake_missing_tokens_total", "Tokens found nowhere, or lost on the way")

MAX_DEADLINE_S = 60.0
"""Bound on what a client may ask a fetch to wait."""


CopiesOf = Callable[[TenantId, SegmentKey], list[NodeId]]
"""Other nodes, worth asking now, that may have a copy, the likeliest first."""


class FetchParts(NamedTuple):
    """What a call needs of its node."""

    context: Context
    sessions: Sessions
    peers: Peers
    fetches: Fetches
    copies_of: CopiesOf


class FetchCall:
    """One Fetch of an engine: waits for the remote items of a range."""

    def __init__(self, parts: FetchParts, process: Process, lease: Lease, request: wire.Fetch) -> None:
        self.parts = parts
        self.process = process
        self.lease = lease
        self.request = request
        self.codes = bytearray(lease.code(index) for index in range(request.start, request.stop))
        self.waiting = 0
        self.timer: Timer | None = None
        self.answered = False
        self.until = 0.0
        self.tried: dict[int, list[NodeId]] = {}
        """Who was asked for each item of which wrong bytes came."""
        self.wrong: list[int] = []
        """Those of them that are to be asked of another node."""

    def start(self) -> None:
        """Ask for what is remote; answers at once where nothing is."""
        context = self.parts.context
        lease = self.lease
        by_node: dict[NodeId, list[int]] = {}
        for index in range(self.request.start, self.request.stop):
            node = lease.remotes[index]
            if node is not None and lease.segments[index] is None:
                by_node.setdefault(node, []).append(index)
        for node in [node for node in by_node if not self.parts.peers.usable(node)]:
            # Nothing is asked of a node that is gone or silent; should it come back, a later fetch finds it.
            if lease.trail is not None:
                lease.trail.silent[node] = None
                if not self.parts.peers.connected(node):
                    lease.trail.unconnected |= {node}
            for index in by_node.pop(node):
                self.codes[index - self.request.start] = Code.LOST
        self._bound(by_node)
        limit_s = self._limit_s(by_node)
        self.waiting = sum(map(len, by_node.values()))
        if self.waiting:
            self.until = context.now + limit_s
            self.timer = context.after(limit_s, self._answer)
        self._bring(by_node, limit_s)
        if not self.waiting:
            self._answer()

    def _bring(self, by_node: dict[NodeId, list[int]], limit_s: float) -> None:
        """These items are counted as waited for by the caller."""
        lease, session = self.lease, self.process.session
        for index in itertools.chain.from_iterable(by_node.values()):
            session.coming += index not in lease.coming
            lease.coming[index] = lease.coming.get(index, 0) + 1
        for node, indices in by_node.items():
            wanted: list[tuple[SegmentKey, int, Callable[[Segment | None, Code], None]]] = [
                (lease.keys[index], index, partial(self._arrived, node, index)) for index in indices
            ]
            self.parts.fetches.bring(
                node,
                session.tenant,
                wanted,
                kind=Kind.CACHED,
                slot_bytes=session.slot_bytes,
                shards=session.shards,
                wait_s=limit_s,
                request=self.request.request,
                hints=lease.hints,
            )

    def _bound(self, by_node: dict[NodeId, list[int]]) -> None:
        """What is beyond the slots that the session may still hold stays where it is: a later fetch may find some."""
        room = self.parts.sessions.fetch_room(self.process.session)
        if sum(map(len, by_node.values())) <= room:
            return
        # Each item has one slot, however many processes wait for it.
        indices = itertools.chain.from_iterable(by_node.values())
        beyond = frozenset(sorted(index for index in indices if index not in self.lease.coming)[room:])
        if beyond and self.lease.trail is not None:
            self.lease.trail.refused = Code.SESSION_LIMIT
        for node, at in list(by_node.items()):
            by_node[node] = [index for index in at if index not in beyond]
            for index in at:
                if index in beyond:
                    self.codes[index - self.request.start] = Code.SESSION_LIMIT
            if not by_node[node]:
                del by_node[node]

    def _limit_s(self, by_node: dict[NodeId, list[int]]) -> float:
        if self.request.deadline_s > 0:
            return min(self.request.deadline_s, MAX_DEADLINE_S)
        size = self.process.session.slot_bytes
        predicted = [self.parts.peers.predict_s(node, size * len(at)) for node, at in by_node.items()]
        return min(deadline_s(sum(predicted)), MAX_DEADLINE_S)

    def _arrived(self, node: NodeId, index: int, segment: Segment | None, code: Code) -> None:
        lease, session = self.lease, self.process.session
        self.waiting -= 1
        lease.coming[index] -= 1
        if not lease.coming[index]:
            del lease.coming[index]
            session.coming -= 1
        wanted = lease.remotes[index] is not None and lease.segments[index] is None and lease.holders(index)
        if segment is not None and wanted:
            lease.segments[index] = segment
            lease.remotes[index] = None
            session.pinned += 1
            self.parts.context.counters.add(FETCHED, session.segment_tokens)
            if lease.trail is not None:
                lease.trail.fetched += 1
        elif segment is not None:
            self.parts.context.store.unpin(segment)
        elif wanted and (code is Code.BAD_CHECKSUM or (index in self.tried and not code.refused)):
            self.tried.setdefault(index, []).append(node)
            self.wrong.append(index)
        elif wanted and code.refused:
            # There was no slot for it, it is still leased there: a later fetch may find one.
            if lease.trail is not None:
                lease.trail.refused = code
        elif wanted:
            self._lost(index, node)
        self.codes[index - self.request.start] = code if lease.segments[index] is None else Code.LOCAL
        if not self.waiting and self.wrong:
            self._ask_others()
        if not self.waiting:
            self._answer()

    def _lost(self, index: int, node: NodeId) -> None:
        """It was leased at `node`, and comes from nowhere."""
        lease = self.lease
        lease.remotes[index] = None
        self.parts.context.counters.add(MISSING, self.process.session.segment_tokens)
        if lease.trail is not None:
            lease.trail.did_not_come(node, late=self.answered, wrong=index in self.tried)

    def _ask_others(self) -> None:
        """For each item of which wrong bytes came: the next node that may have it, none after the deadline."""
        lease, wrong = self.lease, self.wrong
        self.wrong = []
        session, peers = self.process.session, self.parts.peers
        left_s = 0.0 if self.answered else self.until - self.parts.context.now
        by_node: dict[NodeId, list[int]] = {}
        for index in wrong:
            if lease.remotes[index] is None or not lease.holders(index):
                # Another fetch of the lease has settled it, or it was given back meanwhile.
                self.codes[index - self.request.start] = lease.code(index)
                continue
            tried = self.tried[index]
            others = self.parts.copies_of(session.tenant, lease.keys[index]) if left_s > 0 else []
            in_time = (each for each in others if peers.predict_s(each, session.slot_bytes) < left_s)
            node = next((each for each in in_time if each not in tried), None)
            if node is None:
                self._lost(index, tried[0])
            else:
                by_node.setdefault(node, []).append(index)
        self.waiting += sum(map(len, by_node.values()))
        self._bring(by_node, left_s)

    def _answer(self) -> None:
        if self.answered:
            return
        self.answered = True
        if self.timer is not None:
            self.timer.cancel()
        lease, request = self.lease, self.request
        segments = lease.readable(request.start, request.stop)
        for offset, segment in enumerate(segments):
            if segment is None and self.codes[offset] in (Code.LOCAL, Code.REMOTE):
                self.codes[offset] = Code.LOST
        if self.parts.sessions.process(self.process.connection) is self.process:
            packed = pack(segments, self.process.session.shards, checksums=request.checksums)
            self.parts.context.emit(
                Answer(self.process.connection, wire.Fetched(request.id, bytes(self.codes), *packed))
            )
