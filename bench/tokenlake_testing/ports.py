"""Free ports of the loopback interface for servers that run as child processes."""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Final

RESERVED: Final = 256
"""Number of ports that this process keeps reserved: more than the servers of any test or benchmark at one time."""

_descriptors: Final[deque[int]] = deque()
"""The sockets that reserve the newest ports, oldest first. Each is bound to its port and does not listen."""


def reserve_port() -> int:
    """A port for a server that sets SO_REUSEADDR, as daemons, `socket.create_server` and vLLM do.

    Until this process has reserved `RESERVED` further ports or ends, the kernel gives the port to no other socket that
    asks for any port, also before the server has started and after it has ended. It still refuses connections to the
    port while no server listens there.
    """
    with socket.socket() as sock:
        # The option SO_REUSEADDR allows two sockets to be bound to one port if both set it and at most one listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
        _descriptors.append(sock.detach())
    while len(_descriptors) > RESERVED:
        os.close(_descriptors.popleft())
    return port


def free_port() -> int:
    """A port of the loopback interface that a server can bind now, also without SO_REUSEADDR. Another process may take
    the port before the server does."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
