"""A stand-in for systemd's descriptor store, which speaks its protocol: it reads `FDSTORE=1` with descriptors from the
datagrams of a service, and starts the service with them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tokenlake_server.kept.service_store import FIRST_DESCRIPTOR

MOST = 1024
SERVICE = "tests.robustness.descriptor_store"
"""The module that runs as the daemon: it takes the descriptors from the stand-in, and becomes the daemon."""
ASKED = "TEST_DESCRIPTOR_STORE"


class StandIn:
    """Reads in a thread, until `close`."""

    def __init__(self, directory: Path, most: int = MOST) -> None:
        """`most`: FileDescriptorStoreMax."""
        self.most = most
        self.held: list[tuple[str, int]] = []
        self.refused = 0
        self.lines: list[str] = []
        """All assignments that were sent."""
        self._lock = threading.Lock()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(directory / "notify"))
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.bind(str(directory / "store"))
        self._asked.listen()
        self._end, self._ended = socket.socketpair()
        self.environment = {
            "NOTIFY_SOCKET": str(directory / "notify"),
            "FDSTORE": str(most),
            ASKED: str(directory / "store"),
        }
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """The names of the descriptors that the store has."""
        self.read()
        with self._lock:
            return [name for name, _ in self.held]

    def read(self) -> None:
        """Wait until what was sent has been read."""
        poller = select.poll()
        poller.register(self._notify, select.POLLIN)
        while poller.poll(0):
            pass

    def _run(self) -> None:
        while True:
            poller = select.poll()
            for sock in (self._notify, self._asked, self._ended):
                poller.register(sock, select.POLLIN)
            ready = [number for number, _ in poller.poll()]
            with self._lock:
                if self._notify.fileno() in ready:
                    self._notified()
                elif self._asked.fileno() in ready:
                    self._give()
                else:
                    return

    def _notified(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._notify, 4096, 16, socket.MSG_CMSG_CLOEXEC)
        lines = data.decode().split("\n")
        self.lines += lines
        name = next((line.removeprefix("FDNAME=") for line in lines if line.startswith("FDNAME=")), "stored")
        if "FDSTORE=1" in lines:
            for number in descriptors:
                if len(self.held) < self.most:
                    self.held.append((name, number))
                else:
                    self.refused += 1
                    os.close(number)
        elif "FDSTOREREMOVE=1" in lines:
            for held in [each for each in self.held if each[0] == name]:
                self.held.remove(held)
                os.close(held[1])

    def _give(self) -> None:
        sock, _ = self._asked.accept()
        with sock:
            for name, number in self.held:
                socket.send_fds(sock, [name.encode()], [number])
            sock.send(b"\n")

    def drop(self) -> None:
        """As after `systemctl stop`: the store is emptied."""
        with self._lock:
            while self.held:
                os.close(self.held.pop()[1])

    def close(self) -> None:
        """End the thread, and close everything."""
        self._end.close()
        self._thread.join()
        self.drop()
        for sock in (self._notify, self._asked, self._ended):
            sock.close()


@contextlib.contextmanager
def descriptor_store(directory: Path, most: int = MOST) -> Iterator[StandIn]:
    """A stand-in; the daemons that are started within, with the module `SERVICE`, are its service."""
    store = StandIn(directory, most)
    before = dict(os.environ)
    os.environ.update(store.environment)
    try:
        yield store
    finally:
        os.environ.clear()
        os.environ.update(before)
        store.close()


def main() -> None:
    """Become the daemon, as systemd starts it: with the descriptors of the store from number 3 on."""
    names, numbers = list[str](), list[int]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(os.environ.pop(ASKED))
        while True:
            data, descriptors, _, _ = socket.recv_fds(sock, 512, 1)
            if not descriptors:
                break
            names.append(data.decode())
            numbers.append(descriptors[0])
    # Away from the numbers that they get.
    high = [os.dup2(number, 1000 + at) for at, number in enumerate(numbers)]
    for at, number in enumerate(high):
        os.dup2(number, FIRST_DESCRIPTOR + at)
        os.close(number)
    os.closerange(FIRST_DESCRIPTOR + len(high), 1000)
    if names:
        os.environ |= {
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(names)),
            "LISTEN_FDNAMES": ":".join(names),
        }
    os.execv(sys.executable, [sys.executable, "-m", "tokenlake_server", *sys.argv[1:]])


if __name__ == "__main__":
    main()
