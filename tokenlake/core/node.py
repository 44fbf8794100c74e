"""NodeCore: every decision of a node, with no I/O.

`tokenlake.core` has the duties of a driver. The rules iterate over no set, read no clock and draw no random number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from tokenlake.core import events
from tokenlake.core.checks import Checks
from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.drain import Drain
from tokenlake.core.cluster.handover import HANDED_OVER, Handover
from tokenlake.core.cluster.learned import Learned
from tokenlake.core.cluster.members import MemberState, members_of
from tokenlake.core.cluster.owner import DUPLICATES, Ownership
from tokenlake.core.cluster.peers import Peer, Peers
from tokenlake.core.cluster.ring_change import RingChange
from tokenlake.core.cluster.serve import Serving
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.cold import Cold
from tokenlake.core.cold_tier import ColdTier
from tokenlake.core.context import Context, CoreConfig, Part
from tokenlake.core.disk import Disk
from tokenlake.core.engines.access import Touches, with_access
from tokenlake.core.engines.corruption import Corruption
from tokenlake.core.engines.grants import Grants
from tokenlake.core.engines.match import Matches
from tokenlake.core.engines.pins import Pins
from tokenlake.core.engines.prefetch import Prefetches
from tokenlake.core.engines.reads import LeaseReads
from tokenlake.core.engines.regrants import Regrants
from tokenlake.core.engines.salt_quotas import SaltQuotas
from tokenlake.core.engines.sessions import Process, Session, Sessions
from tokenlake.core.engines.survey import Survey
from tokenlake.core.engines.waiting import InFlightMarkers, WaitingMatches
from tokenlake.core.engines.write import Writes
from tokenlake.core.instructions import (
    Answer,
    CutRegion,
    Instruction,
    SendToPeer,
    Stamp,
    UnpinDone,
    Welcomed,
)
from tokenlake.core.kept import Kept
from tokenlake.core.ledger import Ledger
from tokenlake.core.orders import Orders
from tokenlake.core.regions import Regions
from tokenlake.core.report import account, misses
from tokenlake.core.report.account import Account
from tokenlake.core.report.explain import Explain, RecentRequest
from tokenlake.core.report.refusals import Refusals
from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import RingRecord
from tokenlake.disk.slab import SlabUse
from tokenlake.hints import NO_ACCESS, AccessRecord
from tokenlake.identity import ConnectionId, Incarnation, NodeId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.memory import Kind, Segment, SegmentStore, State
from tokenlake.memory.vacancy import Vacancy
from tokenlake.metrics import Counters, Level
from tokenlake.wire import engine, peer
from tokenlake.wire.slots import split_keys


class HandlerFailed(RuntimeError):
    """Raised when the rules fail on an event that passed their checks, which is a mistake in the rules. Its cause is
    the exception of the handler.

    The changes that the handler made before it failed remain, and `instructions` are those that belong to them. The
    driver must carry them out: without them reissued slots would keep their old generation, and a transfer that the
    rules count as begun would never begin, nor end.
    """

    def __init__(self, event: str, instructions: Sequence[Instruction]) -> None:
        """`event`: name of the type of the event. `instructions`: those that the driver still has to carry out."""
        super().__init__(f"the rules failed on an event of type {event}")
        self.instructions = list(instructions)


class NodeCore:
    """The rules of one node: it takes one event at a time (a request of an engine, a message of another node, a timer)
    and returns the instructions that the driver carries out."""

    def __init__(self, config: CoreConfig) -> None:
        context = self._context = Context(config)
        self._peers = Peers(
            context,
            self._lost,
            self._suspected,
            lambda peer_: self._directory_node.restored(peer_),
            lambda peer_: self._ring_change.differs(peer_),
        )
        self._directory_node = DirectoryNode(context, self._peers)
        self._tier = ColdTier(context)
        self._cold = Cold(context, self._tier, config.cold_bytes_per_day)
        self._transfers = Transfers(context, self._peers, self._tier, lambda *each: self._ownership.committed(*each))
        self._disk = Disk(context, self._directory_node)
        self._ownership = Ownership(context, self._peers, self._directory_node, self._disk)
        self._directory_node.on_redundant = self._ownership.redundant
        self._handover = Handover(context, self._peers, self._directory_node, self._ownership, self._transfers)
        self._pins = Pins(context)
        self._ledger = Ledger(context, self._pins)
        self._kept = Kept(context, self._directory_node, self._pins, self._ledger)
        self._salt_quotas = SaltQuotas(context)
        self._touches = Touches(context, self._peers, self._directory_node.recorded_owner, self._read, self._pins)
        self._markers = InFlightMarkers(context, self._directory_node)
        self._grants = Grants(context, self._peers, self._touches, self._markers.withdraw)
        self._sessions = Sessions(context, self._peers, self._grants)
        self._regrants = Regrants(context, self._grants, self._kept)
        self._regions = Regions(context, self._sessions, self._pins, self._kept)
        self._serving = Serving(context, self._peers, self._directory_node, self._transfers)
        self._explain = Explain(context, self._peers)
        self._waiting = WaitingMatches(context, self._peers, self._directory_node, self._markers)
        context.store.on_arrival = self._arrived
        self._matches = Matches(
            context, self._grants, self._peers, self._directory_node, self._waiting, self._explain, self._transfers.cold
        )
        self._corruption = Corruption(context)
        self._reads = LeaseReads(
            context, self._grants, self._peers, self._directory_node, self._transfers, self._touches
        )
        self._refusals = Refusals(context)
        self._writes = Writes(
            context,
            self._grants,
            self._directory_node,
            self._ownership,
            self._handover,
            self._touches,
            self._refusals,
            self._pins,
            self._salt_quotas,
        )
        self._survey = Survey(context, self._peers, self._directory_node, self._transfers)
        self._prefetches = Prefetches(context, self._survey, self._transfers, self._pins)
        self._orders = Orders(context, self._disk, self._cold, self._kept)
        self._learned = Learned(context, self._peers)
        self._drain = Drain(context, self._peers, self._ownership, self._handover)
        self._ring_change = RingChange(
            context, self._peers, self._directory_node, self._ownership, self._serving, self._handover, self._drain
        )
        self._parts: tuple[Part, ...] = (
            self._sessions,
            self._matches,
            self._waiting,
            self._touches,
            self._transfers,
            self._serving,
            self._handover,
            self._drain,
            self._peers,
            self._directory_node,
            self._explain,
            self._markers,
            self._corruption,
            self._survey,
            self._pins,
            self._ledger,
            self._kept,
            self._salt_quotas,
            self._prefetches,
            self._orders,
            self._refusals,
            self._disk,
            self._tier,
            self._cold,
            self._ring_change,
        )
        self._checks = Checks(context, self._sessions, self._peers, self._serving)
        self._handlers: dict[type, Callable[..., None]] = {
            # Events of the driver: handler(event).
            events.Joined: self._joined,
            events.Requested: self._requested,
            events.ProcessGone: self._process_gone,
            events.ExplainRequested: lambda e: self._explain.asked(e.connection, TenantId(e.tenant), e.message),
            events.PeerUp: lambda e: self._peers.came_up(NodeId(e.node), Incarnation(e.incarnation), e.location),
            events.PeerDown: lambda e: self._peers.went_down(NodeId(e.node), Incarnation(e.incarnation)),
            events.PeerSent: self._peer_sent,
            events.FetchDone: lambda e: self._transfers.done(
                e.fetch, e.codes, e.checksums, e.answered, e.held, e.notes
            ),
            events.FetchSettled: lambda e: self._transfers.settled(e.fetch),
            events.PullRequested: self._pull_requested,
            events.SendDone: lambda e: self._serving.sent(e.stream),
            events.SlotChecked: lambda e: self._corruption.checked(e.check, right=e.right),
            events.RegionReady: lambda e: self._regions.ready(e.region),
            events.RingChanged: lambda e: self._ring_change.changed(e.record),
            events.LocateRequested: lambda e: self._survey.locate(
                e.request, TenantId(e.tenant), e.keys, e.deadline_s, e.disks
            ),
            events.HintGiven: lambda e: self._touches.hint(
                TenantId(e.tenant), split_keys(e.keys), with_access(e.hints, NO_ACCESS)
            ),
            events.EvictRequested: lambda e: self._orders.evict(e.request, TenantId(e.tenant), e.keys, e.slot_bytes),
            events.PrefetchRequested: self._prefetches.requested,
            events.UnpinRequested: self._unpin_requested,
            events.DiskReady: self._disk.ready,
            events.DiskFound: self._disk.found,
            events.DiskRecovered: self._disk.recovered,
            events.DiskGone: lambda e: self._disk.gone(e.device),
            events.DiskWritten: self._disk.written,
            events.DiskErased: self._disk.erased,
            events.ColdReady: self._tier.came_up,
            events.ColdGone: self._tier.went,
            events.ColdLooked: self._tier.looked,
            events.ColdWritten: self._cold.written,
            events.SaveRequested: lambda e: self._orders.save(e.limit_s),
            events.RegionKept: self._kept.region,
            events.SegmentsKept: self._kept.segments,
            events.MemoryKept: self._kept.memory,
            events.SegmentsKeptDone: lambda e: self._kept.done(),
            events.SurvivorGone: lambda e: self._kept.survivor_gone(e.survivor),
            events.SealRequested: lambda e: self._ledger.seal(),
            events.Tick: lambda e: context.timers.fire_next(context.now),
            # Requests of an engine's process: handler(process, request).
            engine.Match: self._matches.match,
            engine.Attach: self._attach,
            engine.Fetch: self._reads.fetch,
            engine.Release: self._reads.release,
            engine.Locate: self._reads.where,
            engine.Hint: self._reads.hint,
            engine.Prefetch: self._prefetches.asked,
            engine.Unpin: self._unpin,
            engine.Corrupt: self._corruption.engine_reports,
            engine.Prepare: self._writes.prepare,
            engine.Commit: self._writes.commit,
            engine.Abort: self._writes.abort,
            engine.MarkInFlight: self._markers.mark,
            engine.Regrant: self._regrants.regrant,
            engine.ReconcileGrants: lambda process, m: self._sessions.reconcile(process, m.leases, m.writes),
            # Messages of another node: handler(node, message).
            peer.Ping: self._peers.pinged,
            peer.Pong: self._peers.replied,
            peer.Lookup: self._lookup,
            peer.LookupReply: self._peers.replied,
            peer.ReleaseLease: lambda node, m: self._serving.release_some(m.leases, node),
            peer.RenewLease: lambda node, m: self._serving.renew(node, m.leases),
            peer.MarkInFlight: self._directory_node.announced,
            peer.ClearInFlight: self._directory_node.withdrawn,
            peer.Offer: self._handover.offered,
            peer.OfferReply: self._peers.replied,
            peer.Owned: self._owned,
            peer.AdvertisingDone: self._directory_node.advertised,
            peer.Redundant: lambda node, m: self._ownership.redundant(
                self._directory_node.believed(node, m), HANDED_OVER if m.handed_over else DUPLICATES
            ),
            peer.Unfound: self._directory_node.unfound,
            peer.Evicted: self._evicted,
            peer.Touched: self._touches.touched,
            peer.Corrupt: self._corruption.node_reports,
            peer.EvictionStatistics: lambda node, m: self._learned.heard(m),
            peer.ExplainMissing: self._explain.ask,
            peer.ExplainMissingReply: self._peers.replied,
        }

    # -- the driver's interface

    @property
    def store(self) -> SegmentStore:
        """The segments and slots of this node, for gauges and checks; the caller must not change them."""
        return self._context.store

    @property
    def counters(self) -> Counters:
        """The counters of this node's rules, for the metrics page."""
        return self._context.counters

    @property
    def config(self) -> CoreConfig:
        """The configuration with which this node's rules were created."""
        return self._context.config

    @property
    def ring(self) -> Ring:
        """The hash ring of now."""
        return self._context.ring

    @property
    def record(self) -> RingRecord:
        """The newest record of the members that the rules have."""
        return self._context.record

    def vacancy(self) -> Vacancy:
        """How much room the memory of this node has, for the metrics page."""
        return self._context.vacancy()

    def disk_usage(self) -> list[SlabUse]:
        """The use of each slab on the devices of this node, for the metrics page."""
        return list(self._context.disk.usage())

    def disk_budgets(self) -> dict[int, float]:
        """The bytes that may be written now by `disk_writes_per_day`, by device; empty without that limit."""
        return self._context.disk.budgets(self._context.now)

    def ring_states(self) -> dict[str, str]:
        """How the ring of each peer compares with that of this node, for gauges: "same", "older", "newer", "differs"
        (equal epochs, other members), or "unknown" before the peer has named its ring."""
        return self._ring_change.states()

    def levels(self) -> list[Level]:
        """The gauges of the rules, for the metrics page."""
        return list(self._kept.levels())

    def members(self) -> list[MemberState]:
        """The state of each member of the cluster as this node knows it, itself included, by name."""
        return members_of(self._context, self._peers)

    def recent_requests(self) -> list[RecentRequest]:
        """The newest requests of this node, the oldest first."""
        return self._explain.recent()

    def process(self, connection: int) -> Process | None:
        """The process of an engine, for spans; the caller must not change it."""
        return self._sessions.process(ConnectionId(connection))

    def account(self, tenant: str, request: str) -> Account | None:
        """The tokens of a request, from its newest match on, for spans; the caller must not change them."""
        return self._explain.account(TenantId(tenant), request)

    def start(self, now: float) -> None:
        """Start the timers of the rules at the time `now`, in seconds. The driver calls it once, before the first
        event."""
        self._context.now = self._context.started = now
        self._peers.start()
        self._handover.start()
        self._learned.start()
        self._sessions.start()
        self._ring_change.start()
        self._context.after(self._context.config.gossip_s, self._report)
        if self._context.store.regions.unmade:
            self._context.after(0.0, self._regions.look)

    def next_wake(self) -> float | None:
        """The time in seconds of the earliest timer, at which the driver passes in the event `Tick`; None without a
        timer. Each `Tick` fires one timer.

        Deadlines pass only in `Tick`, and a reply handled before it counts as in time. A driver that was late therefore
        passes in the events that arrived meanwhile first, so that its own delay makes no peer overdue."""
        return self._context.timers.next()

    def handle(self, event: events.Event, now: float) -> list[Instruction]:
        """Take one event, as a whole or not at all; returns the instructions it leads to, in order. `now` (seconds)
        never decreases.

        Raises `ValueError` for an event that no correct engine or peer causes: its fields contradict each other, or
        name something that does not exist. Nothing was changed then, the time included.
        Raises `HandlerFailed` for a mistake of the rules or of the driver: it carries the instructions that belong to
        the changes made, and none of them comes with a later event.
        """
        assert self._context.now <= now < math.inf, f"an event at {now} s after one at {self._context.now} s"
        self._checks.check(event)
        self._context.now = now
        try:
            self._handlers[type(event)](event)
            return self._take_instructions()
        except Exception as error:
            raise HandlerFailed(type(event).__name__, self._instructions_after_failure()) from error

    def _take_instructions(self) -> list[Instruction]:
        """Returns the instructions of the event and empties the list. Regions that got slots come first; then the
        records of the ledger, which is true before others learn of a change; then the new generations of reissued
        slots, because a reader compares generations before it uses bytes; then the instructions that the handlers
        emitted; last the reports of the segments that the event evicted."""
        # The disk tier comes after the regions, which may evict segments.
        self._regions.follow()
        gone = self._context.store.take_gone()
        self._pins.left(gone)
        self._salt_quotas.left(gone)
        self._report_gone(self._disk.follow(gone))
        self._cold.follow(gone)
        return self._emitted()

    def _emitted(self) -> list[Instruction]:
        context = self._context
        out, context.out = context.out, []
        opened, reissued = context.store.take_slots()
        if reissued:
            out.insert(0, Stamp(b"".join(reissued)))
        record = self._ledger.take()
        if record is not None:
            out.insert(0, record)
        out[:0] = [CutRegion(*region) for region in opened]
        return out

    def _instructions_after_failure(self) -> list[Instruction]:
        """Returns the instructions that the failed handler emitted. If the work for the disk or the reports of evicted
        segments fail as well, these reports are dropped: a directory entry that becomes stale by that is corrected by
        the next node that follows it."""
        try:
            return self._take_instructions()
        except Exception:
            return self._emitted()

    def _arrived(self, segment: Segment) -> None:
        """A segment became READY in memory."""
        self._salt_quotas.arrived(segment)
        if self._context.disk.devices:
            self._context.disk.arrived(segment)
        self._waiting.arrived(segment.tenant, (segment.key,))

    def _read(self, segments: list[Segment]) -> None:
        """A read of the READY segments of one prompt was counted."""
        self._ownership.read(segments)
        self._salt_quotas.read(segments)

    # -- engines

    def _joined(self, event: events.Joined) -> None:
        connection, tenant = ConnectionId(event.connection), TenantId(event.tenant)
        session, resume = SessionId(event.session), ConnectionId(event.resume)
        survivor = self._kept.joining(event.survivor, tenant, session) if event.survivor else None
        if survivor is not None:
            session, resume = survivor
            if not any(each.id == session for each in self._sessions):
                session = SessionId(0)
        resumed = self._sessions.process(resume)
        sizes = event.slot_bytes, event.shards, event.segment_tokens
        joined = self._sessions.join(connection, tenant, *sizes, session, resume)
        if isinstance(joined, Session):
            if survivor is not None:
                self._kept.joined(event.survivor, SessionId(event.session), joined.id, connection)
            if resumed is not None and not resumed.alive:
                self._markers.move(resumed.connection, connection)
                self._kept.moved(resumed.connection, connection)
            for part in (account, misses):
                part.begin_tenant(self._context.counters, joined.tenant)
            self._refusals.begin_tenant(joined.tenant)
            self._kept.unwanted.pop(joined.tenant, None)
            self._context.emit(Welcomed(event.connection, event.request, joined.id))
            self._regions.look()
        else:
            self._context.emit(Answer(event.connection, engine.Failed(event.request, "LimitReached", joined)))

    def _requested(self, event: events.Requested) -> None:
        process = self._sessions.process(ConnectionId(event.connection))
        if process is None:
            return
        message = event.message
        alive = self._sessions.renew(process.session)
        if isinstance(message, engine.Heartbeat):
            self._context.emit(Answer(event.connection, engine.HeartbeatReply(message.id, alive)))
        else:
            self._handlers[type(message)](process, message)

    def _attach(self, process: Process, request: engine.Attach) -> None:
        if WriteId(request.lease) in process.session.writes:
            self._writes.attach(process, request)
        else:
            self._reads.attach(process, request)

    def _unpin(self, process: Process, request: engine.Unpin) -> None:
        self._pins.unpin(process.session.tenant, split_keys(request.keys))

    def _unpin_requested(self, event: events.UnpinRequested) -> None:
        tenant = TenantId(event.tenant)

        def done(count: int) -> None:
            self._context.emit(UnpinDone(event.request, count))

        if event.keys:
            done(self._pins.unpin(tenant, split_keys(event.keys)))
        else:
            self._pins.unpin_all(tenant, done)

    def _process_gone(self, event: events.ProcessGone) -> None:
        self._sessions.gone(ConnectionId(event.connection))
        self._markers.process_gone(ConnectionId(event.connection))
        self._kept.process_gone(ConnectionId(event.connection))

    # -- peers

    def _lost(self, peer_: Peer) -> None:
        self._serving.release_all(peer_.node)
        self._suspected(peer_)

    def _suspected(self, peer_: Peer) -> None:
        self._directory_node.lost(peer_)
        self._ownership.owner_lost(peer_)

    def _peer_sent(self, event: events.PeerSent) -> None:
        node = NodeId(event.node)
        self._peers.heard(node)
        self._handlers[type(event.message)](node, event.message)

    def _pull_requested(self, event: events.PullRequested) -> None:
        keys = split_keys(event.keys)
        self._serving.pull(event.stream, NodeId(event.node), TenantId(event.tenant), keys, background=event.background)

    def _lookup(self, node: NodeId, message: peer.Lookup) -> None:
        self._peers.names_ring(node, message.ring)
        self._context.emit(SendToPeer(node, self._serving.lookup(node, message)))

    def _owned(self, node: NodeId, message: peer.Owned) -> None:
        keys, previous = split_keys(message.keys), NodeId(message.previous)
        redundant = self._directory_node.owned(node, TenantId(message.tenant), keys, previous)
        if redundant.keys:
            self._peers.tell(node, redundant)
        self._waiting.arrived(TenantId(message.tenant), keys)

    def _evicted(self, node: NodeId, message: peer.Evicted) -> None:
        tenant, keys = TenantId(message.tenant), split_keys(message.keys)
        self._directory_node.gone(tenant, keys, node)
        self._directory_node.remember(tenant, keys, message.last_access, message.last_access_age_s)
        self._ownership.owner_evicted(node, tenant, keys)
        self._explain.gone(node, tenant, keys, message)

    def _report_gone(self, gone: Sequence[Segment]) -> None:
        """Tell the directory nodes which segments left this node, by which rule, and their last access."""
        groups: dict[tuple[TenantId, str, AccessRecord, float], list[SegmentKey]] = {}
        for segment in gone:
            group = segment.tenant, segment.left_by, segment.hints.access, segment.touched
            groups.setdefault(group, []).append(segment.key)
        for (tenant, rule, access, touched), keys in groups.items():
            self._directory_node.tell_evicted(tenant, keys, rule, access, self._context.since(touched))

    def _report(self) -> None:
        self._touches.report()
        self._serving.sweep()
        self._pins.sweep()
        self._disk.look()
        self._cold.look()
        # Repeated in each gossip interval: when a tenant joined, the memory for it may still have been pinned by
        # engines that had died.
        self._regions.look()
        self._context.after(self._context.config.gossip_s, self._report)

    # -- checks

    def census(self) -> dict[str, int]:
        """How many objects the rules keep, by kind (leases, transfers, timers and others), except the segments: for
        gauges, and for tests that look for leaks."""
        counted = {name: count for part in self._parts for name, count in part.census().items()}
        return {**counted, "timers": len(self._context.timers)}

    def idle(self) -> bool:
        """True while this node has no lease, write, pin, transfer or match under way."""
        held = any(segment.pins or segment.kind is Kind.DIRTY for segment in self.store.segments())
        quarantined = any(pool.quarantined for pool in self.store.pools())
        return not (held or quarantined or self._matches.matching)

    def check_integrity(self) -> None:
        """Raises AssertionError when the slots, pins, tokens or counts of this node contradict each other. Slow; for
        tests.

        Pins are conserved: those of a segment are exactly the pins that leases, writes, matches, fetches, leases of
        peers, sends and checks hold.
        """
        self.store.check_integrity()
        for part in self._parts:
            part.check_integrity()
        account.check_integrity(self.counters)
        pins = Counter(segment for part in self._parts for segment in part.pinned())
        for segment in self.store.segments():
            assert segment.pins == pins[segment], f"{segment}: {pins[segment]} pins are held"
            if segment.state is State.RESERVED:
                assert segment.pins > 0, f"{segment} is RESERVED without a write"
        assert all(segment.pins == held for segment, held in pins.items())
        gone = sum(segment.state is State.GONE for segment in pins)
        assert gone == sum(pool.quarantined for pool in self.store.pools()), "a slot outside the quarantine is pinned"
