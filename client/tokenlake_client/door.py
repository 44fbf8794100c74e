"""The way to the daemon's socket: found, looked at, connected; before anything is sent."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from tokenlake.errors import Unreachable
from tokenlake.local_socket import (
    DEFAULT_NODE,
    check_listener,
    check_place,
    first_reachable,
    sockets_to_try,
    trusted_users,
)

__all__ = ["dial"]

_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""


def dial(path: Path | None, daemon_uid: int | None, timeout_s: float) -> tuple[socket.socket, Path]:
    """A connection to a process that may have this process's credential (`tokenlake.local_socket`), and where it
    listens. `path` None: where a daemon listens by default. `daemon_uid`: the user that the daemon runs as, where that
    is neither root nor this process's.

    Raises `Unreachable`; `ListenerUntrusted` where another user listens, or could.
    """
    if path is not None:
        return _dial(str(path), daemon_uid, timeout_s), path
    places = sockets_to_try(os.environ, DEFAULT_NODE, os.geteuid())
    return first_reachable(places, lambda place: (_dial(place, daemon_uid, timeout_s), Path(place)))


def _dial(path: str, daemon_uid: int | None, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        absolute = os.path.abspath(path)
        trusted = trusted_users(absolute, os.geteuid(), daemon_uid, os.lstat)
        check_place(absolute, trusted, os.lstat, os.readlink)
        sock.settimeout(timeout_s)
        sock.connect(path)
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        check_listener(absolute, uid, trusted)
    except PermissionError as error:
        sock.close()
        raise Unreachable(
            f"this user may not connect to {path} ({error}); the socket's mode is 0660: join its group"
        ) from error
    except (OSError, ValueError) as error:
        sock.close()
        raise Unreachable(f"no daemon listens at {path} ({error}); start one with `tokenlake serve`") from error
    except Unreachable:
        sock.close()
        raise
    return sock
