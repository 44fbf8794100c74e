"""Lets the rules and the connections follow the members, and takes this node out of the ring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from tokenlake.config import Address, is_loopback
from tokenlake.core import events
from tokenlake.core.context import ring_of
from tokenlake.core.instructions import Drained
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import TokenLakeError
from tokenlake.identity import NodeId
from tokenlake_server.bulk.receiver import BulkReceiver
from tokenlake_server.loop.driver import Driver
from tokenlake_server.membership import Account, Members, Membership
from tokenlake_server.peers.connections import PeerConnections

log = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Seconds after which a change of the members that failed is tried again."""


async def _nothing() -> None:
    return


class RingFollower:
    """Follows the membership of one daemon. Used on the control loop."""

    def __init__(
        self,
        membership: Membership,
        driver: Driver,
        peers: PeerConnections,
        receivers: BulkReceiver,
        loop: asyncio.AbstractEventLoop,
        *,
        encrypted: bool,
    ) -> None:
        """`encrypted`: this node may connect to other machines."""
        self._membership = membership
        self._driver = driver
        self._peers = peers
        self._receivers = receivers
        self._loop = loop
        self._encrypted = encrypted
        self.left = asyncio.Event()
        """Set when this node has drained and left the ring: the daemon may end."""
        self.account_read: Callable[[], Awaitable[None]] = _nothing
        """Waits until a caller has read the account of the drain, if one wants to."""
        self.drain_s = driver.core.config.drain_s
        """Limit of the seconds of a drain."""
        self._newest: Members | None = None
        self._changing = asyncio.Lock()
        self._working: set[asyncio.Task[None]] = set()
        driver.carry_out(Drained, lambda order: self.begin(self._leave(order)))

    def follow(self, members: Members) -> None:
        """Follow a change of the members."""
        self._newest = members
        self.begin(self._follow(members))
        unproven = {name: self._reachable(name, at) for name, at in members.unproven.items()}
        self._peers.introductions.follow(unproven)

    def begin(self, work: Coroutine[None, None, None]) -> None:
        """Begin work of the membership, which `close` ends."""
        task = self._loop.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work of the membership failed", exc_info=error)

    async def drain(self) -> None:
        """Let this node hand its segments over and leave the ring; `left` is set then. Raises `Unreachable` and
        `MembershipRefused`."""
        log.info("this node drains: it hands its segments over and leaves the ring, within about %.0f s", self.drain_s)
        await self._membership.drain()

    async def _leave(self, drained: Drained) -> None:
        """Take this node, which has drained, out of the ring record."""
        account = Account(drained.moved, (drained.lost_segments, drained.lost_bytes))
        try:
            await self._membership.leave(account)
            log.info("this node has drained and left the ring: %s", account)
            await self.account_read()
        except TokenLakeError as error:
            log.error("this node has drained, but could not leave the ring (`tokenlake remove` does it): %s", error)
        self.left.set()

    async def _follow(self, members: Members) -> None:
        """Follow a change, again after each failure until there is a newer one."""
        while True:
            try:
                return await self._change(members.record, members.addresses)
            except Exception:
                log.exception("a change of the members failed, and is tried again in %g s", AGAIN_S)
            await asyncio.sleep(AGAIN_S)
            if members is not self._newest:
                return

    async def _change(self, record: RingRecord, addresses: Mapping[str, Address]) -> None:
        """Follow a ring record, with the address of each member: the rules first, then the connections. A record that
        is not newer than that of the rules changes the addresses of its members only."""
        core = self._driver.core
        node = core.config.node
        async with self._changing:
            # The thread makes the circle of the ring in some 100 ms; the rules then find it in the cache.
            await asyncio.to_thread(ring_of, record, NodeId(node))
            epoch = core.record.epoch
            self._driver.handle(events.RingChanged(record))
            if core.record.epoch != epoch:
                core.store.changes.ring(core.record)
            members = core.record.members
            others = (name for name in members if name != node and node in members)
            self._peers.set_peers({name: self._reachable(name, addresses.get(name)) for name in others})
            self._receivers.follow()

    def _reachable(self, name: str, address: Address | None) -> Address | None:
        """The address of a member; None where this node must not connect to it."""
        if address is None or self._encrypted or is_loopback(address.host):
            return address
        log.error(
            "member '%s' listens at %s: connections beyond loopback need the setting 'certificate'", name, address
        )
        return None

    async def close(self) -> None:
        """End the work that is under way."""
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
