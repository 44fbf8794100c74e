"""The descriptor store of systemd as the store of a daemon's memory (sd_notify(3), sd_listen_fds(3)).

systemd keeps what a service sends it with `FDSTORE=1`, and starts the service again with it. The limit is
`FileDescriptorStoreMax=` of the unit, which systemd 254 and later names in the variable FDSTORE; the unit sets the
variable for earlier ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Mapping, MutableMapping

from tokenlake_server.kept.descriptor_store import DescriptorStore
from tokenlake_server.start.service_manager import address_of

FIRST_DESCRIPTOR = 3


class ServiceStore(DescriptorStore):
    """The descriptor store of the service manager that started this process."""

    name = "the service manager"

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes the descriptors that the service manager passed to this process, and the variables that name them. Only
        where `offered` is true. Raises OSError."""
        self._limit = int(environ["FDSTORE"])
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sock.connect(address_of(environ))
        except BaseException:
            sock.close()
            raise
        super().__init__(sock, _passed(environ))

    @property
    def room(self) -> int:
        return self._limit - len(self._held)

    def _hold_message(self, name: str) -> bytes:
        return f"FDSTORE=1\nFDNAME={name}".encode()

    def _drop_message(self, name: str) -> bytes:
        return f"FDSTOREREMOVE=1\nFDNAME={name}".encode()


def offered(environ: Mapping[str, str]) -> bool:
    """True where the service manager keeps descriptors for this process."""
    limit = environ.get("FDSTORE", "")
    return bool(environ.get("NOTIFY_SOCKET")) and limit.isdecimal() and int(limit) > 0


def _passed(environ: MutableMapping[str, str]) -> dict[str, int]:
    """The descriptors that were passed to this process, by name. Two of one name: the first."""
    found = {name: environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")}
    if found["LISTEN_PID"] != str(os.getpid()) or not found["LISTEN_FDS"].isdecimal():
        return {}
    names = found["LISTEN_FDNAMES"].split(":")
    passed: dict[str, int] = {}
    for at in range(int(found["LISTEN_FDS"])):
        number, name = FIRST_DESCRIPTOR + at, names[at] if at < len(names) else ""
        with contextlib.suppress(OSError):
            fcntl.fcntl(number, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            if passed.setdefault(name, number) != number:
                os.close(number)
    return passed
