"""What callers of the control plane may have at a time: calls, and bytes of messages.

::

    a call arrives --> its role is known --> counted --> room for a message --> the message is read
                                                             (READING)               |
                                                                            its parts are counted
                                                                                     |
                                  the reply was taken <-- reply <-- decoded <-- room for its work (WORKING)

A message that waits for room stays in the network, but for the 64 KiB that gRPC reads ahead. Room is given in turns of
the tenants, of which none gets more than half of it, and admins have calls and room that no other caller takes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from tokenlake.errors import LimitReached
from tokenlake_server.control.callers import Caller

T = TypeVar("T")
MAX_MESSAGE = 2 << 20
"""Limit of the bytes of a message of a caller."""
MAX_CALLS, TENANT_CALLS, ADMIN_CALLS = 96, 48, 32
"""Calls at a time, streams included: of all tenants, of one of them, and of admins; further ones are refused."""
READING, WORKING = 8 << 20, 16 << 20
"""Bytes of the messages that are read or wait for their work, and of the work on messages, of all tenants."""
ADMIN_READING, ADMIN_WORKING = 2 << 20, 8 << 20
"""The same for admins."""
READ_S = 5.0
"""Seconds in which a caller has to send its message once there is room for it."""
ADMINS = "\0admins"
"""The key of the turns of admins, which no tenant can have as its name."""


class Room:
    """Bytes that are given to callers in turns of their keys. Used in one thread, on its loop."""

    def __init__(self, total: int, part: int) -> None:
        """`part`: limit of the bytes of one key."""
        self._left = total
        self.part = part
        self._taken: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}
        """By key; the turn of the first key is next."""

    @property
    def taken(self) -> int:
        """The bytes that all keys have."""
        return sum(self._taken.values())

    async def take(self, of: str, nbytes: int) -> int:
        """Wait for room for `nbytes`, and take it. Returns the bytes to give back: `nbytes`, or all that one key may
        have."""
        nbytes = min(nbytes, self.part)
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(of, deque()).append((future, nbytes))
        self._grant()
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                # The caller left before its turn: the turns go on without it.
                self._grant()
            else:
                self.give_back(of, nbytes)
            raise
        return nbytes

    def give_back(self, of: str, nbytes: int) -> None:
        """Give room back, and to the callers that wait for it."""
        self._add(of, -nbytes)
        self._grant()

    def _add(self, of: str, nbytes: int) -> None:
        self._left -= nbytes
        self._taken[of] = self._taken.get(of, 0) + nbytes
        if not self._taken[of]:
            del self._taken[of]

    def _grant(self) -> None:
        """Give room to callers that wait, in turns of the keys. A key that has its part is passed over. The room that
        the next caller needs is not given to those behind it."""
        for of in list(self._waiting):
            waiting = self._waiting[of]
            while waiting and waiting[0][0].cancelled():
                waiting.popleft()
            if waiting:
                future, nbytes = waiting[0]
                if self._taken.get(of, 0) + nbytes > self.part:
                    continue
                if nbytes > self._left:
                    return
                waiting.popleft()
                self._add(of, nbytes)
                future.set_result(None)
            # The key goes behind the others, or away.
            del self._waiting[of]
            if waiting:
                self._waiting[of] = waiting


class Call:
    """One call under way, with the room that it has."""

    def __init__(self, of: str, reading: Room, working: Room) -> None:
        self.of = of
        """The key of its turns: the tenant, or `ADMINS`."""
        self._rooms = reading, working
        self._taken = [0, 0]

    async def read(self, receive: Callable[[], Awaitable[T]]) -> T:
        """Returns what `receive` does: the next message of the caller. It takes room until `begin`. Raises TimeoutError
        for a caller that sends none."""
        self._taken[0] += await self._rooms[0].take(self.of, MAX_MESSAGE)
        try:
            async with asyncio.timeout(READ_S):
                return await receive()
        except TimeoutError:
            raise TimeoutError(f"the message did not arrive within {READ_S:.0f} s") from None

    async def begin(self, nbytes: int) -> None:
        """Take room for the work on the message that was read, and for the reply, until `end`."""
        self._taken[1] += await self._rooms[1].take(self.of, nbytes)
        self._give_back(0)

    def end(self) -> None:
        """Give all room back."""
        self._give_back(0)
        self._give_back(1)

    def _give_back(self, which: int) -> None:
        nbytes, self._taken[which] = self._taken[which], 0
        if nbytes:
            self._rooms[which].give_back(self.of, nbytes)


class Calls:
    """The calls under way. Used in the admin thread."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        """Calls under way, by key."""
        self._rooms = Room(READING, READING // 2), Room(WORKING, WORKING // 2)
        self._admins = Room(ADMIN_READING, ADMIN_READING), Room(ADMIN_WORKING, ADMIN_WORKING)
        self.refused = 0
        """Number of calls that were refused because too many were under way."""

    @property
    def under_way(self) -> int:
        """The number of calls under way."""
        return sum(self._counts.values())

    @property
    def kept_bytes(self) -> int:
        """The bytes that messages and the work on them take."""
        return sum(room.taken for room in (*self._rooms, *self._admins))

    @contextlib.contextmanager
    def call(self, caller: Caller) -> Iterator[Call]:
        """Count a call of this caller while the block runs. Raises `LimitReached`."""
        of = ADMINS if caller.admin else caller.account
        own = self._counts.get(of, 0)
        others = self.under_way - self._counts.get(ADMINS, 0)
        if own >= (ADMIN_CALLS if caller.admin else TENANT_CALLS) or (not caller.admin and others >= MAX_CALLS):
            self.refused += 1
            raise LimitReached(
                f"{others} calls of tenants are under way, and {own} of this {'role' if caller.admin else 'tenant'}; "
                f"the limit is {MAX_CALLS}, {TENANT_CALLS} of one tenant and {ADMIN_CALLS} of admins: make fewer calls "
                "at a time"
            )
        self._counts[of] = own + 1
        call = Call(of, *(self._admins if caller.admin else self._rooms))
        try:
            yield call
        finally:
            call.end()
            self._counts[of] -= 1
            if not self._counts[of]:
                del self._counts[of]
