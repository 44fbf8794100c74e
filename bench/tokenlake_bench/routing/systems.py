"""The compared systems by name: a router, and what it knows of the caches of the instances.

Names end in `-perfect` where the router knows every cache and requests under way take no memory from the caches, and in
`-real` where the router knows only the requests that it sent and caches share their memory with requests under way.

`cache-aware` is SGLang's rule (sgl-project/sglang, `docs/router/router.md` and the comment of `Router::CacheAware` in
the router's Rust code). While the load is even, a prompt goes to the worker with the longest matching prefix if that is
more than `cache_threshold` of the prompt, else to the worker with the smallest tree; while the load is uneven, to the
shortest queue. Load is the router's own count of requests sent and not answered. One difference: among workers that are
equal by this rule, SGLang takes the first of its map; this router takes one with the fewest requests, and draws among
those by the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tokenlake.errors import ConfigurationError
from tokenlake_bench.routing.base import Fleet, RoutedRequest, Router, least
from tokenlake_bench.routing.kv_router import KvRouter
from tokenlake_bench.routing.outcome import Answered
from tokenlake_bench.routing.preble import Preble

TREE_TOKENS: Final = (1 << 24) // 4
"""Number of tokens that the router of a `-real` system remembers per instance: SGLang's default `max_tree_size` is 2^24
characters, at about four per token."""


class RoundRobin:
    """Sends request i to instance i modulo the number of instances."""

    def __init__(self, fleet: Fleet) -> None:
        self._instances = fleet.instances

    def choose(self, request: RoutedRequest, now: float) -> int:
        return request.number % self._instances

    def finished(self, instance: int, answered: Answered) -> None:
        """Does nothing, because the rule does not depend on answers."""


class CacheAware:
    """SGLang's cache-aware routing; the docstring of the module describes the rule."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._settings = fleet.cache_aware
        self._pending = [0] * fleet.instances

    def choose(self, request: RoutedRequest, now: float) -> int:
        instance = self._instance(request)
        self._pending[instance] += 1
        self._fleet.knowledge.sent(request.chain, instance)
        return instance

    def finished(self, instance: int, answered: Answered) -> None:
        self._pending[instance] -= 1

    def _instance(self, request: RoutedRequest) -> int:
        fleet, settings, pending = self._fleet, self._settings, self._pending
        instances = range(fleet.instances)
        most, fewest = max(pending), min(pending)
        if most - fewest > settings.balance_abs_threshold and most > settings.balance_rel_threshold * fewest:
            return least(pending, instances, fleet.rng)
        depths = fleet.knowledge.depths(request.chain)
        longest = max(depths)
        if longest * fleet.segment_tokens > settings.cache_threshold * request.tokens:
            return least(pending, [i for i in instances if depths[i] == longest], fleet.rng)
        sizes = fleet.knowledge.sizes()
        smallest = min(sizes)
        return least(pending, [i for i in instances if sizes[i] == smallest], fleet.rng)


@dataclass(frozen=True, slots=True)
class System:
    """A compared system. `record_tokens`: number of tokens that the router of a `-real` system remembers per instance,
    None: as many as the instance can keep. `split`: the proportion of prefill instances to decode instances (`split`);
    None: each instance does both. `view_age_s`: the router has a view of all caches so many seconds old, and names
    sources (`named_source`); None: it names none. `pulls`: instances pull from these sources."""

    name: str
    router: Callable[[Fleet], Router]
    perfect: bool
    record_tokens: int | None = TREE_TOKENS
    split: tuple[int, int] | None = None
    view_age_s: float | None = None
    pulls: bool = False

    def routed(self, instances: int) -> int:
        """Number of instances, the first of all, among which the router chooses: those that compute prompts. With
        `split` they are about its part of all, at least one of either kind. Raises ConfigurationError where one
        instance would be split."""
        if self.split is None:
            return instances
        if instances < 2:
            raise ConfigurationError("nodes", instances, f"at least 2 with {self.name}")
        return min(max(1, round(instances * self.split[0] / sum(self.split))), instances - 1)


SYSTEMS: Final[dict[str, System]] = {
    f"{name}-{kind}": System(f"{name}-{kind}", router, kind == "perfect", record_tokens, split)
    for name, router, record_tokens, split in (
        ("round-robin", RoundRobin, TREE_TOKENS, None),
        ("cache-aware", CacheAware, TREE_TOKENS, None),
        ("preble", Preble, None, None),
        ("pd-1p3d", CacheAware, TREE_TOKENS, (1, 3)),
        ("pd-3p1d", CacheAware, TREE_TOKENS, (3, 1)),
    )
    for kind in ("perfect", "real")
} | {
    f"{name}-real": System(f"{name}-real", partial(KvRouter, prefill_scale=scale), False, view_age_s=age_s, pulls=pulls)
    for name, age_s, scale, pulls in (
        ("kv-router-1s", 1, 1.0, False),
        ("named-source-0s", 0, 1.0, True),
        ("named-source-1s", 1, 1.0, True),
        ("named-source-10s", 10, 1.0, True),
        ("named-source-1s-scale10", 1, 10.0, True),
    )
}


def systems_named(names: str) -> list[System]:
    """The systems of the comma-separated `names`, or all systems for `all`. Raises ConfigurationError for a name that
    is not in `SYSTEMS`."""
    chosen = list(SYSTEMS) if names == "all" else names.split(",")
    for name in chosen:
        if name not in SYSTEMS:
            raise ConfigurationError("baselines", name, "all, or names among " + ", ".join(SYSTEMS))
    return [SYSTEMS[name] for name in chosen]
