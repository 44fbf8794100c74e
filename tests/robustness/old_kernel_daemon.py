"""`tokenlake serve` as on a kernel without SO_PEERPIDFD (before Linux 6.5), in a PID namespace that has none of the
engines: the daemon sees the pid 0 for each of them."""

from __future__ import annotations

import socket

from tokenlake_server.cli import serve
from tokenlake_server.engines import connected_process

NO_SUCH_OPTION = 9999


credentials = connected_process.credentials


def _without_pid(sock: socket.socket) -> connected_process.Credentials:
    return credentials(sock)._replace(pid=0)


if __name__ == "__main__":
    connected_process.SO_PEERPIDFD = NO_SUCH_OPTION
    connected_process.credentials = _without_pid
    serve()
