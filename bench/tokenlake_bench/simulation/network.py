"""The simulated network: latency, bandwidth and queues.

A frame takes its link's latency. All frames of a link have the same latency, so they arrive in order. Transfers queue
at the sending node, then at the receiving node::

    sender    |== transfer 1 ==|== transfer 2 ==|
    receiver            latency |== transfer 1 ==|  (behind transfers from other senders)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenlake.errors import ConfigurationError
from tokenlake.wire import peer


@dataclass(frozen=True, slots=True)
class Link:
    """Link in one direction between two nodes: latency in seconds, bandwidth in bytes per second."""

    latency_s: float = 50e-6
    bandwidth: float = 12.5e9

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < 3600:
            raise ConfigurationError("latency_s", self.latency_s, "above 0 and below 3600 seconds")
        if not 0 < self.bandwidth < float("inf"):
            raise ConfigurationError("bandwidth", self.bandwidth, "a finite number of bytes per second, above 0")


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """The links of a simulated network. `links`: by (sender, receiver), those that differ from the usual one. `usual`:
    every other link, and each node's own connection in either direction; by default 100 Gbit/s through one switch.
    `domain_nodes`: so many consecutive nodes form a domain, in which links are `near`, over a connection of its own at
    each node; 0: there are no domains."""

    usual: Link = field(default_factory=Link)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    domain_nodes: int = 0
    near: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        if self.domain_nodes < 0:
            raise ConfigurationError("domain_nodes", self.domain_nodes, "a number of nodes, or 0 for no domains")

    def same_domain(self, a: int, b: int) -> bool:
        """Whether two nodes are in one domain; False where there are no domains."""
        return bool(self.domain_nodes) and a // self.domain_nodes == b // self.domain_nodes


class _Connections(NamedTuple):
    """The connections of all nodes to one network: the link that each has in either direction, and by node the times
    until which it sends and receives."""

    own: Link
    sends_until: list[float]
    receives_until: list[float]


class Network:
    """The simulated network between `nodes` nodes: computes when a transfer ends, and counts frames and bytes."""

    def __init__(self, shape: NetworkShape, nodes: int) -> None:
        self.shape = shape
        self._usual = _Connections(shape.usual, [0.0] * nodes, [0.0] * nodes)
        self._near = _Connections(shape.near, [0.0] * nodes, [0.0] * nodes)
        self.messages: Counter[type] = Counter()
        """Number of frames sent so far, by type of message."""
        self.transfers = 0
        self.nbytes = 0
        """Number of bytes of segments sent so far."""
        self.between_domains: Counter[bool] = Counter()
        """Those of them that were sent from domain to domain: by hand-overs (True), and for engines (False)."""

    def link(self, sender: int, receiver: int) -> Link:
        """The link from one node to another."""
        shape = self.shape
        usual = shape.near if shape.same_domain(sender, receiver) else shape.usual
        return shape.links.get((sender, receiver), usual)

    def frame(self, message: peer.PeerMessage) -> None:
        """Count a frame that a node sends now."""
        self.messages[type(message)] += 1

    def transfer(
        self, now: float, sender: int, receiver: int, nbytes: int, *, background: bool = False
    ) -> tuple[float, float]:
        """Queue a transfer of `nbytes` from one node to another. `background`: no engine waits for it. Returns (time at
        which the sender has sent the last byte, time at which it arrives)."""
        link, near = self.link(sender, receiver), self.shape.same_domain(sender, receiver)
        through = self._near if near else self._usual
        took = nbytes / min(link.bandwidth, through.own.bandwidth)
        starts = max(now, through.sends_until[sender])
        sent = through.sends_until[sender] = starts + took
        lands = max(starts + link.latency_s, through.receives_until[receiver])
        arrived = through.receives_until[receiver] = lands + took
        self.transfers += 1
        self.nbytes += nbytes
        if not near:
            self.between_domains[background] += nbytes
        return sent, arrived
