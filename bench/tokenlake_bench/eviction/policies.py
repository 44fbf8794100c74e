"""The eviction policies that the study compares: the one of the daemons, and published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tokenlake.memory.eviction import EvictionPolicy, Forecast, LeastRecentlyUsed
from tokenlake_bench.eviction.arc import AdaptiveReplacement
from tokenlake_bench.eviction.s3fifo import S3Fifo

STUDIED: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {
    "forecast": Forecast,
    "lru": LeastRecentlyUsed,
    "s3fifo": S3Fifo,
    "arc": AdaptiveReplacement,
}
"""The eviction policies by the names that `bench eviction --policy` takes. Daemons have `forecast`."""
