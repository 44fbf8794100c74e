"""Cache-aware routing as in SGLang's router.

Source: sgl-project/sglang, `docs/router/router.md` and the comment of `Router::CacheAware` in the router's Rust code.
While the load is even, a prompt goes to the worker with the longest matching prefix if that is more than
`cache_threshold` of the prompt, else to the worker with the smallest tree; while the load is uneven, to the shortest
queue. Load is the router's own count of requests sent and not answered.

One difference: among workers that are equal by this rule, SGLang takes the first of its map; this router takes one with
the fewest requests, and draws among those by the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenlake_bench.routing.base import Fleet, RoutedRequest, least

TREE_TOKENS = (1 << 24) // 4
"""Number of tokens that the router remembers per worker: SGLang's default `max_tree_size` is 2^24 characters, at about
four per token."""


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """Settings of SGLang's cache-aware router, with its documented defaults."""

    cache_threshold: float = 0.5
    balance_abs_threshold: int = 32
    balance_rel_threshold: float = 1.0001


class CacheAware:
    """SGLang's cache-aware routing as a `Router`; the docstring of the module describes the rule."""

    def __init__(self, fleet: Fleet, settings: CacheAwareSettings | None = None) -> None:
        self._fleet = fleet
        self._settings = settings or CacheAwareSettings()
        self._pending = [0] * fleet.instances

    def choose(self, request: RoutedRequest, now: float) -> int:
        instance = self._instance(request)
        self._pending[instance] += 1
        self._fleet.knowledge.sent(request.chain, instance)
        return instance

    def first_token(self, request: RoutedRequest, instance: int, now: float) -> None:
        """Does nothing, because the rule uses no times of first tokens; see `Router`."""

    def finished(self, request: RoutedRequest, instance: int, output_tokens: int, now: float) -> None:
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
