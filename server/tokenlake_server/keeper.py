"""A small process that keeps the memory of a daemon: it holds descriptors while the daemon runs and for a time after
its end, and gives them to the next daemon.

::

    python -m tokenlake_server.keeper /run/tokenlake/tokenlake-NODE.keeper

A daemon with the setting `keep_s` starts one by itself, which ends with the memory. Imports the standard library alone:
it takes a few MiB.

The daemon connects to a Unix socket of sequenced packets, each a word, a zero byte and an argument. The keeper begins
with `keeper VERSION`, or `busy` while another daemon is connected::

    daemon: take            -> keeper: held NAME + descriptor, for each one; then `all`
    daemon: hold NAME + descriptor         daemon: drop NAME        daemon: keep SECONDS
    daemon: end             -> the keeper drops everything

Both sides check that the other one is a process of their own user.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import resource
import select
import socket
import struct
import sys
import time

VERSION = b"1"
MAX_PACKET = 512
"""Limit of the bytes of a packet."""
SEND_S = 10.0
"""Seconds in which a daemon must read what it asked for."""
LOOK_S = 1.0
"""Seconds between two looks at the clock and at the path of the socket while no daemon is connected."""
FIRST_S = 30.0
"""Seconds within which the daemon that started this keeper connects."""
_CREDENTIALS = struct.Struct("3i")


def packet(word: bytes, argument: bytes = b"") -> bytes:
    """One message: a word and its argument."""
    return word + b"\0" + argument


def receive(sock: socket.socket) -> tuple[bytes, bytes, int | None]:
    """The word and the argument of the next message, and the descriptor beside it, which the caller owns. An empty
    word: the other side has closed the connection. Raises OSError."""
    # Not `socket.recv_fds`, which leaves the flag out.
    data, ancillary, _, _ = sock.recvmsg(MAX_PACKET, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    for surplus in descriptors[1:]:
        os.close(surplus)
    word, _, argument = data.partition(b"\0")
    return word, argument, descriptors[0] if descriptors else None


def is_of_this_user(sock: socket.socket) -> bool:
    """True if the process at the other end of a connection runs as the user of this process."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


class Keeper:
    """Holds descriptors by name, for one daemon at a time."""

    def __init__(self, listening: socket.socket, *, stays: bool) -> None:
        """`stays`: wait for a next daemon also when nothing is held any more."""
        self._listening = listening
        self._stays = stays
        self._path = listening.getsockname()
        self._file = self._identity()
        self._held: dict[str, int] = {}
        self._daemon: socket.socket | None = None
        self._keep_s = 0.0
        self._until = time.monotonic() + FIRST_S

    def run(self) -> None:
        """Serve until nothing is left to be kept."""
        while self._daemon is not None or not self._ends():
            # poll and not select, which takes no descriptor beyond 1023.
            poller = select.poll()
            poller.register(self._listening, select.POLLIN)
            if self._daemon is not None:
                poller.register(self._daemon, select.POLLIN)
            ready = [number for number, _ in poller.poll(1e3 * LOOK_S if self._daemon is None else None)]
            if self._daemon is not None and self._daemon.fileno() in ready:
                # First, so that the end of a daemon is noticed before the next one connects.
                self._serve()
            elif ready:
                self._accept()
        if self._identity() == self._file:
            os.unlink(self._path)

    def _ends(self) -> bool:
        """Look, while no daemon is connected, whether the time is over, or no daemon can connect any more."""
        if time.monotonic() >= self._until:
            self._drop_all()
        return self._identity() != self._file or not (self._stays or self._held or time.monotonic() < self._until)

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        sock.settimeout(SEND_S)
        with contextlib.suppress(OSError):
            if is_of_this_user(sock) and self._daemon is None:
                sock.send(packet(b"keeper", VERSION))
                self._daemon = sock
                return
            sock.send(packet(b"busy"))
        sock.close()

    def _serve(self) -> None:
        assert self._daemon is not None
        try:
            word, argument, descriptor = receive(self._daemon)
            name = argument.decode(errors="replace")
            if word == b"hold" and descriptor is not None:
                self._drop(name)
                self._held[name] = descriptor
                return
            if descriptor is not None:
                os.close(descriptor)
            if word == b"drop":
                self._drop(name)
            elif word == b"keep":
                self._keep_s = float(name)
            elif word == b"take":
                for held, number in self._held.items():
                    socket.send_fds(self._daemon, [packet(b"held", held.encode())], [number])
                self._daemon.send(packet(b"all"))
            elif word == b"end":
                self._drop_all()
            elif not word:
                self._left()
        except (OSError, ValueError):
            self._left()

    def _left(self) -> None:
        assert self._daemon is not None
        self._daemon.close()
        self._daemon = None
        self._until = time.monotonic() + (self._keep_s if self._held else 0.0)

    def _drop(self, name: str) -> None:
        descriptor = self._held.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def _drop_all(self) -> None:
        for name in list(self._held):
            self._drop(name)


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, for processes of this user alone. One that a dead keeper left is replaced; the
    caller knows that no keeper listens there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    previous = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(4)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(previous)
    return sock


def connect(path: str) -> socket.socket | None:
    """A connection to the keeper that listens at `path`; None if none does. Raises OSError, also where it is a process
    of another user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(SEND_S)
    try:
        sock.connect(path)
        if not is_of_this_user(sock):
            raise PermissionError(f"a process of another user listens at {path}")
        return sock
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError:
        sock.close()
        raise


def main() -> None:
    """Keep what a daemon hands over."""
    words = argparse.ArgumentParser(prog="python -m tokenlake_server.keeper", description="Keeps a daemon's memory.")
    words.add_argument("path", help="the daemon's local socket, with .keeper in place of .sock")
    words.add_argument("--listening", type=int, help=argparse.SUPPRESS)
    arguments = words.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.listening is not None:
        Keeper(socket.socket(fileno=arguments.listening), stays=False).run()
        return
    try:
        running = connect(arguments.path)
        if running is not None:
            running.close()
            sys.exit(f"a keeper listens at {arguments.path} already")
        Keeper(listen(arguments.path), stays=True).run()
    except OSError as error:
        sys.exit(f"no keeper can listen at {arguments.path}: {error.strerror}")


if __name__ == "__main__":
    main()
