"""The keeper (`tokenlake_server.keeper`) as the store of a daemon's memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time

from tokenlake_server import keeper
from tokenlake_server.kept.descriptor_store import RECONNECT_S, DescriptorStore

log = logging.getLogger(__name__)

BUSY_S = 10.0
"""Seconds for which a daemon waits while the keeper still serves the daemon before, which ends."""
RETRY_S = 0.02


class KeeperUnusable(Exception):
    """The keeper at the path cannot be used; the text says why."""


class KeeperProcess(DescriptorStore):
    """A keeper that listens beside the daemon's socket. One that ends while the daemon runs is replaced, and gets all
    descriptors again."""

    name = "the keeper"

    def __init__(self, path: str, keep_s: float) -> None:
        """Connect to the keeper, or start one, and take what it holds. Raises `KeeperUnusable`."""
        self._path = path
        self._keep_s = keep_s
        self._replacing: asyncio.Task[None] | None = None
        self.pid = 0
        """The process that this one started; 0 where a keeper was there."""
        try:
            sock = self._connect()
            taken = _take(sock)
        except OSError as error:
            raise KeeperUnusable(f"{path}: {error}") from error
        super().__init__(sock, taken)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        super().start(loop)
        assert self._sock is not None
        loop.add_reader(self._sock, self._ended)

    def _connect(self) -> socket.socket:
        """A connection to a keeper that serves this daemon. Raises OSError and `KeeperUnusable`."""
        until = time.monotonic() + BUSY_S
        while True:
            sock = keeper.connect(self._path) or self._start()
            try:
                word, version, _ = keeper.receive(sock)
                if word == b"keeper" and version == keeper.VERSION:
                    sock.send(keeper.packet(b"keep", str(self._keep_s).encode()))
                    return sock
                if word == b"keeper":
                    raise KeeperUnusable(f"{self._path}: the keeper has version {version.decode()}, not 1")
                if time.monotonic() > until:
                    raise KeeperUnusable(f"{self._path}: the keeper serves another daemon")
            except ConnectionError:
                # It ended when this daemon connected: the next attempt starts another one.
                if time.monotonic() > until:
                    raise
            except BaseException:
                sock.close()
                raise
            sock.close()
            time.sleep(RETRY_S)

    def _start(self) -> socket.socket:
        """Start a keeper, and connect to it: it listens from the start."""
        with keeper.listen(self._path) as listening:
            listening.set_inheritable(True)
            number = listening.fileno()
            # Without site-packages and the environment: the keeper needs the standard library alone. Nothing of the
            # daemon's terminal or pipes, which would be open for as long as the keeper runs.
            command = [sys.executable, "-I", "-S", keeper.__file__, self._path, "--listening", str(number)]
            null = [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in range(3)]
            # Not `subprocess`, whose objects expect that the process ends before this one.
            self.pid = os.posix_spawn(sys.executable, command, {}, file_actions=null, setsid=True)
        sock = keeper.connect(self._path)
        if sock is None:
            raise KeeperUnusable(f"{self._path}: the keeper cannot be reached")
        return sock

    def _hold_message(self, name: str) -> bytes:
        return keeper.packet(b"hold", name.encode())

    def _drop_message(self, name: str) -> bytes:
        return keeper.packet(b"drop", name.encode())

    def _ended(self) -> None:
        self._failed(ConnectionResetError("it has ended"))

    def _failed(self, error: OSError) -> None:
        super()._failed(error)
        if self._loop is not None:
            self._replacing = self._loop.create_task(self._replace())

    def close(self) -> None:
        self._stop_replacing()
        super().close()

    def leave(self) -> None:
        self._stop_replacing()
        super().leave()

    def _stop_replacing(self) -> None:
        if self._replacing is not None:
            self._replacing.cancel()

    async def _replace(self) -> None:
        """Start another keeper, and give it everything."""
        sock: socket.socket | None = None
        while sock is None:
            await asyncio.sleep(RECONNECT_S)
            if self.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self.pid, os.WNOHANG)
            try:
                sock = await asyncio.to_thread(self._connect_empty)
            except (OSError, KeeperUnusable) as problem:
                log.debug("no keeper: %s", problem)
        assert self._loop is not None
        sock.setblocking(False)
        self._sock = sock
        self._loop.add_reader(sock, self._ended)
        self._waiting.clear()
        self._waiting.extend(
            (self._hold_message(name), number) for name, number in self._held.items() if number is not None
        )
        log.warning("another keeper holds the memory of this daemon now")
        self._flush()

    def _connect_empty(self) -> socket.socket:
        """A connection to a keeper that is to get everything; what it holds already is let go. In a thread."""
        sock = self._connect()
        try:
            sock.send(keeper.packet(b"end"))
        except OSError:
            sock.close()
            raise
        return sock


def end_keeper(path: str) -> None:
    """Let a keeper that listens at `path`, if there is one, drop what it holds: this daemon keeps no memory."""
    with contextlib.suppress(OSError):
        sock = keeper.connect(path)
        if sock is not None:
            with sock:
                if keeper.receive(sock)[0] == b"keeper":
                    sock.send(keeper.packet(b"end"))


def held_bytes(path: str) -> int:
    """Bytes of the memory that a keeper at `path` has while no daemon runs; 0 without one."""
    total = 0
    with contextlib.suppress(OSError):
        sock = keeper.connect(path)
        if sock is not None:
            with sock:
                if keeper.receive(sock)[0] == b"keeper":
                    for number in _take(sock).values():
                        total += os.fstat(number).st_blocks * 512
                        os.close(number)
    return total


def _take(sock: socket.socket) -> dict[str, int]:
    """The descriptors that the keeper holds, by name; the caller owns them. Raises OSError."""
    taken: dict[str, int] = {}
    try:
        sock.send(keeper.packet(b"take"))
        while True:
            word, name, descriptor = keeper.receive(sock)
            if word == b"all":
                return taken
            if word != b"held" or descriptor is None:
                raise ConnectionResetError("it ended, or sent something else than descriptors")
            taken[name.decode()] = descriptor
    except BaseException:
        for number in taken.values():
            os.close(number)
        raise
