"""Probes of dead bulk paths: transfers of no segments, repeated until bytes come again."""

from __future__ import annotations

from collections.abc import Callable

from tokenlake.core.cluster.peers import Peers
from tokenlake.core.context import Context
from tokenlake.identity import NodeId

MAX_PROBES = 2
"""Maximum number of probes under way at a time: a probe that is not answered takes a receiving thread."""
LONGEST_PAUSE_S = 10.0
"""Maximum pause before a probe. A node that answers probes and delivers no segment costs one fetch in each such
pause."""


class Probes:
    """The nodes whose bulk path is dead, and when each is probed next."""

    def __init__(self, context: Context, peers: Peers, start: Callable[[NodeId], None]) -> None:
        """`start`: begins a probe of a node; `ended` is called after it."""
        self._context = context
        self._peers = peers
        self._start = start
        self._doubted: set[NodeId] = set()
        """Nodes that are probed until they answer."""
        self._due: dict[NodeId, None] = {}
        """Those whose next probe has not started."""
        self.under_way = 0

    def doubt(self, node: NodeId, deaths: int) -> None:
        """Probe a node whose path became dead for the `deaths`-th time in a row, until it answers."""
        if node not in self._doubted:
            self._doubted.add(node)
            self._probe_in(node, min(self._context.config.gossip_s * (2.0 ** min(deaths - 1, 16) - 1), LONGEST_PAUSE_S))

    def ended(self, node: NodeId) -> None:
        """A probe has ended; if bytes came, the path is alive now."""
        self.under_way -= 1
        if self._peers.path(node).alive:
            self._doubted.discard(node)
        else:
            self._probe_in(node, self._context.config.gossip_s)
        self._start_due()

    def _probe_in(self, node: NodeId, seconds: float) -> None:
        def due() -> None:
            self._due[node] = None
            self._start_due()

        self._context.after(seconds, due)

    def _start_due(self) -> None:
        while self._due and self.under_way < MAX_PROBES:
            node = next(iter(self._due))
            del self._due[node]
            if self._peers.path(node).alive:
                self._doubted.discard(node)
            elif not self._peers.usable(node):
                self._probe_in(node, self._context.config.gossip_s)
            else:
                self.under_way += 1
                self._start(node)
