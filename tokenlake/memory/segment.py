"""A segment as its node knows it.

::

    (slot FREE) -> RESERVED -> READY -> GONE -> (slot FREE)
                      |                  ^
                      +------------------+   abort, deadline, end of the session

A segment is in the index of its tenant while it is RESERVED or READY. A segment that is GONE and pinned is in
quarantine: a process may still read or write the slot, so the slot gets no other segment until the last pin goes.

| kind | source | what it is | this node owns it | leaves |
|---|---|---|---|---|
| DIRTY | None | a local engine writes it | not yet | never |
| PRIMARY | None | the primary copy | yes | by the policy |
| CACHED | None | a copy that the policy did not admit: no other node has one that it owns | yes | by the policy |
| CACHED | a node | a cached copy that came from that node, mostly the owner | no | by the policy, at less value |
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tokenlake.hints import NO_HINTS
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.wire.slots import SlotRef


class State(IntEnum):
    """Stage in the life of a segment."""

    RESERVED = 0
    READY = 1
    GONE = 2


class Kind(IntEnum):
    """The reason for which this node keeps a segment; it decides when the segment is evicted."""

    DIRTY = 0
    """A local engine is writing the segment, which is never evicted."""
    CACHED = 1
    """A copy that is kept because a local engine wrote or fetched it."""
    PRIMARY = 2
    """A copy of the owner that the policy admitted; evicted in the order of the policy."""


class PoolId(NamedTuple):
    """Names a pool of slots: the tenant, and the bytes of a slot."""

    tenant: TenantId
    slot_bytes: int


class PolicyState:
    """Base class of the state that an eviction policy keeps of a segment, in the field `policy_state` of the
    segment."""

    __slots__ = ()


class Segment:
    """Mutable. `SegmentStore` with its pools changes the fields, its orders of eviction `touched` and `policy_state`,
    the disk tier (`tokenlake.disk`) `disk`, the core's part of it `asked`, and that of the cold tier `cold`."""

    __slots__ = (
        "asked",
        "checksums",
        "cold",
        "depth",
        "disk",
        "excluded",
        "hints",
        "key",
        "kind",
        "left_by",
        "missing_shards",
        "packed",
        "parent",
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
        """The slot of the segment, packed into 16 bytes as in messages."""
        self.kind = kind
        self.state = State.RESERVED
        self.depth = depth
        """Index of the segment in its prompt."""
        self.parent: SegmentKey | None = None
        """Key of the segment before it in its prompt; None for the first one, and where it is not known yet."""
        self.pins = 0
        """Number of leases, writes, sends, receives and matches that use the slot, which must stay as it is
        meanwhile."""
        self.excluded = False
        """True while the READY segment is in no order of eviction, because it was pinned when it would have been
        evicted. It is in order again when its last pin goes or it is touched."""
        self.touched = now
        """Time in seconds of the last access, as the order of eviction counts it."""
        self.checksums = b""
        """Checksums of the segment's bytes, 8 bytes per shard, once the segment is READY."""
        self.hints = NO_HINTS
        """The newest hints of the requests that wrote or read the segment."""
        self.policy_state: PolicyState | None = None
        """The state that the eviction policy of primary copies has for the segment; kept while the segment is in
        another order or in none."""
        self.missing_shards = 0
        """Bit mask of the shards of the segment that are not committed yet."""
        self.source: NodeId | None = None
        """The node from which the cached copy came, or that a directory node named as the owner; None for a segment
        that this node owns."""
        self.left_by = ""
        """The rule by which it left memory (`removals`); empty before that, and where no reader should have found
        it."""
        self.disk = -1
        """Number of the segment's entry in the disk tier, if it is on a device of this node or is being written to it;
        else -1."""
        self.asked = -1.0
        """Value of `touched` when the disk tier last refused the segment."""
        self.cold = -1.0
        """The greatest value of `touched` with which the segment is not offered to the cold tier again."""

    @property
    def owns(self) -> bool:
        """True for the copy of the owner, admitted or not, whatever its state."""
        return self.kind is Kind.PRIMARY or (self.kind is Kind.CACHED and self.source is None)

    @property
    def elsewhere(self) -> bool:
        """True if another node or the disk has the segment too, as far as this node knows: a reader fetches it from
        there after the copy here has left."""
        return self.source is not None or self.disk >= 0

    @property
    def owned(self) -> bool:
        """True if this node owns the segment and can deliver it, so that the directory node names it to readers."""
        return self.state is State.READY and self.owns

    def __repr__(self) -> str:
        return (
            f"<{self.kind.name} {self.state.name} {self.key.hex()[:8]} at {self.place.region}:{self.place.slot} "
            f"gen {self.place.generation} pins {self.pins}>"
        )
