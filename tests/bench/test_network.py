"""The network of namespaces that tests of partitions use."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from tokenlake_testing.network import NAMESPACES, Network, missing

pytestmark = [pytest.mark.live, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

SHORT_S = 0.3


@pytest.fixture(params=[4, 6])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with Network(["a", "b", "c"], request.param) as network:
        yield network


def reaches(network: Network, source: str, target: str) -> bool:
    """Whether a TCP connection can be made from `source` to `target`."""
    family = socket.AF_INET6 if ":" in network.address(target) else socket.AF_INET

    def listen() -> socket.socket:
        return socket.create_server((network.address(target), 7440), family=family)

    def dial() -> bool:
        with socket.socket(family) as sock:
            sock.settimeout(SHORT_S)
            try:
                sock.connect((network.address(target), 7440))
            except TimeoutError:
                return False
            return True

    with network.inside(target, listen):
        return network.inside(source, dial)


def test_packets_are_dropped_without_an_answer(network: Network) -> None:
    assert reaches(network, "a", "b")
    network.drop("a", "b")
    assert not reaches(network, "a", "b")
    assert not reaches(network, "b", "a"), "the answer is dropped"
    assert reaches(network, "a", "c")
    network.forward("a", "b")
    assert reaches(network, "a", "b")


def test_an_address_is_lost_and_given_back(network: Network) -> None:
    network.lose_address("b")
    with pytest.raises(OSError, match="assign|unreachable"):
        reaches(network, "a", "b")
    network.give_address("b")
    assert reaches(network, "a", "b")


def test_a_limit_slows_a_transfer(network: Network) -> None:
    """At 1 Mbit/s, 128 KiB at once and 12 KiB in 0.1 s arrive; more than that is sent."""
    network.limit("b", "1mbit")
    assert reaches(network, "a", "b")

    def listen() -> socket.socket:
        family = socket.AF_INET6 if ":" in network.address("b") else socket.AF_INET
        return socket.create_server((network.address("b"), 7441), family=family)

    with network.inside("b", listen) as server:
        sender = network.inside("a", lambda: socket.create_connection((network.address("b"), 7441)))
        receiver, _ = server.accept()
        with sender, receiver:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            sender.setblocking(False)
            sent = sender.send(bytes(1 << 20))
            assert sent > 256 << 10
            received, until = 0, time.monotonic() + SHORT_S
            receiver.settimeout(SHORT_S)
            with contextlib.suppress(TimeoutError):
                while time.monotonic() < until:
                    received += len(receiver.recv(4096))
            assert received < sent
            network.unlimit("b")
            receiver.settimeout(30)
            while received < sent:
                received += len(receiver.recv(1 << 20))


def test_the_namespaces_of_a_dead_process_are_removed() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = f"tokenlake-{dead.pid}-1"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with Network(["a"]):
        assert not (NAMESPACES / left).exists()
        assert (NAMESPACES / f"tokenlake-{os.getpid()}-1").exists()
    assert not (NAMESPACES / f"tokenlake-{os.getpid()}-1").exists()
