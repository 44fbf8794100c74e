"""One node's segments and the slots that they are in, without their bytes."""

from tokenlake.store.eviction import EvictionPolicy, LeastRecentlyUsed
from tokenlake.store.pool import Budgets, SlotPool
from tokenlake.store.region import RegionShape
from tokenlake.store.removals import Removal, RemovalLog
from tokenlake.store.segment import Kind, PoolId, Segment, State
from tokenlake.store.slot_table import Cursor
from tokenlake.store.store import SegmentStore

__all__ = [
    "Budgets",
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
