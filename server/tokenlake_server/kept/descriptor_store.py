"""Stores of descriptors: what keeps the memory of a daemon while no daemon runs.

A store has descriptors by name. The daemon takes them at its start, and hands over each one that it makes. Nothing of
this waits once the daemon runs: messages that the store has not read yet are kept, and sent when it reads. Until then
`complete` is False, and the ledger says so (`tokenlake_server.kept.ledger`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

RECONNECT_S = 1.0
"""Seconds between two attempts to reach a store whose connection broke."""


class DescriptorStore(ABC):
    """Holds descriptors by name for this daemon and the next one. `taken` is read before the loop runs, the other
    methods are called on the loop."""

    name: str
    """The store, in words."""

    def __init__(self, sock: socket.socket | None, taken: dict[str, int]) -> None:
        """`sock`: connected to the store. `taken`: the descriptors that it held for the daemon before, which the
        caller owns; the store has them still."""
        self.taken = taken
        self.on_complete: Callable[[bool], None] = lambda complete: None
        """Called whenever `complete` changes."""
        self._sock = sock
        self._held: dict[str, int | None] = dict.fromkeys(taken)
        """The descriptors that the store has, or will have; those of `taken` by name alone."""
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._complete = True
        if sock is not None:
            sock.setblocking(False)

    @property
    def complete(self) -> bool:
        """True while the store has every descriptor that it was given."""
        return self._complete

    @property
    def room(self) -> int:
        """The number of further descriptors that the store takes."""
        return 1 << 20

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop runs from now on."""
        self._loop = loop
        self._flush()

    def hold(self, name: str, descriptor: int) -> None:
        """Hand over a descriptor; the caller continues to own it, and keeps it open until `drop`, or until the end of
        this daemon."""
        self._held[name] = descriptor
        self._waiting.append((self._hold_message(name), descriptor))
        self._flush()

    def has(self, name: str, descriptor: int) -> None:
        """This process has one of the descriptors of `taken` under this number, until `drop` or the end."""
        self._held[name] = descriptor

    def drop(self, name: str) -> None:
        """The store closes the descriptor. To be called before this process closes it."""
        if name not in self._held:
            return
        del self._held[name]
        # One that was not handed over yet must not be: by then its number may be that of another file.
        waits = self._hold_message(name)
        self._waiting = deque(each for each in self._waiting if each[0] != waits)
        self._waiting.append((self._drop_message(name), None))
        self._flush()

    def drop_all(self) -> None:
        """The store closes all descriptors."""
        for name in list(self._held):
            self.drop(name)

    def close(self) -> None:
        """The daemon ends: what the store has stays there."""
        self._disconnect()
        self._loop = None

    def leave(self) -> None:
        """The daemon ends: what the store has stays there. The connection ends with the process, and the next daemon
        waits for that: until then a thread that hangs, for example in a read of a disk, may write into the memory."""
        if self._sock is not None:
            if self._loop is not None:
                self._loop.remove_writer(self._sock)
                self._loop.remove_reader(self._sock)
            self._sock.detach()
            self._sock = None
        self._loop = None

    # -- for the subclasses

    @abstractmethod
    def _hold_message(self, name: str) -> bytes: ...

    @abstractmethod
    def _drop_message(self, name: str) -> bytes: ...

    def _failed(self, error: OSError) -> None:
        """The connection broke."""
        log.error("%s does not answer any more (%s): memory does not outlive this daemon", self.name, error)
        self._disconnect()
        self._waiting.clear()
        self._set_complete(False)

    def _disconnect(self) -> None:
        if self._sock is not None:
            if self._loop is not None:
                self._loop.remove_writer(self._sock)
                self._loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None

    def _set_complete(self, complete: bool) -> None:
        if complete != self._complete:
            self._complete = complete
            self.on_complete(complete)

    def _flush(self) -> None:
        """Send what waits, as far as the store reads."""
        if self._sock is None:
            return
        try:
            while self._waiting:
                message, descriptor = self._waiting[0]
                if descriptor is None:
                    self._sock.send(message)
                else:
                    socket.send_fds(self._sock, [message], [descriptor])
                self._waiting.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(error)
            return
        self._set_complete(not self._waiting)
        if self._loop is not None:
            if self._waiting:
                self._loop.add_writer(self._sock, self._flush)
            else:
                self._loop.remove_writer(self._sock)
