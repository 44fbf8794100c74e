"""Handshakes by which a node joins: each of a member and a daemon that asks to join dials the other one.

A connection for this purpose (`join`) ends with its handshake. At a member, a complete one proves the daemon, at the
address that it registered; at the daemon, the handshakes show only why members refuse it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping

from tokenlake.config import Address
from tokenlake_server.peers.addresses import PeerAddresses, no_connection
from tokenlake_server.peers.states import PeerStates

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Seconds between the first two handshakes with a node, and the most seconds between two later ones."""


Attempt = Callable[[str, PeerAddresses], Awaitable[None]]
"""Dials a node once, for this purpose, and waits until the handshake has succeeded or failed. Raises OSError when there
is no connection."""


class Introductions:
    """The nodes with which this one is to complete a handshake before one of the two joins. Used on the control
    loop."""

    def __init__(
        self,
        node: str,
        addresses: PeerAddresses,
        attempt: Attempt,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`addresses`: empty; it is filled by `follow`, and closed by `close`."""
        self._attempt = attempt
        self._loop = loop
        self._addresses = addresses
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.states = PeerStates(node, (), loop, joining=True)
        """Where handshakes with these nodes failed, and why."""
        self.on_proven: Callable[[str, int], None] = lambda node, incarnation: None
        """Called with name and incarnation of a node after a complete handshake, which this node began."""

    def __contains__(self, node: object) -> bool:
        return node in self._addresses

    def follow(self, addresses: Mapping[str, Address | None]) -> None:
        """Make these the nodes. A node whose address changed is dialled there from the next attempt on."""
        self._addresses.change(addresses)
        self.states.follow(addresses)
        for name in addresses:
            if name not in self._tasks:
                self._tasks[name] = self._loop.create_task(self._dial(name))

    async def _dial(self, name: str) -> None:
        """Repeat the handshake until the node is none of these any more: a proof counts for one process of it only, and
        a refusal may end."""
        pause_s = FIRST_PAUSE_S
        try:
            while name in self._addresses:
                try:
                    await self._attempt(name, self._addresses)
                except OSError as error:
                    self.states.unreachable(name, f"{self._addresses.shown(name)}: {no_connection(error)}")
                except Exception:
                    log.exception("the handshake with %s failed", name)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            self._tasks.pop(name, None)

    def at(self, source: str) -> str:
        """The only one of the nodes with the address `source`; empty if there is none, or several."""
        found = self._addresses.at(source)
        return found[0] if len(found) == 1 else ""

    def proven(self, name: str, incarnation: int) -> None:
        """A handshake that this node began is complete."""
        self.states.connected(name)
        self.on_proven(name, incarnation)

    async def close(self) -> None:
        """End the attempts."""
        self.states.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._addresses.close()
