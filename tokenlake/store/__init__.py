"""One node's segments and the slots they lie in; no bytes are touched here."""

from tokenlake.store.eviction import EvictionPolicy, LeastRecentlyUsed
from tokenlake.store.places import Cursor
from tokenlake.store.pool import SlotPool
from tokenlake.store.region import RegionShape
from tokenlake.store.segment import Kind, Segment, State
from tokenlake.store.store import Budgets, SegmentStore

__all__ = [
    "Budgets",
    "Cursor",
    "EvictionPolicy",
    "Kind",
    "LeastRecentlyUsed",
    "RegionShape",
    "Segment",
    "SegmentStore",
    "SlotPool",
    "State",
]
