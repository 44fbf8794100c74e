"""The simulated network: latency, bandwidth and queues.

A frame takes its link's latency. All frames of a link have the same latency, so they arrive in order. Transfers queue
at the sending node, then at the receiving node::

    sender    |== transfer 1 ==|== transfer 2 ==|
    receiver            latency |== transfer 1 ==|  (behind transfers from other senders)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tokenlake.errors import ConfigurationError
from tokenlake.wire import peer


@dataclass(frozen=True, slots=True)
class Link:
    """Connection of a node through one switch, in either direction: latency in seconds, bandwidth in bytes per second;
    by default 100 Gbit/s."""

    latency_s: float = 50e-6
    bandwidth: float = 12.5e9

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < 3600:
            raise ConfigurationError("latency_s", self.latency_s, "above 0 and below 3600 seconds")
        if not 0 < self.bandwidth < float("inf"):
            raise ConfigurationError("bandwidth", self.bandwidth, "a finite number of bytes per second, above 0")


class Network:
    """The simulated network between `nodes` nodes: computes when a transfer ends, and counts frames and bytes."""

    def __init__(self, link: Link, nodes: int) -> None:
        self.link = link
        self._sends_until = [0.0] * nodes
        self._receives_until = [0.0] * nodes
        self.messages: Counter[type] = Counter()
        """Number of frames sent so far, by type of message."""
        self.transfers = 0
        self.nbytes = 0
        """Number of bytes of segments sent so far."""

    def frame(self, message: peer.PeerMessage) -> None:
        """Count a frame that a node sends now."""
        self.messages[type(message)] += 1

    def transfer(self, now: float, sender: int, receiver: int, nbytes: int) -> tuple[float, float]:
        """Queue a transfer of `nbytes` from one node to another. Returns (time at which the sender has sent the last
        byte, time at which it arrives)."""
        took = nbytes / self.link.bandwidth
        starts = max(now, self._sends_until[sender])
        sent = self._sends_until[sender] = starts + took
        lands = max(starts + self.link.latency_s, self._receives_until[receiver])
        arrived = self._receives_until[receiver] = lands + took
        self.transfers += 1
        self.nbytes += nbytes
        return sent, arrived
