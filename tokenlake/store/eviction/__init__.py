"""Which segment goes first, and which is not worth storing: one policy per file, chosen by name."""

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
"""By the name that the setting `eviction` takes."""


def policy_named(name: str) -> Callable[[], EvictionPolicy]:
    """The maker of the policy of that name. Raises `ValueError` that lists the names when there is none."""
    if name not in POLICIES:
        raise ValueError(f"{name!r} is no policy of eviction; there are {', '.join(POLICIES)}")
    return POLICIES[name]
