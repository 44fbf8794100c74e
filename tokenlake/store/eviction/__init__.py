"""Policies of eviction, one per file, chosen by name: which primary copy leaves first, and which is not admitted."""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.store.eviction.base import SAME_ACCESS_S, EvictionPolicy
from tokenlake.store.eviction.forecast import Forecast
from tokenlake.store.eviction.lru import LeastRecentlyUsed
from tokenlake.store.eviction.reuse import LearnedReuse

__all__ = ["POLICIES", "SAME_ACCESS_S", "EvictionPolicy", "LeastRecentlyUsed", "policy_named"]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "reuse": LearnedReuse,
    "forecast": Forecast,
    "lru": LeastRecentlyUsed,
}
"""Constructors by the name that the setting `eviction` takes."""


def policy_named(name: str) -> Callable[[], EvictionPolicy]:
    """The constructor of a policy. ValueError, which lists all names, for an unknown one."""
    if name not in POLICIES:
        raise ValueError(f"{name!r} is no policy of eviction; there are {', '.join(POLICIES)}")
    return POLICIES[name]
