"""The ports, sockets and directories that a daemon needs at its start."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenlake.config import Address, Disk, ServerConfig, parse_address
from tokenlake.errors import ListenerUntrusted
from tokenlake.wire.local_socket import check_place, directory_mode
from tokenlake_operator.doctor.base import Finding
from tokenlake_server.disk.store import RESERVE_BYTES
from tokenlake_server.engines.local_socket import ENGINES, is_shared, listens


def check_ports(config: ServerConfig) -> Iterator[Finding]:
    """Yield a finding for each port that another process has, and for each address that is none of this machine. To be
    called while the daemon does not run."""
    wanted = [("listen", parse_address(config.listen)), *(("bulk_listen", each) for each in config.bulk_listen)]
    for setting in ("metrics", "control"):
        if text := getattr(config, setting):
            wanted.append((setting, parse_address(text)))
    for setting, address in wanted:
        where = f"{setting} = {address}"
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            cure = "use an IP address of this machine, or a name of one"
            yield Finding("error", "address", where, f"the name cannot be resolved ({error.strerror})", cure)
            continue
        yield from _bind(setting, address, where, found[0], found[4])


def _bind(setting: str, address: Address, where: str, family: int, sockaddr: object) -> Iterator[Finding]:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(sockaddr)  # type: ignore[arg-type]
            # With SO_REUSEADDR only listening is refused where another process listens.
            sock.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                cure = (
                    f"end the process that has the port (`ss -ltnp 'sport = :{address.port}'` names it), or give "
                    f"'{setting}' another port: each daemon of a machine needs its own"
                )
                yield Finding("error", "port-in-use", where, "another process listens there", cure)
            elif error.errno == errno.EADDRNOTAVAIL:
                cure = (
                    "use an address that `ip address` shows; behind NAT set 'advertise' to the address that others use"
                )
                yield Finding("error", "address", where, "no interface of this machine has this address", cure)
            elif error.errno == errno.EACCES:
                cure = "use a port of 1024 or more"
                yield Finding("error", "address", where, "ports below 1024 are for root", cure)
            else:
                yield Finding("error", "address", where, error.strerror or str(error), "use another address")


def check_sockets(config: ServerConfig) -> Iterator[Finding]:
    """Yield a finding for each socket that the daemon could not make, or that another daemon has. To be called while
    the daemon does not run."""
    for setting in ("socket", "control_socket"):
        path = Path(os.path.abspath(getattr(config, setting)))
        if not getattr(config, setting):
            continue
        where = f"{setting} = {path}"
        directory, user = path.parent, os.geteuid()
        if directory_mode(str(directory), user) is None and not directory.is_dir():
            cure = f"make the directory {directory}, or remove the setting"
            yield Finding("error", "socket-directory", where, f"there is no directory {directory}", cure)
            continue
        shared = is_shared(config.socket)
        if setting == "control_socket" and shared and directory == Path(os.path.abspath(config.socket)).parent:
            continue  # the daemon takes another place for it
        if directory.exists():
            try:
                place = str(directory) if setting == ENGINES else ""
                check_place(str(directory), frozenset({0, user}), os.lstat, os.readlink, place)
            except ListenerUntrusted as error:
                cure = (
                    f"run `chmod go-w` and `chown` on that directory, or set '{setting}' to a path that no other user "
                    "can change"
                )
                yield Finding("error", "socket-directory", where, str(error), cure)
                continue
            if not os.access(directory, os.W_OK | os.X_OK):
                cure = f"run `chown {user} {directory}` as root, or run the daemon as the directory's owner"
                problem = f"uid {user} cannot write the directory {directory}"
                yield Finding("error", "socket-directory", where, problem, cure)
                continue
        if setting == ENGINES and shared:
            problem = "other users can write its directory and take the socket away; engines check who listens"
            cure = f"give the directory to one user (`chmod go-w {directory}`), unless all its users are of one pod"
            yield Finding("warning", "socket-shared", where, problem, cure)
        yield from _left(path, where, user)


def _left(path: Path, where: str, user: int) -> Iterator[Finding]:
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        yield Finding("error", "socket-file", where, "a file that is no socket lies there", f"remove {path}")
    elif found.st_uid != user:
        problem = f"the socket of another user, uid {found.st_uid}, lies there"
        cure = f"run the daemon as that user, remove {path} as that user or root, or choose another path"
        yield Finding("error", "socket-owner", where, problem, cure)
    elif listens(str(path)):
        problem = "another daemon listens there"
        yield Finding("error", "socket-in-use", where, problem, "give each daemon of a machine its own 'node'")
    else:
        problem = "a daemon that ended by force left its socket there: engines find no daemon"
        yield Finding("warning", "socket-stale", where, problem, "start the daemon; it replaces the socket")


def check_directories(config: ServerConfig) -> Iterator[Finding]:
    """Yield findings about the directories of the statistics and of the disk tier."""
    if config.state_directory:
        directory, where = Path(config.state_directory), f"state_directory = {config.state_directory}"
        if not directory.is_dir():
            cure = f"run `install -d -o USER {directory}` with the daemon's user (StateDirectory= in the unit does it)"
            yield Finding("error", "state-directory", where, "there is no such directory", cure)
        elif reason := _unwritable(directory):
            cure = f"run `chown` on {directory}: the daemon's user must be able to write there"
            yield Finding("error", "state-directory", where, f"no file can be made there ({reason})", cure)
    for disk in config.disk:
        yield from _disk(disk)


def _disk(disk: Disk) -> Iterator[Finding]:
    directory, where = Path(disk.path), f"disk = {disk}"
    if not directory.is_dir():
        cure = f"mount the device, and `install -d -m 700 -o USER {directory}` with the daemon's user"
        yield Finding("error", "disk", where, "there is no such directory", cure)
    elif reason := _unwritable(directory):
        cure = f"run `chown` on {directory}: the daemon's user must be able to write there"
        yield Finding("error", "disk", where, f"no file can be made there ({reason})", cure)
    elif disk.nbytes is not None:
        status = os.statvfs(directory)
        used = sum(each.stat().st_blocks * 512 for each in directory.glob("slab-*"))
        room = used + status.f_bavail * status.f_frsize - RESERVE_BYTES
        if room < disk.nbytes:
            problem = f"the tier will take {max(0, room) >> 20} MiB, because no more is free there"
            yield Finding("warning", "disk-size", where, problem, "give a lower size, or use a larger device")


def _unwritable(directory: Path) -> str:
    """Why no file can be made in a directory; empty if one can. Modes do not tell: root may write anywhere, but not to
    a file system that is read-only."""
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".tokenlake-doctor-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)
