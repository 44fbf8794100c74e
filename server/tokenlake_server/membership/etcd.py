"""The membership of the setting `etcd`, as the daemon's loop sees it.

A thread of its own reads etcd and writes to it (`keeper.py`); the loop gets results only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable

from tokenlake.config import Address, ServerConfig
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import TokenLakeError
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.membership.base import Account, Members, MembershipState, OnMembers, alone
from tokenlake_server.membership.changes import draining, removed
from tokenlake_server.membership.etcd_client import Access, on_any
from tokenlake_server.membership.keeper import Keeper
from tokenlake_server.membership.stored import Registration, Stored, change
from tokenlake_server.version import VERSION

CHANGE_S = 10.0
"""Seconds that `drain` and `remove` may take."""
GOODBYE_S = 1.0
"""Seconds for which the end of a daemon waits for etcd."""


class EtcdMembership:
    """The members that etcd stores. Used on the daemon's loop."""

    def __init__(
        self, config: ServerConfig, incarnation: int, loop: asyncio.AbstractEventLoop, thread: AdminThread
    ) -> None:
        self._loop = loop
        self._access = Access.of(config)
        self._cluster, self._node, self._memory = config.cluster, config.node, config.memory
        self._incarnation = incarnation
        self.members = alone(config.node, config.memory)
        """See `Membership`."""
        self.state = MembershipState(str(self._access), known=False, epoch=0, problem="etcd has not answered yet")
        """See `Membership`."""
        self._changed: OnMembers = lambda members: None
        self._thread = thread
        self._running: concurrent.futures.Future[None] | None = None
        self._closed = False
        self._left = False
        self._keeper: Keeper | None = None

    def start(self, address: Address, changed: OnMembers) -> None:
        """Begin to reach etcd, for as long as it takes. `address`, `changed`: see `Membership`."""
        self._changed = changed
        registration = Registration(str(address), self._incarnation, self._memory, VERSION)
        self._keeper = Keeper(self._access, self._cluster, self._node, registration, self._publish)
        self._running = self._thread.submit(self._keeper.run())

    def _publish(self, members: Members | None, state: MembershipState) -> None:
        # Called in the thread. A closed loop raises RuntimeError.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, members, state)

    def _take(self, members: Members | None, state: MembershipState) -> None:
        if self._closed:
            return
        self.state = state
        if members is not None and members != self.members:
            self.members = members
            self._changed(members)

    def refresh(self) -> None:
        """Read the keys again soon."""
        if self._keeper is not None and not self._closed:
            self._thread.call_soon(self._keeper.refresh)

    def proven(self, node: str, incarnation: int) -> None:
        """See `Membership`."""
        if self._keeper is not None and not self._closed:
            self._thread.call_soon(self._keeper.proven, node, incarnation)

    async def drain(self, node: str = "") -> None:
        """Mark this node, or another one, as draining. Raises `Unreachable`, and `MembershipRefused` for a node that is
        no member, or another one that is not registered."""
        await self._change(draining(self._cluster, node or self._node, alive=bool(node)))

    async def remove(self, node: str) -> None:
        """Take another node out of the record. Raises `Unreachable`, and `MembershipRefused` for a node that is no
        member, or whose daemon is registered and proven."""
        await self._change(removed(self._cluster, node, dead=True))

    async def leave(self, account: Account) -> None:
        """Take this node out of the record, if it is there. Raises `Unreachable`."""
        await self._change(removed(self._cluster, self._node), (self._node, account))
        self._left = True

    async def _change(self, edit: Callable[[Stored], RingRecord], account: tuple[str, Account] | None = None) -> None:
        work = on_any(self._access, lambda etcd: change(etcd, self._cluster, edit, account), CHANGE_S)
        await asyncio.wrap_future(self._thread.submit(work), loop=self._loop)

    async def close(self) -> None:
        """End the work in the thread. Waits at most `GOODBYE_S` for etcd."""
        if self._closed:
            return
        self._closed = True
        if self._running is not None and self._keeper is not None:
            self._running.cancel()
            if self._left:
                # The registration has the account, which every member reads before the lease ends.
                return
            goodbye = asyncio.wrap_future(self._thread.submit(self._keeper.unregister(GOODBYE_S)), loop=self._loop)
            with contextlib.suppress(TimeoutError, TokenLakeError):
                await asyncio.wait_for(goodbye, GOODBYE_S)
