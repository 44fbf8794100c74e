"""The local socket: where a daemon listens, where a client looks for it, and whether others could listen there instead.

The path of a socket says nothing of the process behind it. A client sends its credential only

1. to a path that other users cannot change: each directory and symbolic link on the way, and the socket, belongs to a
   trusted user, and no directory on the way can be written by its group or by others, unless it is sticky as /tmp is,
   where nobody can rename or remove the entries of others;
2. to a process that listens as a trusted user (SO_PEERCRED: the user that the process was when it called listen).

Trusted are root, the client's own user, one that it was given, and in `SYSTEM_DIRECTORY` the owner of that directory:
only root can create it, and gives it to the user that the service runs as.

No I/O: the caller passes in how to look at a file.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from tokenlake.errors import ListenerUntrusted, Unreachable

__all__ = [
    "DEFAULT_NODE",
    "SYSTEM_DIRECTORY",
    "check_listener",
    "check_place",
    "default_socket",
    "directory_mode",
    "first_reachable",
    "no_daemon",
    "sockets_to_try",
    "trusted_users",
]

SYSTEM_DIRECTORY = "/run/tokenlake"
DEFAULT_NODE = "local"
PREFIX, SUFFIX = "tokenlake-", ".sock"
"""Around the node's name, in the name of its socket."""
ROOT = 0
MAX_LINKS = 40
"""As Linux."""

MAX_NAMED = 8
"""Sockets that an error names."""

Look = Callable[[str], os.stat_result]
"""`os.lstat`."""
ListDirectory = Callable[[str], Iterable[str]]
"""`os.listdir`."""
T = TypeVar("T")


def default_socket(environ: Mapping[str, str], node: str, uid: int) -> str:
    """Where a daemon of user `uid` listens. Root, and a service that systemd made `SYSTEM_DIRECTORY` for, listen there;
    any other user's daemon in that user's own runtime directory."""
    if uid == ROOT or SYSTEM_DIRECTORY in environ.get("RUNTIME_DIRECTORY", "").split(":"):
        return _in(SYSTEM_DIRECTORY, node)
    return _in(_own_directories(environ, uid)[0], node)


def sockets_to_try(environ: Mapping[str, str], node: str, uid: int) -> tuple[str, ...]:
    """Where a client of user `uid` looks for a daemon, in this order: at its own user's, then at the system's. The
    daemon may have been started where XDG_RUNTIME_DIR was not set, or the client may be."""
    own = () if uid == ROOT else _own_directories(environ, uid)
    return tuple(_in(directory, node) for directory in (*own, SYSTEM_DIRECTORY))


def directory_mode(directory: str, uid: int) -> int | None:
    """The mode with which a daemon of user `uid` makes a directory that is missing; None: it does not."""
    if directory == SYSTEM_DIRECTORY:
        return 0o755
    return 0o700 if directory == _private_directory(uid) else None


def trusted_users(path: str, uid: int, given: int | None, look: Look) -> frozenset[int]:
    """The users that may listen at `path`, absolute, for a client of user `uid` that was `given` one."""
    trusted = {ROOT, uid} | (set() if given is None else {given})
    if posixpath.dirname(path) == SYSTEM_DIRECTORY:
        try:
            above, directory = look(posixpath.dirname(SYSTEM_DIRECTORY)), look(SYSTEM_DIRECTORY)
        except OSError:
            return frozenset(trusted)
        if above.st_uid == ROOT and not above.st_mode & 0o022 and stat.S_ISDIR(directory.st_mode):
            trusted.add(directory.st_uid)
    return frozenset(trusted)


def check_place(path: str, trusted: frozenset[int], look: Look, follow: Callable[[str], str]) -> None:
    """Can no other user replace what lies at `path`, absolute, or a directory on the way to it? `follow` is
    `os.readlink`. Raises `ListenerUntrusted`, and what `look` raises."""
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
        if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise ListenerUntrusted(
                f"directory {here} can be written by other users, who could make any process answer as the daemon at "
                f"{path}: take the right away (chmod go-w {here}), or have the daemon listen elsewhere (`socket`)"
            )
        at = here


def check_listener(path: str, uid: int, trusted: frozenset[int]) -> None:
    """May a process that listens at `path` as user `uid` have a credential? Raises `ListenerUntrusted`."""
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
    directories, because a daemon whose node has another name listens beside the path. `reason`: of the failure."""
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
    return f"if the daemon runs as that user, say so (daemon_uid = {uid}); else look who put it there"


def _own_directories(environ: Mapping[str, str], uid: int) -> tuple[str, ...]:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return (*([runtime] if runtime.startswith("/") else []), _private_directory(uid))


def _private_directory(uid: int) -> str:
    """For users without a runtime directory, as in most containers. Another user may take the name first; daemon and
    client refuse what is not theirs."""
    return f"/tmp/tokenlake-{uid}"


def _in(directory: str, node: str) -> str:
    return f"{directory}/{PREFIX}{node}{SUFFIX}"
