"""The daemon's local socket: created where no other user can replace it."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from tokenlake.errors import ConfigurationError, ListenerUntrusted
from tokenlake.wire.local_socket import SUFFIX, check_place, default_socket, directory_mode, others_write

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
    directory = Path(os.path.abspath(path)).parent
    try:
        mode = directory_mode(str(directory), os.geteuid())
        if mode is not None:
            with contextlib.suppress(FileExistsError):
                directory.mkdir(0o700)
                # chmod, because mkdir applies the umask: engines of other users may have to enter the directory; the
                # socket's group decides which of them may connect.
                directory.chmod(mode)
        _check(path, setting)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _not_created(setting, path, error) from error


def check(path: Path, setting: str) -> None:
    """As `prepare`, but changes nothing."""
    directory = Path(os.path.abspath(path)).parent
    if not directory.exists() and directory_mode(str(directory), os.geteuid()) is not None:
        return
    try:
        _check(path, setting)
    except OSError as error:
        raise _not_created(setting, path, error) from error


def _not_created(setting: str, path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(setting, str(path), f"a path that can be created ({error.strerror})")


def _check(path: Path, setting: str) -> None:
    """Check that a socket may be made at `path`: no other user can replace it, no daemon listens there, and no other
    file lies there. Raises `ConfigurationError` and OSError."""
    absolute = Path(os.path.abspath(path))
    directory, user = absolute.parent, os.geteuid()
    try:
        shared = str(directory) if setting == ENGINES else ""
        check_place(str(directory), frozenset({0, user}), os.lstat, os.readlink, shared)
    except ListenerUntrusted as error:
        expected = f"a path that no other user can change (`chmod go-w`, `chown`): {error}"
        raise ConfigurationError(setting, str(path), expected) from error
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
    expected = ""
    if not stat.S_ISSOCK(found.st_mode):
        expected = "a path where no file or symbolic link lies; remove it, or choose another path"
    elif found.st_uid != user:
        expected = f"a path without a socket of another user, uid {found.st_uid}; remove it, or choose another path"
    elif listens(str(path)):
        expected = "a path where no daemon listens; the daemon of this node runs already, or another one has this path"
    if expected:
        raise ConfigurationError(setting, str(path), expected)


def control_of_this_user(node: str) -> str:
    """The path of the control socket of a daemon of this user whose socket of engines lies where others can write."""
    return default_socket(os.environ, node, os.geteuid()).removesuffix(SUFFIX) + ".control"


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
