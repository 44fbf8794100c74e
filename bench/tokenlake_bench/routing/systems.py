"""The systems compared, by name: a router and its knowledge.

Names end in `-perfect` where the router knows every cache and requests under way take no memory from the caches, and in
`-real` where the router knows only the requests that it sent and caches share their memory with requests under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake_bench.routing.base import Fleet, Router
from tokenlake_bench.routing.cache_aware import TREE_TOKENS, CacheAware
from tokenlake_bench.routing.preble import Preble
from tokenlake_bench.routing.round_robin import RoundRobin


@dataclass(frozen=True, slots=True)
class System:
    """A compared system. `record_tokens`: number of tokens that the router of a `-real` system remembers per instance;
    None: as many as the instance's cache holds."""

    name: str
    router: Callable[[Fleet], Router]
    perfect: bool
    record_tokens: int | None = None


SYSTEMS: Final[dict[str, System]] = {
    f"{name}-{kind}": System(f"{name}-{kind}", router, kind == "perfect", record_tokens)
    for name, router, record_tokens in (
        ("round-robin", RoundRobin, None),
        ("cache-aware", CacheAware, TREE_TOKENS),
        ("preble", Preble, None),
    )
    for kind in ("perfect", "real")
}


def systems_named(names: str) -> list[System]:
    """The systems of the comma-separated `names`, or all systems for `all`. Raises ConfigurationError for a name that
    is not in `SYSTEMS`."""
    if names == "all":
        return list(SYSTEMS.values())
    chosen = []
    for name in names.split(","):
        if name not in SYSTEMS:
            raise ConfigurationError("baselines", name, "all, or names among " + ", ".join(SYSTEMS))
        chosen.append(SYSTEMS[name])
    return chosen
