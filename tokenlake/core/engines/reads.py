"""Reading a lease: an engine fetches the segments of it that lie at other nodes or on disk, and gives items back.

::

    engine: Fetch of a range of a lease
        |   `LeaseReads`: which items are at which node, how many slots the session may still hold, the deadline
        v
    `Transfers`: one transfer per (segment, node), joined by every fetch that waits for the segment
        |   wrong checksum, or the node does not answer: other owners are asked within the same deadline
        v
    Fetched, at the latest at the deadline
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.transfer import MAX_DEADLINE_S, OnArrival, deadline_s
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.context import Context
from tokenlake.core.engines.access import Touches, with_access
from tokenlake.core.engines.grants import Grants, Lease, pack
from tokenlake.core.engines.sessions import Process
from tokenlake.core.instructions import Answer
from tokenlake.core.report.account import Source
from tokenlake.hints import NO_ACCESS
from tokenlake.identity import LeaseId, NodeId, SegmentKey
from tokenlake.memory import Kind, PoolId, Segment
from tokenlake.metrics import Metric
from tokenlake.timers import Timer
from tokenlake.wire import Code, engine
from tokenlake.wire.funnel import MissReason
from tokenlake.wire.slots import split_keys

FETCH_SECONDS = Metric(
    "tokenlake_fetch_seconds",
    "Time from a fetch request to its answer, of fetches of segments at other nodes or on disk",
    kind="histogram",
)

MAX_RANGE = 1 << 16
"""Maximum number of codes in the answer to a fetch of a lease that does not exist."""


class _Fetch:
    """One `Fetch` request of an engine: a range of items of a lease, and the items that have not arrived yet."""

    def __init__(self, process: Process, lease: Lease, request: engine.Fetch, now: float) -> None:
        self.process = process
        self.lease = lease
        self.request = request
        self.codes = bytearray(lease.code(index) for index in range(request.start, request.stop))
        self.awaited: Counter[NodeId] = Counter()
        """Number of items that are requested from each node and have not come."""
        self.timer: Timer | None = None
        self.answered = False
        self.began = self.until = now
        """Times in seconds of the request and of its deadline."""
        self.tried: dict[int, list[NodeId]] = {}
        """The nodes that did not bring an item, by index of the item; the first one is the node that leased it."""
        self.wrong: set[int] = set()
        """Indices of items that arrived with a wrong checksum."""
        self.not_asked: set[int] = set()
        """Indices of items whose leasing node was not asked, since it does not deliver now. They stay leased there."""
        self.failed: list[int] = []
        """Indices of items that did not come and are still to be requested from another node."""

    def set_code(self, index: int, code: Code) -> None:
        """Set the code that the answer gives for item `index` of the lease."""
        self.codes[index - self.request.start] = code


class LeaseReads:
    """Handles the requests of local engines about the segments that they lease: Attach, Locate, Hint, Release and
    Fetch."""

    def __init__(
        self,
        context: Context,
        grants: Grants,
        peers: Peers,
        directory_node: DirectoryNode,
        transfers: Transfers,
        touches: Touches,
    ) -> None:
        self._context = context
        self._grants = grants
        self._peers = peers
        self._directory_node = directory_node
        self._transfers = transfers
        self._touches = touches
        self._seconds = context.counters.histogram(FETCH_SECONDS)

    # -- the lease

    def attach(self, process: Process, request: engine.Attach) -> None:
        """Let another process of the session hold a lease as well. The answer has the items that any process still
        holds; none if the lease has ended, or a limit of the session (bytes of its leases, processes of a lease) is
        reached."""
        session = process.session
        lease = session.leases.get(LeaseId(request.lease))
        if lease is None or not self._grants.attach_lease(session, lease, process.connection):
            reply = engine.Matched(request.id, 0, 0, b"", b"", b"")
        else:
            codes = bytes(lease.code(index) for index in range(len(lease.keys)))
            packed = pack(lease.readable(0, len(codes)), session.shards, checksums=request.checksums)
            reply = engine.Matched(request.id, lease.id, len(codes), codes, *packed)
        self._context.emit(Answer(process.connection, reply))

    def where(self, process: Process, request: engine.Locate) -> None:
        """Answer with the node of each segment of a lease, from the first on; the answer ends before the first lost
        segment."""
        lease = process.session.leases.get(LeaseId(request.lease))
        if lease is None:
            self._context.emit(Answer(process.connection, engine.Located(request.id, (), b"")))
            return
        here, nodes, owners = self._context.node, dict[NodeId, int](), bytearray()
        for segment, remote in zip(lease.readable(0, len(lease.keys)), lease.remotes, strict=True):
            if segment is not None:
                owners.append(engine.HERE)
            elif remote is not None and (remote in nodes or len(nodes) < engine.HERE):
                owners.append(nodes.setdefault(remote, len(nodes)))
            else:
                break
        times = dict(lease.disk_s)
        if here in nodes:
            keys = [key for key, remote in zip(lease.keys, lease.remotes, strict=True) if remote == here]
            times[here] = self._transfers.read_s(process.session.tenant, keys, process.session.slot_bytes)
        disk_s = tuple(times.get(node, 0.0) for node in nodes)
        located = engine.Located(request.id, tuple(nodes), bytes(owners), disk_s if any(disk_s) else ())
        self._context.emit(Answer(process.connection, located))

    def hint(self, process: Process, request: engine.Hint) -> None:
        """Apply hints that an engine gave after the match to the segments that it names, and to later reads with a
        lease that is still held."""
        tenant, hints = process.session.tenant, with_access(request.hints, NO_ACCESS)
        self._touches.hint(tenant, split_keys(request.keys), hints)
        lease = process.session.leases.get(LeaseId(request.lease))
        if lease is not None:
            lease.hints = hints.merged_over(lease.hints)

    def release(self, process: Process, request: engine.Release) -> None:
        """Give back items of leases that a process does not read any more, and note what the engine took."""
        session = process.session
        leases = session.leases
        for number, start, stop, saved_s in request.took:
            if LeaseId(number) in leases:
                leases[LeaseId(number)].account.took(start, stop, saved_s)
                if saved_s and stop > start and session.segment_tokens:
                    per_segment_s = saved_s * session.segment_tokens / (stop - start)
                    self._transfers.cold.tier.computed(PoolId(session.tenant, session.slot_bytes), per_segment_s)
        for number in request.uncounted:
            if LeaseId(number) in leases:
                leases[LeaseId(number)].account.counted = leases[LeaseId(number)].account.tail = 0
        ranges = [(leases[LeaseId(lease)], start, stop) for lease, start, stop in request.ranges if lease in leases]
        self._grants.release(process.session, process.connection, ranges, request.read)

    # -- fetches

    def fetch(self, process: Process, request: engine.Fetch) -> None:
        """Fetch those items of a range of a lease that are at other nodes. The request is answered when the last of
        them has arrived or was given up, at the latest at the deadline."""
        lease = process.session.leases.get(LeaseId(request.lease))
        count = max(0, request.stop - request.start)
        if lease is None or request.start < 0 or request.stop > len(lease.keys):
            count = min(count, MAX_RANGE)
            packed = pack([None] * count, process.session.shards, checksums=request.checksums)
            lost = engine.Fetched(request.id, bytes([Code.LOST]) * count, *packed)
            self._context.emit(Answer(process.connection, lost))
            return
        fetch = _Fetch(process, lease, request, self._context.now)
        by_node = self._items_by_node(fetch)
        limit_s = self._limit_s(fetch, by_node)
        if by_node:
            fetch.until = self._context.now + limit_s
            fetch.timer = self._context.after(limit_s, lambda: self._answer(fetch))
        self._bring(fetch, by_node, limit_s)
        if not fetch.awaited.total():
            self._answer(fetch)

    def _items_by_node(self, fetch: _Fetch) -> dict[NodeId, list[int]]:
        """Returns the indices of the items to request from each node. Sets the codes of the remote items that are not
        requested: they stay leased at their nodes, and a later fetch may bring them."""
        lease = fetch.lease
        by_node: dict[NodeId, list[int]] = {}
        for index in range(fetch.request.start, fetch.request.stop):
            node = lease.remotes[index]
            if node is not None and lease.segments[index] is None:
                by_node.setdefault(node, []).append(index)
        for node in [node for node in by_node if not self._transfers.delivers(node)]:
            if lease.trail is not None:
                lease.trail.silent[node] = None
                if not self._peers.connected(node):
                    lease.trail.unconnected |= {node}
            indices = by_node.pop(node)
            keys = [lease.keys[index] for index in indices]
            others = self._directory_node.copies_of(fetch.process.session.tenant, keys)
            for index, copies in zip(indices, others, strict=True):
                if copies:
                    fetch.tried[index] = [node]
                    fetch.not_asked.add(index)
                    by_node.setdefault(copies[0], []).append(index)
                else:
                    fetch.set_code(index, Code.LOST)
        room = self._grants.fetch_room(fetch.process.session)
        if sum(map(len, by_node.values())) <= room:
            return by_node
        # The session may hold fewer further slots than this fetch has items. An item that another fetch of the lease
        # waits for takes no further slot. Of the others, the deepest ones, for which no slot is left, are left out of
        # the request.
        requested = itertools.chain.from_iterable(by_node.values())
        beyond = frozenset(sorted(index for index in requested if index not in lease.coming)[room:])
        if beyond and lease.trail is not None:
            lease.trail.refused = Code.SESSION_LIMIT
        for index in sorted(beyond):
            fetch.set_code(index, Code.SESSION_LIMIT)
        within = {node: [index for index in at if index not in beyond] for node, at in by_node.items()}
        return {node: at for node, at in within.items() if at}

    def _limit_s(self, fetch: _Fetch, by_node: dict[NodeId, list[int]]) -> float:
        """Returns the seconds after which the fetch is answered with the items that have arrived by then."""
        limit_s = fetch.request.deadline_s
        if not limit_s:
            size = fetch.process.session.slot_bytes
            keys, tenant = fetch.lease.keys, fetch.process.session.tenant
            predicted = (
                self._transfers.predict_s(node, tenant, [keys[index] for index in at], size)
                for node, at in by_node.items()
            )
            limit_s = deadline_s(
                sum(predicted) + max((fetch.lease.disk_s.get(node, 0.0) for node in by_node), default=0)
            )
        return min(limit_s, fetch.request.at_most_s or MAX_DEADLINE_S, MAX_DEADLINE_S)

    def _bring(self, fetch: _Fetch, by_node: dict[NodeId, list[int]], limit_s: float) -> None:
        """Start transfers of the items in `by_node`, from their nodes."""
        lease, session = fetch.lease, fetch.process.session
        for node, indices in by_node.items():
            fetch.awaited[node] += len(indices)
            for index in indices:
                self._grants.item_expected(session, lease, index)
        for node, indices in by_node.items():
            wanted: list[tuple[SegmentKey, int, OnArrival]] = [
                (lease.keys[index], index, partial(self._arrived, fetch, node, index)) for index in indices
            ]
            self._transfers.bring(
                node,
                session.tenant,
                wanted,
                kind=Kind.CACHED,
                slot_bytes=session.slot_bytes,
                shards=session.shards,
                wait_s=limit_s,
                request=fetch.request.request,
                hints=lease.hints,
                disk_s=lease.disk_s.get(node, 0.0),
                cold=True,
            )

    def _arrived(self, fetch: _Fetch, node: NodeId, index: int, segment: Segment | None, code: Code) -> None:
        """Handle the outcome of one item that was requested from `node`: its segment, or None and the reason `code`."""
        lease, session = fetch.lease, fetch.process.session
        fetch.awaited[node] -= 1
        self._grants.item_settled(session, lease, index)
        wanted = lease.remotes[index] is not None and lease.segments[index] is None and lease.is_held(index)
        if segment is not None and wanted:
            self._grants.item_arrived(session, lease, index, segment, self._source(node, segment))
            if lease.trail is not None:
                lease.trail.fetched += 1
        elif segment is not None:
            self._context.store.unpin(segment)
        elif wanted and code in (Code.BAD_CHECKSUM, Code.LOST):
            fetch.tried.setdefault(index, []).append(node)
            fetch.failed.append(index)
            if code is Code.BAD_CHECKSUM:
                fetch.wrong.add(index)
        elif wanted and (code.refused or code is Code.PENDING):
            # This node has no slot for the item, or another engine of this node is writing the segment and may not
            # commit it. The item stays leased at its node, and a later fetch may bring it.
            if lease.trail is not None:
                lease.trail.refused = code
        elif wanted:
            self._lost(fetch, index, node)
        fetch.set_code(index, code if lease.segments[index] is None else Code.LOCAL)
        if not fetch.awaited[node] and fetch.failed:
            self._ask_other_copies(fetch)
        if not fetch.awaited.total():
            self._answer(fetch)

    def _source(self, node: NodeId, segment: Segment) -> Source:
        """The source of a segment that came from `node`."""
        if node != self._context.node:
            return Source.FETCHED
        return Source.DISK if segment.disk >= 0 else Source.COLD

    def _lost(self, fetch: _Fetch, index: int, node: NodeId) -> None:
        """Record that an item leased at `node` cannot be fetched from any node."""
        reason, detail = MissReason.LOST, ""
        if fetch.lease.trail is not None:
            late = fetch.answered or not self._peers.path(node).alive
            gone = self._context.removals.get(fetch.process.session.tenant, fetch.lease.keys[index])
            rule = gone.rule if gone is not None and node == self._context.node else ""
            reason, detail = fetch.lease.trail.did_not_come(node, late=late, wrong=index in fetch.wrong, rule=rule)
        self._grants.item_lost(fetch.lease, index, reason, detail)

    def _ask_other_copies(self, fetch: _Fetch) -> None:
        """Request each item that did not come from the next node that may have a copy and can send it before the
        deadline. That node is asked without a lease: it sends the segment if it still has it."""
        lease, session = fetch.lease, fetch.process.session
        indices, fetch.failed = fetch.failed, []
        left_s = 0.0 if fetch.answered else fetch.until - self._context.now
        by_node: dict[NodeId, list[int]] = {}
        keys = [lease.keys[index] for index in indices]
        copies = self._directory_node.copies_of(session.tenant, keys) if left_s > 0 else [[] for _ in keys]
        for index, others in zip(indices, copies, strict=True):
            if lease.remotes[index] is None or not lease.is_held(index):
                # Another fetch of the lease has settled the item, or it was released meanwhile.
                fetch.set_code(index, lease.code(index))
                continue
            tried = fetch.tried[index]
            in_time = (node for node in others if self._peers.path(node).predict_s(session.slot_bytes) < left_s)
            node = next((node for node in in_time if node not in tried), None)
            if node is not None:
                by_node.setdefault(node, []).append(index)
            elif index not in fetch.not_asked:
                self._lost(fetch, index, tried[0])
        self._bring(fetch, by_node, left_s)

    def _answer(self, fetch: _Fetch) -> None:
        if fetch.answered:
            return
        fetch.answered = True
        if fetch.timer is not None:
            fetch.timer.cancel()
            self._seconds.add(self._context.now - fetch.began)
        lease, request = fetch.lease, fetch.request
        if lease.trail is not None:
            lease.trail.fetch_s = max(lease.trail.fetch_s, self._context.now - fetch.began)
        segments = lease.readable(request.start, request.stop)
        for offset, segment in enumerate(segments):
            if segment is None and fetch.codes[offset] in (Code.LOCAL, Code.REMOTE):
                fetch.codes[offset] = Code.LOST
        if fetch.process.alive:
            packed = pack(segments, fetch.process.session.shards, checksums=request.checksums)
            fetched = engine.Fetched(request.id, bytes(fetch.codes), *packed)
            self._context.emit(Answer(fetch.process.connection, fetched))
