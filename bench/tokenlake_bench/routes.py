"""Functions that choose the node of each request of a replay."""

from __future__ import annotations

import random
from collections.abc import Callable

from tokenlake_bench.mixing import key_of
from tokenlake_bench.workload import Request

Route = Callable[[Request], int]
"""A function that returns the index of the node that serves the request."""
RouteMaker = Callable[[int, int], Route]
"""A function that makes a route from the number of nodes and a seed."""


def _round_robin(nodes: int, seed: int) -> Route:
    return lambda request: request.index % nodes


def _random(nodes: int, seed: int) -> Route:
    draw = random.Random(seed)
    return lambda request: draw.randrange(nodes)


def _conversation(nodes: int, seed: int) -> Route:
    return lambda request: key_of(seed, request.conversation) % nodes


ROUTES: dict[str, RouteMaker] = {
    "round-robin": _round_robin,
    "random": _random,
    "conversation": _conversation,
}
