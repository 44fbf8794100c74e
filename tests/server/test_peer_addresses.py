"""Addresses of other nodes: literal ones, names that resolve anew, paths that take turns, their measurement."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from tokenlake.config import Address
from tokenlake_server.bulk.blocking_sockets import no_keys
from tokenlake_server.bulk.paths import PAUSE_S, BulkPaths
from tokenlake_server.peers import measurement as peer_measurement
from tokenlake_server.peers.addresses import Endpoint, PeerAddresses
from tokenlake_server.peers.handshake import PeerIdentity
from tokenlake_server.peers.measurement import PeerMeasurement

LIMIT_S = 2.0


async def resolve(addresses: PeerAddresses, node: str, answers: Sequence[str] | None = None) -> Endpoint:
    """Resolve once, with a resolver that gives `answers` (IPv4) or fails."""

    def getaddrinfo(host: str, port: int, **_: object) -> list[Any]:
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, port)) for answer in answers]

    with patch.object(socket, "getaddrinfo", getaddrinfo):
        return await addresses.resolve(node)


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("10.0.0.7", Endpoint(socket.AF_INET, ("10.0.0.7", 7440))),
        ("localhost", Endpoint(socket.AF_INET, ("127.0.0.1", 7440))),
        ("fd00::7", Endpoint(socket.AF_INET6, ("fd00::7", 7440, 0, 0))),
        ("fe80::1%lo", Endpoint(socket.AF_INET6, ("fe80::1", 7440, 0, socket.if_nametoindex("lo")))),
    ],
)
async def test_a_literal_address_needs_no_resolver(host: str, endpoint: Endpoint) -> None:
    addresses = PeerAddresses({"b": Address(host, 7440)})
    assert addresses.last("b") == endpoint
    assert await resolve(addresses, "b") == endpoint == addresses.last("b")


async def test_a_host_name_is_resolved_in_every_attempt() -> None:
    addresses = PeerAddresses({"b": Address("b.pool", 7440)})
    with pytest.raises(OSError, match=r"node 'b' \(b.pool:7440\) is not known yet"):
        addresses.last("b")
    with pytest.raises(OSError, match="not known"):
        await resolve(addresses, "b")
    assert (await resolve(addresses, "b", ["10.0.0.1"])).address == ("10.0.0.1", 7440)
    assert addresses.last("b").address == ("10.0.0.1", 7440)
    assert (await resolve(addresses, "b", ["10.0.0.2"])).address == ("10.0.0.2", 7440)
    assert addresses.last("b").address == ("10.0.0.2", 7440)


async def test_attempts_take_turns_over_the_addresses_of_a_name() -> None:
    addresses = PeerAddresses({"b": Address("b.pool", 7440)})
    dialled = [(await resolve(addresses, "b", ["10.0.0.1", "10.0.0.2"])).address[0] for _ in range(4)]
    assert dialled == ["10.0.0.1", "10.0.0.2"] * 2


async def test_an_address_that_takes_no_connection() -> None:
    """An address that takes no connection makes way for the next."""
    addresses = PeerAddresses({"b": Address("b.pool", 7440), "c": Address("10.0.0.3", 7440)})
    await resolve(addresses, "b", ["10.0.0.1", "10.0.0.2"])
    for expected in ("10.0.0.1", "10.0.0.2", "10.0.0.1"):
        endpoint = addresses.last("b")
        assert endpoint.address[0] == expected
        addresses.failed("b", endpoint)
        addresses.failed("b", endpoint)  # another thread saw the same
    addresses.failed("c", addresses.last("c"))
    assert addresses.last("c").address[0] == "10.0.0.3"


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_a_name_that_is_no_host_name(host: str) -> None:
    """The pattern of addresses accepts it, and etcd may name it."""
    addresses = PeerAddresses({"b": Address(host, 7440)})
    with pytest.raises(OSError, match="is no host name"):
        await addresses.resolve("b")


async def test_no_work_waits_for_a_silent_resolver() -> None:
    """Other work does not wait for a resolver that does not answer."""
    names = "bcdef"
    addresses = PeerAddresses({name: Address(f"{name}.pool", 7440) for name in names})
    answered = threading.Event()
    asked: list[str] = []
    late: list[str] = []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        if not answered.wait(LIMIT_S):
            late.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    with patch.object(socket, "getaddrinfo", getaddrinfo):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        waiting = [asyncio.ensure_future(addresses.resolve(name)) for name in names]
        while not asked:
            await asyncio.sleep(0)
        await asyncio.to_thread(list)
        assert not late
        answered.set()
        await asyncio.wait(waiting)


async def test_nodes_come_move_and_leave() -> None:
    addresses = PeerAddresses({"b": Address("b.pool", 1), "c": Address("10.0.0.3", 1)})
    await resolve(addresses, "b", ["10.0.0.1"])
    addresses.change({"b": Address("b.pool", 2), "d": Address("10.0.0.4", 1)})
    assert addresses.names == ("b", "d")
    assert len(addresses) == 2
    assert "c" not in addresses
    with pytest.raises(OSError, match="not known yet"):
        addresses.last("b")
    with pytest.raises(OSError, match="node 'c'"):
        addresses.last("c")
    with pytest.raises(OSError, match="node 'c'"):
        await resolve(addresses, "c")


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7", "b.pool"])
async def test_plain_connections_stay_on_loopback_whatever_etcd_names(host: str) -> None:
    addresses = PeerAddresses({"b": Address(host, 7440)}, loopback_only=True)
    for _ in range(2):
        with pytest.raises(OSError, match="beyond loopback, and this node has no 'certificate'"):
            await resolve(addresses, "b", ["10.0.0.7"])
        with pytest.raises(OSError, match="beyond loopback"):
            addresses.last("b")
    found = await resolve(PeerAddresses({"b": Address("::1", 1)}, loopback_only=True), "b")
    assert found.address[0] == "::1"


async def test_the_nodes_at_an_address() -> None:
    addresses = PeerAddresses({"a": Address("10.0.0.1", 7440), "b": Address("node-b", 7440), "c": None})
    assert addresses.at("10.0.0.2") == []
    await resolve(addresses, "b", ["10.0.0.2", "10.0.0.1"])
    assert addresses.at("10.0.0.2") == ["b"]
    assert addresses.at("::ffff:10.0.0.1") == ["a", "b"]


def test_paths_take_turns_and_one_that_failed_comes_last() -> None:
    now = 0.0
    addresses = PeerAddresses({"b": Address("10.0.0.1", 1)})
    addresses.tell("b", ["10.0.1.1:2", "[fd00::1]:3", "10.0.0.1:1"])
    paths = BulkPaths(addresses, lambda: now)
    main, second, third = paths.order("b", 0)
    assert [each.address[:2] for each in (main, second, third)] == [("10.0.0.1", 1), ("10.0.1.1", 2), ("fd00::1", 3)]
    assert paths.order("b", 1) == [second, third, main]
    assert paths.order("b", 5) == [third, main, second]
    paths.failed("b", second)
    assert paths.order("b", 1) == [third, main, second]
    paths.failed("b", third)
    assert paths.order("b", 2) == [main, third, second]
    paths.failed("b", main)
    assert paths.order("b", 2) == [third, main, second]
    now = PAUSE_S
    assert paths.order("b", 1) == [second, third, main]


def test_addresses_that_may_not_be_used() -> None:
    addresses = PeerAddresses({"b": Address("127.0.0.1", 1)}, loopback_only=True)
    with pytest.raises(ValueError, match=r"10.0.0.1:2 \(.*beyond loopback.*nonsense"):
        addresses.tell("b", ["10.0.0.1:2", "nonsense", "127.0.0.2:3"])
    assert [each.address for each in addresses.bulk("b")] == [("127.0.0.1", 1), ("127.0.0.2", 3)]
    # The node was started elsewhere: what it told no longer holds.
    addresses.change({"b": Address("127.0.0.1", 9)})
    assert [each.address for each in addresses.bulk("b")] == [("127.0.0.1", 9)]


def measured(port: int) -> str:
    """The problem of the path to a node at this port."""
    addresses = PeerAddresses({"b": Address("127.0.0.1", port)})
    with contextlib.closing(addresses):
        [path] = PeerMeasurement(PeerIdentity("a", 1, (), "c"), addresses, no_keys).measure("b")
    return path.problem


def test_each_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that takes no connection, and one that takes it and answers nothing."""
    monkeypatch.setattr(peer_measurement, "DIAL_S", 0.125)
    monkeypatch.setattr(peer_measurement, "STALL_S", 0.25)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert measured(silent.getsockname()[1]) == "no answer within 0.25 s"
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        # The kernel drops further handshakes.
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        assert measured(full.getsockname()[1]) == "no answer within 0.125 s"
