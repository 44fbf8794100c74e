"""A segment as its node knows it.

::

    (slot FREE) -> RESERVED -> READY -> GONE -> (slot FREE)
                      |                  ^
                      +------------------+   abort, deadline, session gone

A segment is in the index while RESERVED or READY. GONE with pins is quarantine: somebody may still read or
write the slot, so it has no new owner until the last pin goes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from tokenlake.hints import NO_HINTS
from tokenlake.identity import NodeId, SegmentKey
from tokenlake.wire.slots import SlotRef

if TYPE_CHECKING:
    from tokenlake.store.pool import SlotPool

__all__ = ["Kind", "Segment", "State"]


class State(IntEnum):
    """Where in its life a segment is."""

    RESERVED = 0
    READY = 1
    GONE = 2


class Kind(IntEnum):
    """Why this node keeps the segment."""

    DIRTY = 0
    """Written here, not yet pushed: never a victim."""
    CACHED = 1
    """Kept because a local engine wrote or fetched it; first victim."""
    PRIMARY = 2
    """The copy the pool relies on; victim by policy."""
    REPLICA = 3
    """An extra copy of a hot segment, on purpose: never a victim; it becomes CACHED when its directory node says so."""


class Segment:
    """Mutable; changed by `SegmentStore` alone, but for `checksums`, `missing_shards`, `source` and
    `previous_owner`."""

    __slots__ = (
        "aside",
        "checksums",
        "depth",
        "hints",
        "key",
        "kind",
        "lane",
        "missing_shards",
        "packed",
        "pins",
        "place",
        "pool",
        "previous_owner",
        "record",
        "slot_bytes",
        "source",
        "state",
        "tenant",
        "touched",
    )

    def __init__(
        self,
        pool: SlotPool,
        key: SegmentKey,
        place: SlotRef,
        kind: Kind,
        depth: int,
        now: float,
    ) -> None:
        self.pool = pool
        self.tenant = pool.tenant
        self.slot_bytes = pool.slot_bytes
        self.key = key
        self.place = place
        self.packed = place.pack()
        """`place` as it goes over the wire, made once."""
        self.kind = kind
        self.state = State.RESERVED
        self.depth = depth
        """Index of the segment in its prompt."""
        self.pins = 0
        """Leases, writes, sends and receives that need the slot to stay what it is."""
        self.aside = False
        """READY, but out of the order of eviction until its last pin goes."""
        self.touched = now
        self.checksums = b""
        """8 bytes per shard once READY."""
        self.hints = NO_HINTS
        """The newest word of those that wrote or read it."""
        self.lane = 1
        """Of `Retention`: 1 is the policy's."""
        self.record: object = None
        """What the policy of eviction of primary copies knows of it."""
        self.missing_shards = 0
        """Bit mask of the shards not committed yet."""
        self.previous_owner: NodeId | None = None
        """Of a copy written here: the candidate that remembers it."""
        self.source: NodeId | None = None
        """Of a cached copy or a replica: the node that keeps the primary copy."""

    def __repr__(self) -> str:
        return (
            f"<{self.kind.name} {self.state.name} {self.key.hex()[:8]} at {self.place.region}:{self.place.slot} "
            f"gen {self.place.generation} pins {self.pins}>"
        )
