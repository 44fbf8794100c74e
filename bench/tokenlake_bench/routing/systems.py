"""The systems compared, by name: a router, its knowledge, and whether prefill and decode run on separate instances.

Names end in `-perfect` where the router knows every cache and requests under way take no memory from the caches, and in
`-real` where the router knows only the requests that it sent and caches share their memory with requests under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake_bench.routing.base import Fleet, Router
from tokenlake_bench.routing.cache_aware import TREE_TOKENS, CacheAware
from tokenlake_bench.routing.mooncake import Mooncake, split
from tokenlake_bench.routing.preble import Preble
from tokenlake_bench.routing.round_robin import RoundRobin


@dataclass(frozen=True, slots=True)
class System:
    """A compared system. `phases`: the proportion of prefill instances to decode instances; None where each instance
    does both."""

    name: str
    router: Callable[[Fleet], Router]
    perfect: bool
    phases: tuple[int, int] | None = None
    record_tokens: int | None = None
    """Number of tokens that the router of a `-real` system remembers per instance; None: as many as the instance's
    cache holds."""

    def prefill_instances(self, instances: int) -> Sequence[int]:
        """Numbers of the instances that compute prefills and therefore have caches."""
        return range(instances) if self.phases is None else split(instances, *self.phases)[0]


def _mooncake(prefill: int, decode: int) -> Callable[[Fleet], Router]:
    return lambda fleet: Mooncake(fleet, *split(fleet.instances, prefill, decode))


def _both(
    name: str,
    router: Callable[[Fleet], Router],
    phases: tuple[int, int] | None = None,
    record_tokens: int | None = None,
) -> list[System]:
    return [
        System(f"{name}-perfect", router, True, phases, record_tokens),
        System(f"{name}-real", router, False, phases, record_tokens),
    ]


SYSTEMS: Final[dict[str, System]] = {
    system.name: system
    for system in (
        *_both("round-robin", RoundRobin),
        *_both("cache-aware", CacheAware, record_tokens=TREE_TOKENS),
        *_both("preble", Preble),
        *_both("mooncake-1p3d", _mooncake(1, 3), (1, 3)),
        *_both("mooncake-3p1d", _mooncake(3, 1), (3, 1)),
    )
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
