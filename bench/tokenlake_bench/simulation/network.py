"""Links that take time.

A frame takes its link's latency; frames of one link have one latency, so they arrive in order. Segments queue at the
node that sends them, then at the one that receives them::

    sender    |== transfer 1 ==|== transfer 2 ==|
    receiver            latency |== transfer 1 ==|  (behind what comes from elsewhere)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenlake.errors import ConfigurationError

__all__ = ["Link", "Network", "NetworkShape"]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes: seconds, and bytes per second."""

    latency_s: float = 50e-6
    bandwidth: float = 12.5e9

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < 3600:
            raise ConfigurationError("latency_s", self.latency_s, "above 0 and below 3600 seconds")
        if not 0 < self.bandwidth < float("inf"):
            raise ConfigurationError("bandwidth", self.bandwidth, "a finite number of bytes per second, above 0")


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """`usual`: a node's own connection, in either direction, and every link that `links` does not name by its
    (sender, receiver). 100 Gbit/s in one switch unless told otherwise."""

    usual: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)


class Network:
    """When what is sent arrives. `transfers` and `nbytes` count what was sent so far."""

    def __init__(self, shape: NetworkShape, nodes: int) -> None:
        self._shape = shape
        self._sends_until = [0.0] * nodes
        self._receives_until = [0.0] * nodes
        self.transfers = 0
        self.nbytes = 0

    def link(self, sender: int, receiver: int) -> Link:
        """From one node to another."""
        return self._shape.links.get((sender, receiver), self._shape.usual)

    def transfer(self, now: float, sender: int, receiver: int, nbytes: int) -> tuple[float, float]:
        """(when the sender is done, when the last byte is there) of `nbytes` that are ready to go."""
        link = self.link(sender, receiver)
        took = nbytes / min(link.bandwidth, self._shape.usual.bandwidth)
        starts = max(now, self._sends_until[sender])
        sent = self._sends_until[sender] = starts + took
        lands = max(starts + link.latency_s, self._receives_until[receiver])
        arrived = self._receives_until[receiver] = lands + took
        self.transfers += 1
        self.nbytes += nbytes
        return sent, arrived
