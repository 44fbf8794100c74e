"""The longest event of a node with many segments when a peer or an engine goes: `python -m tests.core.sweeps [COUNT]`.

Prints the processor time of the longest `NodeCore.handle` of each case; asserts nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tests.sim.prompts import prompt
from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.directory.ring import Ring
from tokenlake.directory.ring_record import RingRecord
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.memory import Kind, Segment
from tokenlake.wire import engine, peer
from tokenlake.wire.slots import join_keys

SLOT_BYTES = 4096
RED, BLUE = TenantId("red"), TenantId("blue")
PER_PROMPT = 128
A, B = NodeId("a"), NodeId("b")


class Longest:
    """A core whose events are timed."""

    def __init__(self, count: int, regions: int = 1) -> None:
        per_region = -(-count // regions)
        members = RingRecord.of({A: 1, B: 1, "c": 1})
        config = CoreConfig(A, 1, members, regions + 1, (per_region + 64) * (SLOT_BYTES + 8) + 65536)
        self.core = NodeCore(config)
        self.core.start(0.0)
        self.now = 0.0
        self.longest_s = 0.0
        self.handle(events.Joined(1, 1, RED, SLOT_BYTES, 8, 256, 0, 0))
        self.handle(events.PeerUp(B, 1))
        self.handle(events.PeerUp("c", 1))

    def handle(self, event: events.Event) -> None:
        """At `now`."""
        began = time.thread_time()
        self.core.handle(event, self.now)
        self.longest_s = max(self.longest_s, time.thread_time() - began)

    def run_for(self, seconds: float) -> None:
        """Pass only the wake-ups that the rules asked for. Peers answer every ping."""
        until = self.now + seconds
        while (wake := self.core.next_wake()) is not None and wake <= until:
            self.now = max(self.now, wake)
            began = time.thread_time()
            out = self.core.handle(events.Tick(), self.now)
            self.longest_s = max(self.longest_s, time.thread_time() - began)
            for instruction in out:
                message = getattr(instruction, "message", None)
                if isinstance(message, peer.Ping):
                    pong = peer.Pong(message.call, (0.0, 0.0, 0.0), 0.0)
                    self.core.handle(events.PeerSent(instruction.node, pong), self.now)  # type: ignore[union-attr]
        self.now = until


def keys_of(count: int) -> list[SegmentKey]:
    """`count` keys, in prompts of 128 segments."""
    return [key for number in range(-(-count // PER_PROMPT)) for key in prompt(f"p{number}", PER_PROMPT)][:count]


def fill(node: Longest, count: int, kind: Kind, tenant: TenantId = RED) -> list[SegmentKey]:
    """`count` READY segments of `kind`, those that are cached from B."""
    store, keys = node.core.store, keys_of(count)
    for index, key in enumerate(keys):
        source = B if kind is Kind.CACHED else None
        segment = store.reserve(tenant, SLOT_BYTES, key, kind, index % PER_PROMPT, node.now, source=source)
        assert isinstance(segment, Segment), segment
        store.publish(segment, bytes(64), node.now)
        store.unpin(segment)
    store.take_slots()
    store.take_gone()
    return keys


def a_peer_came_back(count: int) -> Longest:
    """All primary copies are advertised."""
    node = Longest(count)
    fill(node, count, Kind.PRIMARY)
    node.run_for(1.0)
    node.longest_s = 0.0
    node.handle(events.PeerUp(B, 1))
    node.run_for(3.0)
    return node


def a_peer_restarted(count: int) -> Longest:
    """The directory drops the primary copies that the previous incarnation of the peer advertised."""
    node = Longest(count)
    keys = keys_of(count)
    for start in range(0, len(keys), PER_PROMPT):
        node.handle(events.PeerSent(B, peer.Owned(RED, join_keys(keys[start : start + PER_PROMPT]))))
    node.longest_s = 0.0
    node.handle(events.PeerUp(B, 2))
    node.run_for(3.0)
    return node


def a_peer_was_lost(count: int) -> Longest:
    """The node owns the segments of which it has cached copies of the peer's from now on, and tells stand-ins."""
    node = Longest(count)
    fill(node, count, Kind.CACHED)
    node.longest_s = 0.0
    node.handle(events.PeerDown(B, 1))
    node.run_for(3.0)
    return node


def a_region_changes_hands(count: int) -> Longest:
    """A tenant without memory gets a region of a tenant without engines."""
    node = Longest(count, regions=16)
    fill(node, count, Kind.PRIMARY, BLUE)
    node.longest_s = 0.0
    node.handle(events.Joined(2, 1, "green", SLOT_BYTES, 8, 256, 0, 0))
    node.run_for(3.0)
    return node


def all_regions_are_pinned(count: int) -> Longest:
    """A tenant without memory asks for a region, and every region has a pinned segment."""
    node = Longest(count, regions=16)
    fill(node, count, Kind.PRIMARY, BLUE)
    last = {segment.place.region: segment for segment in node.core.store.segments()}
    node.core.store.pin(*last.values())
    node.longest_s = 0.0
    node.handle(events.Joined(2, 1, "green", SLOT_BYTES, 8, 256, 0, 0))
    node.run_for(3.0)
    return node


def an_engine_died(count: int) -> Longest:
    """Half of the segments are leased to the engine, one prompt per lease."""
    node = Longest(count)
    keys = fill(node, count, Kind.PRIMARY)
    for start in range(0, len(keys) // 2, PER_PROMPT):
        node.handle(events.Requested(1, engine.Match(1, join_keys(keys[start : start + PER_PROMPT]), 0.0)))
    node.longest_s = 0.0
    node.handle(events.ProcessGone(1))
    node.run_for(3.0)
    return node


def a_peer_with_leases_was_lost(count: int) -> Longest:
    """Half of the segments are leased to the peer, one prompt per lease."""
    node = Longest(count)
    keys = fill(node, count, Kind.PRIMARY)
    for start in range(0, len(keys) // 2, PER_PROMPT):
        found = join_keys(keys[start : start + PER_PROMPT])
        node.handle(events.PeerSent(B, peer.Lookup(1, RED, found)))
    node.longest_s = 0.0
    node.handle(events.PeerDown(B, 1))
    node.run_for(3.0)
    return node


def the_ring_changed(count: int) -> Longest:
    """The new directory nodes are told all segments that moved, and the entries that moved away are forgotten."""
    node = Longest(count)
    keys = fill(node, count, Kind.PRIMARY)
    for start in range(0, len(keys), PER_PROMPT):
        node.handle(events.PeerSent(B, peer.Owned(BLUE, join_keys(keys[start : start + PER_PROMPT]))))
    record = node.core.record.with_member("d", 1)
    Ring(record)
    node.longest_s = 0.0
    node.handle(events.RingChanged(record))
    node.handle(events.PeerUp("d", 1))
    node.run_for(14.0)
    return node


def the_node_drains(count: int) -> Longest:
    """Its primary copies are found and offered to a peer, which does not answer."""
    node = Longest(count)
    fill(node, count, Kind.PRIMARY)
    for name in (B, "c"):
        node.handle(events.PeerSent(name, peer.Ping(1, (1.0, 0.0, 0.0), 0.0)))
    node.longest_s = 0.0
    node.handle(events.RingChanged(node.core.record.draining(A)))
    node.run_for(5.0)
    return node


CASES: tuple[Callable[[int], Longest], ...] = (
    a_peer_came_back,
    a_peer_restarted,
    a_peer_was_lost,
    a_region_changes_hands,
    all_regions_are_pinned,
    an_engine_died,
    a_peer_with_leases_was_lost,
    the_ring_changed,
    the_node_drains,
)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    for case in CASES:
        took = sorted(case(count).longest_s for _ in range(3))
        print(f"{case.__name__.replace('_', ' ')}: longest handle {took[0] * 1e3:.2f} ms (best of 3)", flush=True)
