"""The daemon's local socket: created where no other user can replace it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from tokenlake.errors import ConfigurationError, ListenerUntrusted
from tokenlake.wire.local_socket import check_place, directory_mode, others_write

ENGINES = "socket"
"""The setting of the socket whose clients check the process that listens, so that its directory may be one that others
can write."""
ENTER_AND_WRITE = os.W_OK | os.X_OK


def listen(path: Path, setting: str = ENGINES) -> socket.socket:
    """Create a listening socket at `path` with mode 0660. A default directory is created where it is missing. A socket
    that a dead daemon of this user left is replaced. `setting`: the name of the path in errors.

    Raises `ConfigurationError` when another daemon listens there, when the file belongs to another user, and when other
    users could replace the socket.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        prepare(path, setting)
        previous = os.umask(0o117)
        try:
            sock.bind(str(path))
        except OSError as error:
            raise _not_created(setting, path, error) from error
        finally:
            os.umask(previous)
    except ConfigurationError:
        sock.close()
        raise
    # The daemon process itself must call listen: clients check the credentials of the process that did (SO_PEERCRED).
    sock.listen(128)
    sock.setblocking(False)
    return sock


def prepare(path: Path, setting: str) -> None:
    """Make the path of a socket ready: create a default directory, check every directory on the path, remove the socket
    of a dead daemon of this user. `setting`: the name of the path in errors. Raises `ConfigurationError`."""
    try:
        _prepare(path, setting)
    except OSError as error:
        raise _not_created(setting, path, error) from error


def _not_created(setting: str, path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(setting, str(path), f"a path that can be created ({error.strerror})")


def _prepare(path: Path, setting: str) -> None:
    absolute = Path(os.path.abspath(path))
    directory, user = absolute.parent, os.geteuid()
    mode = directory_mode(str(directory), user)
    if mode is not None:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(0o700)
            # chmod, because mkdir applies the umask: engines of other users may have to enter the directory; the
            # socket's group decides which of them may connect.
            directory.chmod(mode)
    try:
        shared = str(directory) if setting == ENGINES else ""
        check_place(str(directory), frozenset({0, user}), os.lstat, os.readlink, shared)
    except ListenerUntrusted as error:
        raise ConfigurationError(setting, str(path), f"a path that no other user can change: {error}") from error
    if not os.access(directory, ENTER_AND_WRITE, effective_ids=True):
        raise ConfigurationError(
            setting,
            str(path),
            f"a path in a directory that uid {user} can write, which {directory} is not: run `chown {user} "
            f"{directory}` as root (a hostPath that Kubernetes made belongs to root: an initContainer can do it), or "
            "run the daemon as its owner",
        )
    try:
        found = absolute.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise ConfigurationError(
            setting, str(path), "a path that is not a symbolic link; remove the link, or give its target"
        )
    if stat.S_ISSOCK(found.st_mode):
        if found.st_uid != user:
            expected = f"a path without a socket of another user, uid {found.st_uid}; remove it, or choose another path"
            raise ConfigurationError(setting, str(path), expected)
        if listens(str(path)):
            raise ConfigurationError(
                setting,
                str(path),
                "a path where no daemon listens; the daemon of this node runs already, or another one has this path",
            )
        path.unlink()


def is_shared(path: str) -> bool:
    """True for the path of a socket in a directory in which other users can rename and remove it."""
    try:
        return others_write(os.stat(os.path.dirname(os.path.abspath(path))))
    except OSError:
        return False


def listens(path: str) -> bool:
    """True if a process listens at the path of a socket, or may do so: it accepts no further connections now, or none
    of this user. False for the socket of a process that has ended, and where there is no file. Never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        # A blocking connect would wait for as long as the other process is stopped and its queue of connections full.
        sock.setblocking(False)
        try:
            sock.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
