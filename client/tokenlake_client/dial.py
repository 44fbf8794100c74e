"""Dialling a daemon of this machine: the checks before anything is sent, and an error that names the cure."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
import stat
import struct
from pathlib import Path

from tokenlake.errors import Unreachable
from tokenlake.wire.local_socket import (
    DEFAULT_NODE,
    check_listener,
    check_place,
    first_reachable,
    no_daemon,
    sockets_to_try,
    trusted_users,
)

_CREDENTIALS = struct.Struct("3i")
"""The credentials of a process at a Unix socket: its pid, uid and gid."""


def dial(
    path: Path | None, daemon_uid: int | None, timeout_s: float, *, by_path: bool = False
) -> tuple[socket.socket, Path]:
    """A socket that is connected to a trusted process (`tokenlake.wire.local_socket`), and its path. Nothing has been sent.
    `path`, `daemon_uid`: as of `tokenlake_client.link.Connector`. `by_path`: the caller will connect to the path again,
    so that no other user may be able to change it.

    Raises `Unreachable`; `ListenerUntrusted` where another user listens, or could.
    """
    if path is not None:
        return _dial(str(path), daemon_uid, timeout_s, by_path), path
    places = sockets_to_try(os.environ, DEFAULT_NODE, os.geteuid())
    return first_reachable(places, lambda place: (_dial(place, daemon_uid, timeout_s), Path(place)), os.listdir)


def _dial(path: str, daemon_uid: int | None, timeout_s: float, by_path: bool = True) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"this process cannot open a socket: {error}") from error
    try:
        absolute = os.path.abspath(path)
        trusted = trusted_users(absolute, os.geteuid(), daemon_uid, os.lstat)
        shared = "" if by_path else os.path.dirname(absolute)
        check_place(absolute, trusted, os.lstat, os.readlink, shared)
        sock.settimeout(timeout_s)
        sock.connect(path)
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        check_listener(absolute, uid, trusted)
    except PermissionError as error:
        sock.close()
        raise Unreachable(_not_permitted(path)) from error
    except (OSError, ValueError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or str(error)
        text = f"{path} is no socket" if _is_other_file(path) else no_daemon([path], os.listdir, reason)
        raise Unreachable(text) from error
    except Unreachable:
        sock.close()
        raise
    return sock


def _is_other_file(path: str) -> bool:
    """True for a file that is no socket."""
    try:
        return not stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _not_permitted(path: str) -> str:
    uid = os.geteuid()
    try:
        found = os.stat(path)
    except OSError:
        return f"this user, uid {uid}, may not open {path}: a directory on the way to it is closed to this user"
    return (
        f"this user, uid {uid}, may not connect to {path}, which belongs to {_names(found)} with mode "
        f"{stat.S_IMODE(found.st_mode):04o}. Run this program as that user, or run the daemon as a service of a "
        f"group that this user is in, and add uid {uid} to 'allow_uids'"
    )


def _names(found: os.stat_result) -> str:
    """Names of the owner and the group of a file, or their numbers where they have no names."""
    owner, group = str(found.st_uid), str(found.st_gid)
    with contextlib.suppress(KeyError):
        owner = pwd.getpwuid(found.st_uid).pw_name
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(found.st_gid).gr_name
    return f"{owner}:{group}"
