"""What the planner knows of this machine and of its peers: every input measured, with a default and an age
(`docs/planner.md` lists them)."""

from __future__ import annotations

from tokenlake.identity import NodeId
from tokenlake.planner.fits import DecodeFit, Fit, PrefillFit, QueryFit, TransferFit

__all__ = ["Estimate", "PeerRates", "Rates"]

WEIGHT = 0.2
"""Of the newest sample in a running mean."""


class Estimate:
    """A running mean that starts at a default, which the first sample replaces."""

    __slots__ = ("at", "samples", "value")

    def __init__(self, default: float) -> None:
        self.value = default
        self.samples = 0
        self.at: float | None = None
        """When the newest sample came; None: it is the default."""

    def add(self, sample: float, now: float) -> None:
        """A measurement at `now`."""
        self.value += (sample - self.value) * (WEIGHT if self.samples else 1.0)
        self.samples += 1
        self.at = now

    def age(self, now: float) -> float | None:
        """Seconds since the newest sample; None: it is the default."""
        return None if self.at is None else now - self.at


class PeerRates:
    """Of the way to one peer, and of what waits there."""

    def __init__(self) -> None:
        self.fetch = TransferFit(1e-3, 2e-9)
        """What bringing segments from there takes longer than reading them here."""
        self.queries = QueryFit()
        """Attention there."""
        self.open_s = Estimate(5e-3)
        """Opening a view there."""
        self.backlog_s = Estimate(0.0)
        """Work that waits at its query engine, as it says in its replies."""


class Rates:
    """All inputs of the cost model. Mutable; whoever measures adds, with its own clock."""

    def __init__(self) -> None:
        self._peers: dict[NodeId, PeerRates] = {}
        self.copy = TransferFit(200e-6, 0.2e-9)
        """Matching one prompt, and copying its prefix from this node's arena into the engine's own cache."""
        self.prefill = PrefillFit()
        self.decode = DecodeFit()
        self.answer_tokens = Estimate(128.0)
        """Decode steps of a request that gives no hint."""

    def peer(self, node: NodeId) -> PeerRates:
        """Of one peer; defaults until something was measured."""
        found = self._peers.get(node)
        if found is None:
            found = self._peers[node] = PeerRates()
        return found

    def slowest_fetch_s(self, nbytes: float) -> float:
        """Bringing so many bytes from the peer that is known to take longest; 0 where none is known."""
        known = [peer.fetch for peer in self._peers.values() if peer.fetch.known]
        return max((fetch.seconds(nbytes) for fetch in known), default=0.0)

    def ages(self, now: float) -> dict[str, float | None]:
        """Seconds since each input was measured, None for a default, by its name in the documentation."""
        inputs: dict[str, Fit | Estimate] = dict(_inputs(self))
        for node, peer in self._peers.items():
            inputs |= {f"{name} {node}": value for name, value in _inputs(peer).items()}
        return {name: value.age(now) for name, value in inputs.items()}


def _inputs(of: Rates | PeerRates) -> dict[str, Fit | Estimate]:
    return {name: value for name, value in vars(of).items() if isinstance(value, Fit | Estimate)}
