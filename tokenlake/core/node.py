"""NodeCore: every decision of a node, with no I/O.

A driver (the daemon, the simulator, a replay) hands it one event at a time with the time at which it
happened, carries out the instructions it returns, and calls it with `Tick` when `next_wake` is reached. Equal
events at equal times give equal instructions in every process: nothing here iterates a set, reads a clock or
draws a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tokenlake.core import events
from tokenlake.core.checks import Checks
from tokenlake.core.claims import Claims
from tokenlake.core.context import Context, CoreConfig
from tokenlake.core.corruption import Corruption
from tokenlake.core.directory_node import DirectoryNode
from tokenlake.core.explain import Explain
from tokenlake.core.failure import HandlerFailed
from tokenlake.core.fetches import Fetches
from tokenlake.core.instructions import Answer, Instruction, Say, Stamp, Welcomed
from tokenlake.core.learned import Learned
from tokenlake.core.matches import Matches
from tokenlake.core.ownership import Ownership
from tokenlake.core.peers import Peer, Peers
from tokenlake.core.reads import Reads
from tokenlake.core.regions import Regions
from tokenlake.core.replicas import Replicas
from tokenlake.core.replication import Replication
from tokenlake.core.serve import Serving
from tokenlake.core.sessions import Process, Session, Sessions
from tokenlake.core.touches import Touches
from tokenlake.core.write import Writes
from tokenlake.identity import ConnectionId, Incarnation, LeaseId, NodeId, SegmentKey, SessionId, TenantId, WriteId
from tokenlake.metrics import Counters
from tokenlake.ring import Ring
from tokenlake.store import Kind, Segment, SegmentStore, State
from tokenlake.store.history import CORRUPT_RULE
from tokenlake.wire import engine, peer
from tokenlake.wire.slots import split_keys

__all__ = ["NodeCore"]


class NodeCore:
    """The whole sequence of every read, write, push, retry and time-out of one node."""

    def __init__(self, config: CoreConfig) -> None:
        context = self._context = Context(config)
        self._peers = Peers(context, self._lost, self._suspected, self._restored)
        self._directory_node = DirectoryNode(context, self._peers)
        self._fetches = Fetches(context, self._peers)
        self._ownership = Ownership(context, self._peers, self._directory_node, self._fetches)
        self._touches = Touches(context, self._peers, self._ownership.place_again)
        self._sessions = Sessions(context, self._touches)
        self._replicas = Replicas(context, self._peers, self._fetches)
        self._replication = Replication(context, self._peers, self._directory_node, self._ownership, self._replicas)
        self._regions = Regions(context, self._sessions)
        self._serving = Serving(context, self._peers, self._directory_node, self._replication)
        self._explain = Explain(context, self._peers)
        self._matches = Matches(
            context,
            self._sessions,
            self._peers,
            self._directory_node,
            self._replicas,
            self._replication,
            self._explain,
        )
        self._corruption = Corruption(context)
        self._reads = Reads(context, self._sessions, self._peers, self._fetches, self._touches, self._copies_of)
        self._claims = Claims(context, self._directory_node)
        self._writes = Writes(context, self._sessions, self._directory_node, self._ownership, self._touches)
        self._learned = Learned(context, self._peers)
        self._checks = Checks(
            context, self._sessions, self._peers, self._fetches, self._serving, self._regions, self._learned
        )
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Joined: self._on_joined,
            events.Requested: self._on_requested,
            events.ProcessGone: self._on_process_gone,
            events.PeerUp: lambda e: self._peers.came_up(NodeId(e.node), Incarnation(e.incarnation)),
            events.PeerDown: lambda e: self._peers.went_down(NodeId(e.node), Incarnation(e.incarnation)),
            events.PeerSaid: self._on_peer_said,
            events.FetchDone: lambda e: self._fetches.done(e.fetch, e.codes, e.checksums),
            events.PullAsked: self._on_pull_asked,
            events.SendDone: lambda e: self._serving.sent(e.stream),
            events.SlotChecked: lambda e: self._corruption.checked(e.check, right=e.right),
            events.RegionReady: lambda e: self._regions.ready(e.region),
            events.LearnedBefore: lambda e: self._learned.restore(e.data),
            events.Asked: lambda e: self._explain.asked(e.connection, TenantId(e.tenant), e.message),
            events.Tick: lambda e: context.timers.fire(context.now),
        }
        self._told: dict[type, Callable[[NodeId, Any], None]] = {
            peer.Lookup: self._on_lookup,
            peer.LookupReply: self._peers.replied,
            peer.ReadyReply: self._peers.replied,
            peer.OfferReply: self._peers.replied,
            peer.Replicated: self._peers.replied,
            peer.ToldWhy: self._peers.replied,
            peer.ReleaseLease: self._on_release,
            peer.RenewLease: lambda node, m: self._serving.renew(node, m.leases),
            peer.Announce: self._directory_node.announced,
            peer.Withdraw: self._directory_node.withdrawn,
            peer.Ready: self._on_ready,
            peer.Offer: self._ownership.offered,
            peer.Held: self._on_held,
            peer.Redundant: lambda node, m: self._ownership.redundant(m),
            peer.Evicted: self._on_evicted,
            peer.Corrupt: self._corruption.node_reports,
            peer.Touched: self._on_touched,
            peer.Advertised: lambda node, m: self._directory_node.advertised(node),
            peer.Ping: self._on_ping,
            peer.Pong: self._on_pong,
            peer.Reads: lambda node, m: self._replication.reported(m),
            peer.Replicate: self._replicas.requested,
            peer.HotSet: self._replicas.hot_set,
            peer.HotWanted: lambda node, m: self._replication.set_wanted(node),
            peer.Learned: lambda node, m: self._learned.heard(m),
            peer.AskWhy: self._explain.ask,
        }
        self._requests: dict[type, Callable[[Process, Any], None]] = {
            engine.Match: self._matches.match,
            engine.Attach: self._attach,
            engine.Fetch: self._reads.fetch,
            engine.Release: self._reads.release,
            engine.Where: self._reads.where,
            engine.Shipped: self._reads.shipped,
            engine.Hint: self._reads.hint,
            engine.Corrupt: self._corruption.engine_reports,
            engine.Prepare: self._writes.prepare,
            engine.Commit: self._writes.commit,
            engine.Abort: self._writes.abort,
            engine.Claim: self._claims.claim,
            engine.Holds: lambda process, m: self._sessions.keep(process, m.leases, m.writes),
        }

    # -- the driver's side

    @property
    def store(self) -> SegmentStore:
        """For gauges and checks; not to be changed."""
        return self._context.store

    @property
    def counters(self) -> Counters:
        """For the metrics page."""
        return self._context.counters

    @property
    def config(self) -> CoreConfig:
        """As given."""
        return self._context.config

    @property
    def ring(self) -> Ring:
        """Who is in the cluster."""
        return self._context.ring

    def learned(self) -> bytes:
        """What the policy of eviction learned so far, for `events.LearnedBefore` of the next life. Changes nothing."""
        return self._learned.save()

    def start(self, now: float) -> None:
        """Once, before the first event: timers begin at `now`."""
        self._context.now = self._context.started = now
        self._peers.start()
        self._replication.start()
        self._learned.start()
        self._context.after(self._context.config.peer_lease_s / 3, self._renew)
        self._context.after(self._context.config.gossip_s, self._report)

    def next_wake(self) -> float | None:
        """When to call with `Tick`. Deadlines pass with it alone, and an answer that comes before it came in time: a
        driver that was late hands over what came meanwhile first, so that nobody's peer pays for its own delay."""
        return self._context.timers.next()

    def handle(self, event: events.Event, now: float) -> list[Instruction]:
        """Take one event, whole or not at all; what to do about it, in order. `now` (seconds) never decreases.

        Raises `ValueError` for an event that its sender, or the driver, should not have made: its fields do not add up,
        or name what is not there. Nothing was changed then, the time included, and no instruction is left behind.
        Raises `HandlerFailed` for a mistake of the rules: it carries the instructions that go with what was changed
        until then, and none of them comes with a later event.
        """
        self._checks.check(event, now)
        self._context.now = now
        try:
            self._handlers[type(event)](event)
            return self._instructions()
        except Exception as error:
            raise HandlerFailed(type(event).__name__, self._instructions_after_failure()) from error

    def _instructions(self) -> list[Instruction]:
        """What the event led to, taken out."""
        context = self._context
        if context.store.evicted:
            self._tell_evicted()
        if self._sessions.given_up:
            self._writes.withdraw_given_up()
        if self._sessions.peer_releases:
            for node, leases in self._sessions.take_peer_releases().items():
                self._peers.tell(node, peer.ReleaseLease(tuple(leases)))
        out, context.out = context.out, []
        if context.store.reissued:
            out.insert(0, Stamp(b"".join(place.pack() for place in context.store.reissued)))
            context.store.reissued.clear()
        return out

    def _instructions_after_failure(self) -> list[Instruction]:
        """What the event led to before its handler failed. Where other nodes cannot be told what follows from it, they
        find out by themselves: leases and claims end with their deadlines, hints are corrected by who follows them."""
        try:
            return self._instructions()
        except Exception:
            self._context.store.evicted = []
            self._sessions.take_given_up()
            self._sessions.take_peer_releases()
            return self._instructions()

    # -- engines

    def _on_joined(self, event: events.Joined) -> None:
        tenant = TenantId(event.tenant)
        joined = self._sessions.join(
            ConnectionId(event.connection),
            tenant,
            event.slot_bytes,
            event.shards,
            event.segment_tokens,
            SessionId(event.session),
            ConnectionId(event.resume),
        )
        if isinstance(joined, Session):
            self._context.emit(Welcomed(event.connection, event.request, joined.id))
            self._regions.look()
        else:
            self._context.emit(Answer(event.connection, engine.Failed(event.request, "LimitReached", joined)))

    def _on_requested(self, event: events.Requested) -> None:
        process = self._sessions.process(ConnectionId(event.connection))
        if process is None:
            return
        message = event.message
        alive = self._sessions.renew(process.session)
        if isinstance(message, engine.Heartbeat):
            self._context.emit(Answer(event.connection, engine.HeartbeatReply(message.id, alive)))
            return
        self._requests[type(message)](process, message)

    def _attach(self, process: Process, request: engine.Attach) -> None:
        if WriteId(request.lease) in process.session.writes:
            self._writes.attach(process, request)
        else:
            self._reads.attach(process, request)

    def _on_process_gone(self, event: events.ProcessGone) -> None:
        self._sessions.gone(ConnectionId(event.connection))
        self._claims.gone(ConnectionId(event.connection))

    # -- peers

    def _lost(self, peer_: Peer) -> None:
        self._serving.release_all(peer_.node)
        self._ownership.owner_lost(peer_)

    def _suspected(self, peer_: Peer) -> None:
        self._ownership.owner_lost(peer_)

    def _restored(self, peer_: Peer) -> None:
        self._directory_node.restored(peer_)

    def _on_peer_said(self, event: events.PeerSaid) -> None:
        node = NodeId(event.node)
        self._peers.heard(node)
        self._told[type(event.message)](node, event.message)

    def _on_pull_asked(self, event: events.PullAsked) -> None:
        keys = split_keys(event.keys)
        self._serving.pull(event.stream, NodeId(event.node), TenantId(event.tenant), keys, background=event.background)

    def _on_lookup(self, node: NodeId, message: peer.Lookup) -> None:
        self._context.emit(Say(node, self._serving.lookup(node, message)))

    def _on_release(self, node: NodeId, message: peer.ReleaseLease) -> None:
        for lease in message.leases:
            self._serving.release(LeaseId(lease), node)

    def _on_ready(self, node: NodeId, message: peer.Ready) -> None:
        keys = split_keys(message.keys)
        self._peers.tell(node, self._directory_node.ready(node, TenantId(message.tenant), keys, message.call))

    def _on_ping(self, node: NodeId, message: peer.Ping) -> None:
        self._replicas.heard_version(node, message.hot_version)
        self._peers.pinged(node, message)

    def _on_pong(self, node: NodeId, message: peer.Pong) -> None:
        self._replicas.heard_version(node, message.hot_version)
        self._peers.replied(node, message)

    def _on_held(self, node: NodeId, message: peer.Held) -> None:
        redundant = self._directory_node.held(node, TenantId(message.tenant), split_keys(message.keys))
        if redundant.keys:
            self._peers.tell(node, redundant)

    def _on_evicted(self, node: NodeId, message: peer.Evicted) -> None:
        keys = split_keys(message.keys)
        self._directory_node.left(NodeId(message.node), TenantId(message.tenant), keys, message.rule)
        self._replication.gone(TenantId(message.tenant), keys, NodeId(message.node))
        self._explain.gone(TenantId(message.tenant), keys, message)

    def _on_touched(self, node: NodeId, message: peer.Touched) -> None:
        """Reads of copies elsewhere keep the primary copies alive, and words about them reach them; the keys come
        deepest
        first."""
        found = self._context.ready(TenantId(message.tenant), split_keys(message.keys))
        directory_nodes = [
            segment for segment in reversed(found) if segment is not None and segment.kind is Kind.PRIMARY
        ]
        if message.used:
            self._context.store.touch(directory_nodes, self._context.now, message.hints)
            self._ownership.place_again([segment for segment in reversed(found) if segment is not None])
        elif message.hints is not None:
            self._context.store.hint(directory_nodes, message.hints, self._context.now)
        copies = [segment for segment in found if segment is not None and segment.kind is not Kind.PRIMARY]
        if copies and not message.relayed:
            self._touches.relay(copies, message.hints, used=message.used)

    def _tell_evicted(self) -> None:
        evicted, self._context.store.evicted = self._context.store.evicted, []
        by_rule: dict[tuple[TenantId, str], list[Segment]] = {}
        for segment in evicted:
            gone = self._context.history.get(segment.tenant, segment.key)
            by_rule.setdefault((segment.tenant, gone.rule if gone is not None else ""), []).append(segment)
        here = self._context.node
        for (tenant, rule), segments in by_rule.items():
            own = self._directory_node.tell_evicted(tenant, (segment.key for segment in segments), here, rule)
            self._directory_node.left(here, tenant, own, rule)
            if rule == CORRUPT_RULE:
                self._replication.gone(tenant, own, here)

    def _copies_of(self, tenant: TenantId, key: SegmentKey) -> list[NodeId]:
        """Other nodes that may have a copy, the likeliest first: what its hot set or this node's directory says, then
        its candidates."""
        named = self._directory_node.ask(tenant, [key])[0][1]
        pair = self._context.ring.candidates(key)[0]
        nodes = [*self._replicas.copies_of(tenant, key), *([named] if named is not None else []), *pair]
        return [node for node in dict.fromkeys(nodes) if self._peers.usable(node)]

    def _renew(self) -> None:
        """What engines leased at other nodes lives as long as their sessions do here."""
        for node, leases in self._sessions.remote_leases().items():
            self._peers.tell(node, peer.RenewLease(tuple(leases)))
        self._context.after(self._context.config.peer_lease_s / 3, self._renew)

    def _report(self) -> None:
        self._touches.report()
        self._serving.sweep()
        # When a newcomer joined, the memory it needs may still have been pinned by engines that were gone already.
        self._regions.look()
        self._context.after(self._context.config.gossip_s, self._report)

    # -- checks

    def census(self) -> dict[str, int]:
        """Entries of each map of the rules beside the segments: for gauges, and to see that nothing leaks."""
        parts = (
            self._sessions,
            self._matches,
            self._touches,
            self._fetches,
            self._serving,
            self._ownership,
            self._peers,
            self._directory_node,
            self._explain,
            self._replicas,
            self._replication,
            self._claims,
            self._corruption,
        )
        counted = {name: count for part in parts for name, count in part.census().items()}
        return {**counted, "timers": len(self._context.timers)}

    def hot(self) -> dict[str, int]:
        """Hot segments, by what of them: for gauges."""
        return self._replication.gauges()

    def idle(self) -> bool:
        """Nothing is leased, reserved, pinned, on its way or waited for."""
        held = any(segment.pins or segment.kind is Kind.DIRTY for segment in self.store.segments())
        quarantined = any(pool.quarantined for pool in self.store.pools())
        return not (held or quarantined or self._matches.matching)

    def check_integrity(self) -> None:
        """AssertionError when state does not add up: slots, pins, counts. Slow; for tests.

        Pins are conserved: those of a segment are what leases, writes, matches under way, flights, leases to
        peers and sends hold of it, and nothing else.
        """
        self.store.check_integrity()
        self._sessions.check_integrity()
        self._serving.check_integrity()
        self._fetches.check_integrity()
        self._ownership.check_integrity()
        self._peers.check_integrity()
        self._replicas.check_integrity()
        self._replication.check_integrity()
        self._explain.check_integrity()
        self._corruption.check_integrity()
        self._directory_node.check_integrity()
        pins = Counter(self._pinned())
        for segment in self.store.segments():
            assert segment.pins == pins[segment], f"{segment}: {pins[segment]} pins are held"
            if segment.state is State.RESERVED:
                assert segment.pins > 0, f"{segment} is reserved by nobody"
        assert all(segment.pins == held for segment, held in pins.items())
        gone = sum(segment.state is State.GONE for segment in pins)
        assert gone == sum(pool.quarantined for pool in self.store.pools()), "somebody left the quarantine pinned"

    def _pinned(self) -> Iterator[Segment]:
        for part in (self._sessions, self._matches, self._fetches, self._serving, self._corruption):
            yield from part.pinned()
