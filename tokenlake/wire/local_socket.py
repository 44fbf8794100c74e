"""The local socket: the path at which a daemon listens and a client connects, and the checks before a client trusts it.

The path of a socket does not identify the process that listens. A client sends its credential only

1. to a path that other users cannot change: each directory and symbolic link on the way, and the socket, belongs to a
   trusted user, and no directory on the way can be written by its group or by others, unless it is sticky as /tmp is,
   where a user can rename and remove only its own entries;
2. to a process that listens as a trusted user (SO_PEERCRED: the user of the process when it called listen).

The directory of the socket itself may be one that others can write, as a volume (emptyDir) that the containers of a pod
share: they can take the socket away, and another process of theirs is recognised by 2. This holds only for a connection
whose other end is checked, and not where a library connects by the path.

Trusted users are root, the client's own user, the configured one, and in `SYSTEM_DIRECTORY` its owner: only root can
create that directory, and gives it to the user of the service.

No I/O: the caller passes in the functions that read the file system.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from tokenlake.errors import ListenerUntrusted, Unreachable

SYSTEM_DIRECTORY = "/run/tokenlake"
DEFAULT_NODE = "local"
PREFIX, SUFFIX = "tokenlake-", ".sock"
"""The name of a socket is PREFIX, the name of the node, SUFFIX."""
ROOT = 0
MAX_LINKS = 40
"""Symbolic links that are followed on the way to a socket; Linux has the same limit."""

MAX_NAMED = 8
"""Maximum number of sockets that one error message names."""

Look = Callable[[str], os.stat_result]
"""A function like `os.lstat`: it returns the status of a file."""
ListDirectory = Callable[[str], Iterable[str]]
"""A function like `os.listdir`: it returns the names in a directory."""
T = TypeVar("T")


def default_socket(environ: Mapping[str, str], node: str, uid: int) -> str:
    """The path of the local socket at which the daemon of `node` listens by default if it runs as user `uid`. The
    socket of root, and of a service to which systemd gives /run/tokenlake in the environment variable
    RUNTIME_DIRECTORY, lies in `SYSTEM_DIRECTORY`, which is /run/tokenlake; that of any other user lies in the user's
    runtime directory (XDG_RUNTIME_DIR), or in /tmp/tokenlake-UID where there is none."""
    if uid == ROOT or SYSTEM_DIRECTORY in environ.get("RUNTIME_DIRECTORY", "").split(":"):
        return _in(SYSTEM_DIRECTORY, node)
    return _in(_own_directories(environ, uid)[0], node)


def sockets_to_try(environ: Mapping[str, str], node: str, uid: int) -> tuple[str, ...]:
    """The paths at which a client of user `uid` looks for a daemon, in order: those of its user, then the system's.
    XDG_RUNTIME_DIR may be set for only one of daemon and client, so both paths of the user are tried."""
    own = () if uid == ROOT else _own_directories(environ, uid)
    return tuple(_in(directory, node) for directory in (*own, SYSTEM_DIRECTORY))


def directory_mode(directory: str, uid: int) -> int | None:
    """The mode with which a daemon of user `uid` creates this directory; None: it does not create it."""
    if directory == SYSTEM_DIRECTORY:
        return 0o755
    return 0o700 if directory == _private_directory(uid) else None


def trusted_users(path: str, uid: int, given: int | None, look: Look) -> frozenset[int]:
    """The users that may listen at `path`, absolute, for a client of user `uid`. `given`: the configured user."""
    trusted = {ROOT, uid} | (set() if given is None else {given})
    if posixpath.dirname(path) == SYSTEM_DIRECTORY:
        try:
            above, directory = look(posixpath.dirname(SYSTEM_DIRECTORY)), look(SYSTEM_DIRECTORY)
        except OSError:
            return frozenset(trusted)
        if above.st_uid == ROOT and not above.st_mode & 0o022 and stat.S_ISDIR(directory.st_mode):
            trusted.add(directory.st_uid)
    return frozenset(trusted)


def check_place(path: str, trusted: frozenset[int], look: Look, follow: Callable[[str], str], shared: str = "") -> None:
    """Raises `ListenerUntrusted` if an untrusted user could replace the file at `path`, absolute, or a directory on the
    way to it; passes on the errors of `look`. `follow` is `os.readlink`. `shared`: a directory that others may write,
    because the caller checks the process that listens."""
    at, links = "/", 0
    left = ["/", *path.split("/")][::-1]
    while left:
        name = left.pop()
        here = posixpath.normpath(posixpath.join(at, name))
        if name in ("", "."):
            continue
        found = look(here)
        if found.st_uid not in trusted:
            raise ListenerUntrusted(
                f"{here} belongs to uid {found.st_uid}, which could make any process answer as the daemon at {path}: "
                f"{_remedy(found.st_uid)}"
            )
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise ListenerUntrusted(f"{path} leads through more than {MAX_LINKS} symbolic links")
            target = follow(here)
            at = "/" if target.startswith("/") else at
            left += target.split("/")[::-1]
            continue
        if others_write(found) and here != shared:
            raise ListenerUntrusted(
                f"directory {here} can be written by other users, who could make any process answer as the daemon at "
                f"{path}: take the right away (chmod go-w {here}), or have the daemon listen elsewhere"
            )
        at = here


def others_write(directory: os.stat_result) -> bool:
    """True for a directory whose group or others can rename and remove the entries of its owner."""
    return bool(stat.S_ISDIR(directory.st_mode) and directory.st_mode & 0o022 and not directory.st_mode & stat.S_ISVTX)


def check_listener(path: str, uid: int, trusted: frozenset[int]) -> None:
    """Raises `ListenerUntrusted` unless a process that listens at `path` as user `uid` may be sent a credential."""
    if uid not in trusted:
        users = ", ".join(str(user) for user in sorted(trusted))
        raise ListenerUntrusted(
            f"a process of uid {uid} listens at {path}, not one of uid {users}; nothing was sent to it: {_remedy(uid)}"
        )


def first_reachable(paths: Iterable[str], attempt: Callable[[str], T], list_directory: ListDirectory) -> T:
    """The result of `attempt` for the first path where it raises no `Unreachable`. Otherwise raises the most
    informative of these errors: of a listener that is not trusted, else of a socket that is there and does not answer,
    else `no_daemon`."""
    tried = tuple(paths)
    failures: list[Unreachable] = []
    for path in tried:
        try:
            return attempt(path)
        except Unreachable as error:
            if len(tried) == 1:
                raise
            failures.append(error)
    for failure in failures:
        if isinstance(failure, ListenerUntrusted):
            raise failure
    for failure in failures:
        if not isinstance(failure.__cause__, FileNotFoundError):
            raise failure
    raise Unreachable(no_daemon(tried, list_directory))


def no_daemon(paths: Sequence[str], list_directory: ListDirectory, reason: str = "") -> str:
    """The text of the error when no daemon listens at any of `paths`. It names the sockets of daemons in the same
    directories, because the daemon may run under another node name than expected. `reason`: why connecting failed."""
    beside: list[str] = []
    for directory in dict.fromkeys(posixpath.dirname(path) or "." for path in paths):
        try:
            names = [name for name in list_directory(directory) if name.startswith(PREFIX) and name.endswith(SUFFIX)]
        except OSError:
            continue
        beside += [f"{directory}/{name}" for name in sorted(names)]
    others = [path for path in beside if path not in paths]
    text = f"no daemon listens at {' or '.join(paths)}" + (f" ({reason})" if reason else "")
    if not others:
        return f"{text}; start one with `tokenlake serve`"
    named = ", ".join(others[:MAX_NAMED]) + (", ..." if len(others) > MAX_NAMED else "")
    return f"{text}; sockets here: {named}; connect to one of these (`socket`), or start another with `tokenlake serve`"


def _remedy(uid: int) -> str:
    return f"if the daemon runs as that user, set daemon_uid = {uid}; otherwise find out which process created it"


def _own_directories(environ: Mapping[str, str], uid: int) -> tuple[str, ...]:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return (*([runtime] if runtime.startswith("/") else []), _private_directory(uid))


def _private_directory(uid: int) -> str:
    """The directory for the socket of a user without a runtime directory, as in most containers. Another user may
    create it first; daemon and client refuse a directory of another user."""
    return f"/tmp/tokenlake-{uid}"


def _in(directory: str, node: str) -> str:
    return f"{directory}/{PREFIX}{node}{SUFFIX}"
