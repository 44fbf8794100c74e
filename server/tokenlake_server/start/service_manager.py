"""Tells systemd when this daemon serves, what it does, that its control loop runs, and that it ends (sd_notify(3))."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


def address_of(environ: Mapping[str, str]) -> str:
    """The address of the service manager's socket; empty where none started this process."""
    path = environ.get("NOTIFY_SOCKET", "")
    return f"\0{path[1:]}" if path.startswith("@") else path


class ServiceManager:
    """The service manager that started this process, by the variables that systemd sets for `Type=notify` and
    `WatchdogSec=`; without them no call does anything."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = address_of(environ)
        own = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = environ.get("WATCHDOG_USEC", "") if own else ""
        self._interval_s = int(limit) / 2e6 if limit.isdecimal() else 0.0
        """Seconds between two signs of life: half of the time after which the manager kills this process."""

    def tell(self, *lines: str) -> None:
        """Send assignments such as `READY=1`. Does not wait; a message that cannot be sent is logged."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", lines[0], error, extra={"kind": "service manager"})

    def keep_alive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send signs of life from now on for as long as the loop runs its callbacks."""
        if self._interval_s:
            self.tell("WATCHDOG=1")
            loop.call_later(self._interval_s, self.keep_alive, loop)
