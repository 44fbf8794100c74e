"""The paths to a node over which segments come: its address, and those of its other network interfaces."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenlake_server.peers.addresses import Endpoint, PeerAddresses

PAUSE_S = 10.0
"""Seconds for which a path that failed is used only where all others have failed too."""


class BulkPaths:
    """The order in which the paths to each node are tried. Used by several threads."""

    def __init__(self, addresses: PeerAddresses, clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses = addresses
        self._clock = clock
        self._failed: dict[tuple[str, Endpoint], float] = {}
        """By node and path, the time until which the path counts as failed."""

    def order(self, node: str, number: int) -> list[Endpoint]:
        """The paths to `node`, in the order in which they are tried. Consecutive values of `number` begin with
        consecutive paths. Paths that failed lately come last. Raises OSError where the node has no address."""
        paths = self._addresses.bulk(node)
        first, now = number % len(paths), self._clock()
        return sorted(paths[first:] + paths[:first], key=lambda path: self._failed.get((node, path), now) > now)

    def failed(self, node: str, path: Endpoint) -> None:
        """Record that no bytes were received over this path."""
        now = self._clock()
        self._failed = {each: until for each, until in self._failed.items() if until > now} | {
            (node, path): now + PAUSE_S
        }
