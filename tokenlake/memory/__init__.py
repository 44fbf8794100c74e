"""One node's segments and the slots that they are in, without their bytes."""

from tokenlake.memory.eviction import EvictionPolicy, LeastRecentlyUsed
from tokenlake.memory.pool import SlotPool
from tokenlake.memory.region import RegionShape
from tokenlake.memory.removals import Removal, RemovalLog
from tokenlake.memory.segment import Kind, PoolId, Segment, State
from tokenlake.memory.slot_table import Cursor
from tokenlake.memory.store import SegmentStore

__all__ = [
    "Cursor",
    "EvictionPolicy",
    "Kind",
    "LeastRecentlyUsed",
    "PoolId",
    "RegionShape",
    "Removal",
    "RemovalLog",
    "Segment",
    "SegmentStore",
    "SlotPool",
    "State",
]
