"""The log of refused handshakes: a few lines, whatever other processes send."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection

from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.introductions import Introductions
from tokenlake_server.peers.states import PeerStates

log = logging.getLogger(__name__)

MAX_REASON = 2000
"""Limit of the characters of a logged refusal; the other daemon may have written its reason."""
REFUSAL_S = 1.0
"""Minimum seconds between two log lines about refused connections with the same node, whichever side refused."""


class Refusals:
    """The last refusal of each node. Used on the control loop only."""

    def __init__(self, node: str, addresses: PeerAddresses, introductions: Introductions, states: PeerStates) -> None:
        """`node`: this node. The refusals are noted in the states of the other nodes, too."""
        self._node = node
        self._addresses = addresses
        self._introductions = introductions
        self._states = states
        self._last: dict[str, tuple[str, float]] = {}
        """For each node, the last line of the log about a refusal, and its time."""

    def follow(self) -> None:
        """Forget nodes that are no members any more."""
        self._last = {name: last for name, last in self._last.items() if name in self._addresses}

    def forget(self, node: str) -> None:
        """The node is connected: the next refusal is logged again."""
        self._last.pop(node, None)

    def log(self, node: str, source: str, reason: str, *, proven: bool, connected: Collection[str]) -> None:
        """Log a refusal, unless the line equals the last one about this node, or `REFUSAL_S` has not passed since that
        line. Peers repeat their attempts, so a refusal that was left out is logged later. `node`: the other node; empty
        before its hello. `source`: the address that it connected from; empty where this node dialled. `proven`: its
        name is certain. `connected`: the nodes with a control connection."""
        # Name and reason may come from a process that has not proven its identity: names of nodes that are not peers
        # share one entry of the map, so that the map cannot grow. Handshakes without a name have an entry for each node
        # that they may belong to; the lines of two nodes would otherwise alternate without a limit.
        name = node or "an unnamed process"
        if not proven:
            name = f"{name} (not proven)" if node else f"an unnamed process at {source}"
        line = f"{name} refused: {reason}"[:MAX_REASON]
        if node not in self._addresses and node not in self._introductions:
            node = self._likely(source, connected) or self._introductions.at(source)
        self._states.refused(node, reason)
        self._introductions.states.refused(node, reason)
        last, logged_at = self._last.get(node, ("", -math.inf))
        now = time.monotonic()
        if line != last and now - logged_at >= REFUSAL_S:
            self._last[node] = line, now
            log.error("connection with %s", line)

    def _likely(self, source: str, connected: Collection[str]) -> str:
        """The node to which a handshake may belong that ended before it named its node: the only one without a
        connection that dials this one and has the address `source`. Empty if there is none, or several."""
        found = [name for name in self._addresses.at(source) if name < self._node and name not in connected]
        return found[0] if len(found) == 1 else ""
