"""A segment as its node knows it.

::

    (slot FREE) -> RESERVED -> READY -> GONE -> (slot FREE)
                      |                  ^
                      +------------------+   abort, deadline, end of the session

A segment is in the index of its tenant while it is RESERVED or READY. A segment that is GONE and pinned is in
quarantine: a process may still read or write the slot, so the slot gets no other segment until the last pin goes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tokenlake.hints import NO_HINTS
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.wire.slots import SlotRef

__all__ = ["Kind", "PolicyState", "PoolId", "Segment", "State"]


class State(IntEnum):
    """Stage in the life of a segment."""

    RESERVED = 0
    READY = 1
    GONE = 2


class Kind(IntEnum):
    """The reason for which this node keeps a segment."""

    DIRTY = 0
    """A local engine is writing it: never a victim."""
    CACHED = 1
    """Kept because a local engine wrote or fetched it: the first victim."""
    PRIMARY = 2
    """The copy that counts: a victim by the policy of eviction."""


class PoolId(NamedTuple):
    """Slots of one size for one tenant."""

    tenant: TenantId
    slot_bytes: int


class PolicyState:
    """Base of the record that a policy of eviction keeps of each segment."""

    __slots__ = ()


class Segment:
    """Mutable. Owners of the fields: `SegmentStore` changes `kind`, `state`, `pins` and `hints`; the pool and its
    orders of eviction change `excluded`, `touched` and `policy_state`; the core changes `checksums`,
    `missing_shards` and `source`. All other fields stay."""

    __slots__ = (
        "checksums",
        "depth",
        "excluded",
        "hints",
        "key",
        "kind",
        "missing_shards",
        "packed",
        "pins",
        "place",
        "policy_state",
        "pool",
        "slot_bytes",
        "source",
        "state",
        "tenant",
        "touched",
    )

    def __init__(self, pool: PoolId, key: SegmentKey, place: SlotRef, kind: Kind, depth: int, now: float) -> None:
        self.pool = pool
        self.tenant = pool.tenant
        self.slot_bytes = pool.slot_bytes
        self.key = key
        self.place = place
        self.packed = place.pack()
        """`place` as it goes over the wire."""
        self.kind = kind
        self.state = State.RESERVED
        self.depth = depth
        """Index of the segment in its prompt."""
        self.pins = 0
        """Leases, writes, sends and receives that use the slot."""
        self.excluded = False
        """READY, but in no order of eviction until the last pin goes."""
        self.touched = now
        """Time of the last access, as the order of eviction counts it."""
        self.checksums = b""
        """8 bytes per shard once READY."""
        self.hints = NO_HINTS
        """The newest hints of the requests that wrote or read the segment."""
        self.policy_state: PolicyState | None = None
        """Owned by the policy of eviction of primary copies; kept while the segment is in another order or in none."""
        self.missing_shards = 0
        """Bit mask of the shards that are not committed yet."""
        self.source: NodeId | None = None
        """Of a cached copy: the node that owns the segment."""

    @property
    def owned(self) -> bool:
        """Does this node own the segment? Its directory node names this node then: it has the primary copy, or a copy
        that the policy did not admit."""
        return self.state is State.READY and (
            self.kind is Kind.PRIMARY or (self.kind is Kind.CACHED and self.source is None)
        )

    def __repr__(self) -> str:
        return (
            f"<{self.kind.name} {self.state.name} {self.key.hex()[:8]} at {self.place.region}:{self.place.slot} "
            f"gen {self.place.generation} pins {self.pins}>"
        )
