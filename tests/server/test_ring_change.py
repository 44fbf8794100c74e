"""Connections between daemons follow a change of the ring: `PeerConnections.set_peers`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tokenlake.config import Address
from tokenlake.core import events
from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.connections import PeerConnections
from tokenlake_server.peers.handshake import PeerIdentity

LIMIT_S = 20.0
NOWHERE = Address("127.0.0.1", 0)


class Rules:
    """In place of the driver: keeps the events."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def carry_out(self, kind: type, sink: Callable[[Any], None]) -> None:
        pass

    def handle(self, event: events.Event) -> None:
        self.events.append(event)


def side(name: str, cluster: str = "tokenlake") -> tuple[PeerConnections, Rules]:
    rules: Any = Rules()
    identity = PeerIdentity(name, 1, cluster=cluster)
    loop = asyncio.get_running_loop()
    return PeerConnections(identity, NOWHERE, PeerAddresses({}), rules, loop, {}), rules


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():
            await asyncio.sleep(0.005)


async def test_members_that_come_and_leave() -> None:
    """Members that come are dialled and those that leave are dropped."""

    (a, of_a), (b, of_b) = side("a"), side("b")
    strangers: list[str] = []
    b.on_stranger = strangers.append
    # a knows b first: b refuses it, and is told that the membership may have more.
    a.set_peers({"b": b.address})
    await until(lambda: bool(strangers))
    assert not of_a.events
    b.set_peers({"a": a.address})
    await until(lambda: a.connected == ["b"] and b.connected == ["a"])
    assert of_a.events == [events.PeerUp("b", 1)]
    assert of_b.events == [events.PeerUp("a", 1)]
    # b drops a: the rules of b know already, those of a are told.
    b.set_peers({})
    await until(lambda: not a.connected)
    assert of_b.events == [events.PeerUp("a", 1)]
    assert of_a.events == [events.PeerUp("b", 1), events.PeerDown("b", 1)]
    b.set_peers({"a": a.address})
    await until(lambda: a.connected == ["b"])
    a.set_peers({})
    await until(lambda: not b.connected)
    assert not a.connected
    for each in (a, b):
        await each.close()
