"""Engine instances with private caches behind a round-robin load balancer, which ignores the caches."""

from __future__ import annotations

from tokenlake_bench.routing.base import Fleet, RoutedRequest


class RoundRobin:
    """A router that sends request i to instance i modulo the number of instances."""

    def __init__(self, fleet: Fleet) -> None:
        self._instances = fleet.instances

    def choose(self, request: RoutedRequest, now: float) -> int:
        instance = request.number % self._instances
        return instance

    def first_token(self, request: RoutedRequest, instance: int, now: float) -> None:
        """Does nothing, because the rule does not depend on answers; see `Router`."""

    def finished(self, request: RoutedRequest, instance: int, output_tokens: int, now: float) -> None:
        """Does nothing, because the rule does not depend on answers; see `Router`."""
