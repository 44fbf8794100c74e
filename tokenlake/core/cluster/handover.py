"""Hand-over of new segments from a full node to a node whose memory has been clearly emptier for long.

::

    commit at a node whose memory is full
        another node is clearly emptier, now and as a running mean?
            --> Offer of the new segments to the emptiest one
                    |  the other node pulls those that its policy admits, owns them, tells their directory nodes
                    v
                OfferReply: the copies here become cached copies of the new owner

Engines that compute on some nodes only would else fill the memory of these and leave that of the others unused. Where
the load is even, hardly anything is handed over. The receiver pulls what it is offered, so that bytes between nodes
have one path, one deadline and one checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.owner import Ownership
from tokenlake.core.cluster.peers import Peer, Peers, Reply
from tokenlake.core.cluster.transfer import OnArrival, deadline_s
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.context import Context, Part
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.location import levels
from tokenlake.memory import Kind, Segment, State
from tokenlake.memory.vacancy import Vacancy
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys, split_keys

HANDED_OVER = Metric("tokenlake_handed_over_segments_total", "Segments that another node took over from this one")

CLEARLY = 1.0
"""Minimum of `Vacancy.lead`, a measure of how much emptier the other node is (1: clearly), now and as a running mean,
for a hand-over to it."""
LASTING_S = 60.0
"""Time constant in seconds of the running mean of the leads. Under even load each node is clearly emptier than others
now and then, but not for so long."""
FARTHER = 3.0
"""Between two full nodes, each level of location between them (`tokenlake.location`) raises the minimum lead for a
hand-over by so many times `CLEARLY`, because the segments cross slow links."""
MAX_OFFERS = 8
"""Maximum number of offers of this node that are under way at a time. The segments of a write that finds so many stay
here; a drain makes its next offer when one is answered."""
MAX_TAKEN = 64
"""Offers that this node takes at a time. The full nodes of a large cluster all offer to a node that has just joined: it
refuses the others, which stay where they are."""
GRACE_S = 1.0
"""Seconds added to the deadline of an offer, because the receiver may pull the segments that other nodes offered
first."""


class Handover(Part):
    """Offers new segments of this node to a clearly emptier node, and takes over segments that other nodes offer."""

    def __init__(
        self,
        context: Context,
        peers: Peers,
        directory_node: DirectoryNode,
        ownership: Ownership,
        transfers: Transfers,
    ) -> None:
        self._context = context
        self._peers = peers
        self._directory_node = directory_node
        self._ownership = ownership
        self._transfers = transfers
        self._leads: dict[NodeId, float] = {}
        """Running mean of `Vacancy.lead` (how much emptier the node is than this one) for each other node."""
        self.offers = 0
        """Offers that are not answered yet, those of a drain included."""
        self._comparing = False
        self._taking = 0
        """Offers of other nodes that are being taken."""

    def start(self) -> None:
        """Begin to compare the memory of the nodes once per gossip interval."""
        if len(self._context.ring.members) > 1:
            self._comparing = True
            self._context.after(self._context.config.gossip_s, self._compare)

    def ring_changed(self) -> None:
        """Follow a change of the members: forget the leads of nodes that left, and begin to compare if this node was
        alone."""
        self._leads = {node: lead for node, lead in self._leads.items() if self._peers.get(node) is not None}
        if not self._comparing:
            self.start()

    def _compare(self) -> None:
        here, part = self._context.vacancy(), min(1.0, self._context.config.gossip_s / LASTING_S)
        for peer in self._peers:
            mean = self._leads.get(peer.node, 0.0)
            self._leads[peer.node] = mean + part * (peer.vacancy.lead(here) - mean)
        self._context.after(self._context.config.gossip_s, self._compare)

    # -- offers made

    def committed(self, segments: Sequence[Segment]) -> None:
        """Handle the commit of a write. `segments`: READY, in prompt order. If another node has been clearly emptier
        for long, those that this node owns are offered to it, unless a drain offers all of them."""
        if self._context.draining or self.offers >= MAX_OFFERS or max(self._leads.values(), default=0.0) < CLEARLY:
            return
        segments = [segment for segment in segments if segment.owned]
        node = self._emptiest() if segments else None
        if node is not None:
            self.offer(node, segments, lambda: None)

    def offer(self, node: NodeId, segments: Sequence[Segment], done: Callable[[], None]) -> None:
        """Offer READY segments of one pool that this node owns (primary copies, and copies that the policy did not
        admit), in prompt order, to `node`. `done` is called once, when the offer is answered or its deadline has
        passed. The copies of segments that `node` took by then are cached copies here; the others stay as they are."""
        first = segments[0]
        make = partial(
            wire.Offer,
            tenant=first.tenant,
            keys=join_keys(segment.key for segment in segments),
            depths=tuple(segment.depth for segment in segments),
            slot_bytes=first.slot_bytes,
            shards=len(first.checksums) // CHECKSUM_BYTES,
            hints=first.hints,
        )
        self.offers += 1
        wait_s = GRACE_S + deadline_s(self._peers.path(node).predict_s(first.slot_bytes * len(segments)))
        self._peers.call(node, make, wait_s, partial(self._answered, node, segments, done), proves_life=False)

    def _emptiest(self) -> NodeId | None:
        """Returns the usable node of the highest rank (`_rank`), if this node is full and that one has been clearly
        emptier for long; else None."""
        here = self._context.vacancy()
        if not here.full:
            return None
        ranks = [(self._rank(peer, here), peer.node) for peer in self._peers if peer.usable and not peer.draining]
        lasting = [(rank, node) for rank, node in ranks if rank is not None]
        return max(lasting, key=lambda each: each[0])[1] if lasting else None

    def _rank(self, peer: Peer, here: Vacancy) -> tuple[bool, float, float] | None:
        """Returns the rank of a peer among those that may take segments of this node, whose vacancy is `here`; None if
        it has not been clearly emptier for long. A peer with free memory evicts nothing for them: the nearest such peer
        comes first. Of full peers, a far one must be so much emptier that the slow links are worth it."""
        lead, away = peer.vacancy.lead(here), levels(self._context.config.location, peer.location)
        full = peer.vacancy.full
        least = CLEARLY * (1 + FARTHER * away) if full else CLEARLY
        if min(lead, self._leads.get(peer.node, 0.0)) < least:
            return None
        return not full, lead / least if full else -away, lead

    def _answered(
        self, node: NodeId, segments: Sequence[Segment], done: Callable[[], None], reply: Reply | None
    ) -> None:
        self.offers -= 1
        if isinstance(reply, wire.OfferReply):
            # The deepest segment changes its kind first, so that the beginning of the prompt is evicted last.
            for segment, code in reversed(list(zip(segments, reply.codes, strict=True))):
                if code == Code.COMMITTED and segment.owned:
                    self._ownership.give_up(segment, node)
                    self._context.counters.add(HANDED_OVER)
        done()

    # -- offers taken

    def offered(self, node: NodeId, message: wire.Offer) -> None:
        """Handle an offer of `node`: fetch the segments that the policy admits, own them, tell their directory nodes
        and answer the offer. A node that drains, or that takes enough offers already, refuses."""
        tenant = TenantId(message.tenant)
        keys = split_keys(message.keys)
        codes = bytearray(len(keys))
        waiting = len(keys)
        if self._context.draining or self._taking >= MAX_TAKEN:
            refusal = Code.LOST if self._context.draining else Code.WRITE_BUDGET
            self._reply(node, message.call, bytes([refusal]) * len(keys))
            return
        self._taking += 1

        def arrived(index: int, segment: Segment | None, code: Code) -> None:
            nonlocal waiting
            waiting -= 1
            if segment is None:
                codes[index] = code if code.refused else Code.LOST
            else:
                self._context.store.unpin(segment)
                codes[index] = self._take_over(segment)
            if not waiting:
                # A segment that arrived early may have been evicted before the last one arrived.
                for at, held in enumerate(self._context.ready(tenant, keys)):
                    if codes[at] == Code.COMMITTED and (held is None or not held.owned):
                        codes[at] = Code.LOST
                taken = [key for key, code in zip(keys, codes, strict=True) if code == Code.COMMITTED]
                self._directory_node.tell_owned(tenant, taken, previous=node)
                self._taking -= 1
                self._reply(node, message.call, bytes(codes))
                if taken:
                    # Where the reply comes after the deadline of the offer, this message ends the giver's ownership.
                    here = (self._context.node,) * len(taken)
                    self._peers.tell(node, wire.Redundant(tenant, join_keys(taken), here, handed_over=True))

        wanted: list[tuple[SegmentKey, int, OnArrival]] = [
            (key, depth, partial(arrived, index))
            for index, (key, depth) in enumerate(zip(keys, message.depths, strict=True))
        ]
        # No engine waits for these segments: half of the grace is left for the answer, before the offer expires.
        predicted = self._peers.path(node).predict_s(message.slot_bytes * len(keys))
        self._transfers.bring(
            node,
            tenant,
            wanted,
            kind=Kind.PRIMARY,
            slot_bytes=message.slot_bytes,
            shards=message.shards,
            wait_s=deadline_s(predicted) + GRACE_S / 2,
            hints=message.hints,
        )

    def _reply(self, node: NodeId, call: int, codes: bytes) -> None:
        self._peers.tell(node, wire.OfferReply(call, codes, self._context.vacancy(), self._context.load()))

    def _take_over(self, segment: Segment) -> Code:
        """Make a segment that arrived, or that this node had already, a primary copy that this node owns. Returns
        COMMITTED, or LOST if it cannot be one."""
        if segment.state is not State.READY or segment.kind not in (Kind.PRIMARY, Kind.CACHED):
            return Code.LOST
        self._context.store.own(segment)
        self._context.store.become(segment, Kind.PRIMARY, self._context.now)
        return Code.COMMITTED

    # -- checks

    def census(self) -> dict[str, int]:
        return {"offers": self.offers, "offers being taken": self._taking}
