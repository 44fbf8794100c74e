"""A listening socket for readers: who may connect, and how many.

::

    accept --> may this user read, and is there room? --no--> closed, counted
      | yes
    `Reader`: greeting --> READY --> subscription, or request --> messages
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tokenlake.config import Address, is_loopback
from tokenlake.errors import ProtocolRefused
from tokenlake_server.engines.local_socket import listen
from tokenlake_server.kv_events.peer_user import peer_user
from tokenlake_server.kv_events.reader import Reader, Refuse
from tokenlake_server.loop.repeated_warning import RepeatedWarning
from tokenlake_server.start.start_errors import address_error

_LINGER_0 = struct.pack("ii", 1, 0)

log = logging.getLogger(__name__)

MAX_READERS_OF_ALL, MAX_READERS, MAX_READERS_OF_ONE = 128, 64, 32
"""Limits of the connections of readers: of all streams together, of one socket, and of one user (within this machine)
or one address at one socket; further ones are closed."""
ACCEPT_PAUSE_S = 0.002
"""Seconds between two accepts, so that a flood of connections takes a small share of the thread."""
FAILED_ACCEPT_S = 0.5
"""The same after one that failed, mostly because no descriptor was left."""

Make = Callable[[Refuse, Callable[[Reader], None]], Reader]


class Room:
    """The number of readers of all streams of a daemon."""

    def __init__(self) -> None:
        self.readers = 0


class Listener:
    """One listening socket and its connections."""

    def __init__(
        self,
        address: Address | str,
        users: frozenset[int],
        topic: str,
        room: Room,
        make: Make,
    ) -> None:
        """`users`: those that may read, where readers are in this machine. `make` makes a reader. Raises
        `ConfigurationError` for an address that cannot be opened."""
        self._address = address
        self._topic = topic
        self._users = users if isinstance(address, str) or is_loopback(address.host) else None
        """None: the readers are in other machines too, and everyone who reaches the address may read."""
        self._room = room
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._of: Counter[int | str] = Counter()
        """Number of connections by user, or by address where readers are in other machines."""
        self.readers: dict[Reader, int | str] = {}
        """The connections, with their users or addresses."""
        self.refused = 0
        self._warnings: dict[str, RepeatedWarning] = {}
        self._connecting: set[asyncio.Task[object]] = set()
        self._sock = _listen(address)
        self._loop.add_reader(self._sock, self._accept)

    @property
    def endpoint(self) -> str:
        if isinstance(self._address, str):
            return f"ipc://{self._address}"
        return f"tcp://{Address(*self._sock.getsockname()[:2])}"

    def _accept(self) -> None:
        pause_s = ACCEPT_PAUSE_S
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._warn("accept", f"none could be accepted: {error.strerror}")
            pause_s = FAILED_ACCEPT_S
        else:
            self._admit(sock)
        self._loop.remove_reader(self._sock)
        self._loop.call_later(pause_s, self._accept_again)

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    def _admit(self, sock: socket.socket) -> None:
        try:
            who = self._who(sock)
        except ProtocolRefused as error:
            _reset(sock)
            self.refuse("user", str(error))
            return
        limits = (
            (self._of[who], MAX_READERS_OF_ONE, f"{'uid' if isinstance(who, int) else 'address'} {who}"),
            (len(self.readers), MAX_READERS, "this socket"),
            (self._room.readers, MAX_READERS_OF_ALL, "all streams"),
        )
        for count, limit, what in limits:
            if count >= limit:
                _reset(sock)
                self.refuse("limit", f"{limit} connections of {what}, which is the limit")
                return
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        reader = self._make(self.refuse, self._left)
        self._of[who] += 1
        self._room.readers += 1
        self.readers[reader] = who
        task: asyncio.Task[object] = self._loop.create_task(self._connect(reader, sock))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, reader: Reader, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: reader, sock)
        except BaseException:
            sock.close()
            self._left(reader)
            raise

    def _who(self, sock: socket.socket) -> int | str:
        """The user or the address of the other side. Raises `ProtocolRefused` for a user that may not read."""
        if self._users is None:
            try:
                return str(sock.getpeername()[0])
            except OSError:
                raise ProtocolRefused("it has left") from None
        user = peer_user(sock)
        if user is None:
            raise ProtocolRefused("the kernel does not say of which user it is")
        if user not in self._users:
            raise ProtocolRefused(
                f"uid {user} may not read the tokens of prompts: 'uids' of the stream names the users that may, beside "
                "the daemon's own and root"
            )
        return user

    def refuse(self, kind: str, reason: str) -> None:
        """Count a connection that is closed. `kind`: a word for reasons that are logged as one."""
        self.refused += 1
        self._warn(kind, reason)

    def _warn(self, kind: str, reason: str) -> None:
        if self._warnings.setdefault(kind, RepeatedWarning()).should_log(kind, time.monotonic()):
            log.warning("a connection to the KV events '%s' at %s: %s", self._topic, self._address, reason)

    def _left(self, reader: Reader) -> None:
        who = self.readers.pop(reader, None)
        if who is not None:
            self._room.readers -= 1
            self._of[who] -= 1
            if not self._of[who]:
                del self._of[who]

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if isinstance(self._address, str):
            with contextlib.suppress(OSError):
                Path(self._address).unlink()
        for task in self._connecting:
            task.cancel()
        for reader in list(self.readers):
            reader.close()


def _reset(sock: socket.socket) -> None:
    """Close a connection so that the other side gets an error, and no end of a stream."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
    sock.close()


def _listen(address: Address | str) -> socket.socket:
    if isinstance(address, str):
        return listen(Path(address), "kv_events")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        raise address_error("kv_events", address, error) from error
    sock.listen(128)
    sock.setblocking(False)
    return sock
