"""Policies of eviction: which copy leaves first, and which new segment is not admitted. `Forecast` orders cached and
primary copies, `LeastRecentlyUsed` those that engines write."""

from __future__ import annotations

from tokenlake.memory.eviction.base import SAME_ACCESS_S, EvictionPolicy
from tokenlake.memory.eviction.forecast import Forecast
from tokenlake.memory.eviction.lru import LeastRecentlyUsed

__all__ = ["SAME_ACCESS_S", "EvictionPolicy", "Forecast", "LeastRecentlyUsed"]
