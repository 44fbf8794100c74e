"""Inputs of the cost model: measured rates of this machine and of its peers, each with a default.
`docs/planner.md` lists them."""

from __future__ import annotations

from tokenlake.identity import NodeId
from tokenlake.planner.fits import DecodeFit, PrefillFit, QueryFit, TransferFit

WEIGHT = 0.2
"""Weight of the newest measurement in a running mean."""


class Estimate:
    """A running mean of measurements, with a default value that the first measurement replaces."""

    __slots__ = ("samples", "value")

    def __init__(self, default: float) -> None:
        self.value = default
        self.samples = 0

    def add(self, sample: float) -> None:
        """Add a measurement."""
        self.value += (sample - self.value) * (WEIGHT if self.samples else 1.0)
        self.samples += 1


class PeerRates:
    """Rates of one peer and of the network to it."""

    def __init__(self) -> None:
        self.fetch = TransferFit(1e-3, 2e-9)
        """Seconds to fetch segments from the peer, without the time to read them on this node."""
        self.queries = QueryFit()
        """Seconds to send queries to the peer and to receive the results of attention there."""
        self.open_s = Estimate(5e-3)
        """Seconds to open a view (a sequence of segments for queries) at the peer."""


class Rates:
    """All inputs of the cost model. Mutable: engines and schedulers add their measurements, with their own clock."""

    def __init__(self) -> None:
        self._peers: dict[NodeId, PeerRates] = {}
        self.copy = TransferFit(200e-6, 0.2e-9)
        """Seconds to match one prompt and to copy its prefix from this node's memory into the engine's own cache."""
        self.prefill = PrefillFit()
        self.decode = DecodeFit()
        self.answer_tokens = Estimate(128.0)
        """Expected number of decode steps of a request that does not state it."""

    def peer(self, node: NodeId) -> PeerRates:
        """Returns the measured rates of one peer; defaults for a peer that was never measured."""
        found = self._peers.get(node)
        if found is None:
            found = self._peers[node] = PeerRates()
        return found

    def peers(self) -> dict[NodeId, PeerRates]:
        """The peers that were asked for, with their rates."""
        return dict(self._peers)

    def slowest_fetch_s(self, nbytes: float) -> float:
        """Returns the seconds to fetch `nbytes` from the slowest peer that was measured; 0 if none was."""
        known = [peer.fetch for peer in self._peers.values() if peer.fetch.known]
        return max((fetch.seconds(nbytes) for fetch in known), default=0.0)
