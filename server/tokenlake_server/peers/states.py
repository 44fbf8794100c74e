"""The state of the connection with each other member, for the health pages; warnings while a member is not connected.

::

    unreachable -- a handshake succeeds --> connected        a refusal on either side --> refused
    connected   -- the connection ends  --> unreachable      same epoch, other members --> other ring
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

from tokenlake_server.loop.repeated_warning import RepeatedWarning

log = logging.getLogger(__name__)

State = Literal["connected", "refused", "unreachable", "other ring"]
PEER_STATES: tuple[State, ...] = ("connected", "refused", "unreachable", "other ring")
WARN_S = 10.0
"""Seconds after which a member that is not connected is a warning, which is repeated at growing intervals."""
CHECK_S = 1.0
MAX_REASON = 500
"""Limit of the characters of a reason; the other daemon may have written it."""


class PeerState(NamedTuple):
    """The state of one member since a time of the loop's clock. `reason`: empty for a connected one."""

    state: State
    reason: str
    since: float


class PeerStates:
    """The states of all other members, or of nodes that are to be members together with this one. Used on the control
    loop only."""

    def __init__(
        self, node: str, names: Collection[str], loop: asyncio.AbstractEventLoop, *, joining: bool = False
    ) -> None:
        """`node`: the name of this node. `joining`: one of the two asks to join, and this node dials the other one in
        any case, again and again."""
        self._node = node
        self._joining = joining
        self._loop = loop
        self._states: dict[str, PeerState] = {}
        self._warnings: dict[str, RepeatedWarning] = {}
        self._other_rings: Callable[[], Mapping[str, str]] = dict
        self.follow(names)
        self._check_later()

    def follow(self, names: Collection[str]) -> None:
        """Make `names` the other members."""
        now = self._loop.time()
        self._states = {
            name: self._states.get(name) or PeerState("unreachable", self._awaited(name), now) for name in sorted(names)
        }
        self._warnings = {name: self._warnings.get(name) or RepeatedWarning(WARN_S) for name in self._states}

    def _awaited(self, name: str) -> str:
        """Why there is no connection with a member before the first attempt."""
        if self._joining or self._node < name:
            return "the first attempt to connect to it has not ended yet"
        return (
            f"it has not connected to this node, although it is the one of the two that connects: its members must "
            f"include '{self._node}', and the address of '{self._node}' must be right and reachable from there"
        )

    def rings_from(self, other_rings: Callable[[], Mapping[str, str]]) -> None:
        """Set the function that returns the members with another ring: by name, a text about the difference."""
        self._other_rings = other_rings

    def connected(self, name: str) -> None:
        """Record that a handshake with the member succeeded."""
        self._set(name, "connected", "")

    def refused(self, name: str, reason: str) -> None:
        """Record that one of the two sides refused the other. The state of a member that is connected does not
        change."""
        if name in self._states and (self._joining or self._states[name].state != "connected"):
            self._set(name, "refused", reason)

    def unreachable(self, name: str, reason: str) -> None:
        """Record that the connection ended, or that an attempt to connect failed."""
        self._set(name, "unreachable", reason)

    def _set(self, name: str, state: State, reason: str) -> None:
        previous = self._states.get(name)
        if previous is not None:
            since = previous.since if previous.state == state else self._loop.time()
            self._states[name] = PeerState(state, reason[:MAX_REASON], since)

    def all(self) -> dict[str, PeerState]:
        """The state of each member, by name."""
        states = dict(self._states)
        for name, difference in self._other_rings().items():
            if name in states and states[name].state == "connected":
                states[name] = PeerState("other ring", difference, states[name].since)
        return states

    def close(self) -> None:
        """Stop the timer of the warnings about members that are not connected."""
        self._timer.cancel()

    def _check_later(self) -> None:
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        now, what = self._loop.time(), "handshake to join with" if self._joining else "peer"
        for name, (state, reason, _) in self.all().items():
            warning = self._warnings[name]
            if state == "connected":
                if warning.logged:
                    log.info("%s %s: connected after %.0f s", what, name, warning.lasted(now))
                warning.should_log(None, now)
            elif warning.should_log("not connected" if state != "other ring" else state, now):
                log.warning("%s %s: %s for %.0f s: %s", what, name, state, warning.lasted(now), reason)
        self._check_later()
