"""The listening sockets of the port for other daemons."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from tokenlake.config import Address, is_loopback
from tokenlake.errors import ConfigurationError
from tokenlake_server.start.start_errors import address_error

log = logging.getLogger(__name__)

PAUSE_S = 0.1
"""Seconds for which a socket accepts nothing after it could not, because there are no descriptors left."""


class Listeners:
    """Accepts connections at all addresses. Used on the control loop only."""

    def __init__(
        self,
        listen: Address,
        bulk_listen: Sequence[Address],
        accept: Callable[[socket.socket, str], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`accept`: called with each connection and its source address. Raises `ConfigurationError` for an address at
        which this machine cannot listen."""
        self._accept_one = accept
        self._loop = loop
        self._closing = False
        self._socks = [open_listener(listen, "listen"), *(open_listener(each, "bulk_listen") for each in bulk_listen)]
        self.address = Address(*self._socks[0].getsockname()[:2])
        """The first address, with the port that was chosen."""
        for sock in self._socks:
            loop.add_reader(sock, self._accept, sock)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, (source, *_) = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a connection could not be accepted: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(PAUSE_S, self._accept_again, listener)
            return
        self._accept_one(sock, source)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._closing:
            self._loop.add_reader(listener, self._accept, listener)

    def close(self) -> None:
        """Accept no more, and close the sockets."""
        self._closing = True
        for sock in self._socks:
            self._loop.remove_reader(sock)
            sock.close()


def open_listener(address: Address, setting: str) -> socket.socket:
    """A socket that listens at the address of a setting. Raises `ConfigurationError`."""
    try:
        family, _, _, _, resolved = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigurationError(setting, str(address), f"an address of this machine ({error.strerror})") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(resolved)
    except OSError as error:
        sock.close()
        raise address_error(setting, address, error) from error
    if not is_loopback(address.host) and is_loopback(str(resolved[0])):
        log.warning(
            "'%s' is %s, which this machine resolves to %s, an address of its own that no other machine reaches: take "
            "the name out of the line with %s in /etc/hosts, or give the address",
            setting,
            address,
            resolved[0],
            resolved[0],
        )
    sock.listen(128)
    sock.setblocking(False)
    return sock
