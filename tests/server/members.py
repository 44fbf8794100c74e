"""Memberships as daemons have them, whose handshakes with one another succeed, and etcd's keys below them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, TypeVar

from tokenlake.config import Address, ServerConfig, load_config, parse_address
from tokenlake.directory.ring_record import RingRecord
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.membership import Members, Membership, open_membership
from tokenlake_server.membership.etcd_client import Access, Etcd, Put, on_any
from tokenlake_server.membership.stored import decode_ring, ring_key
from tokenlake_testing.etcd import EtcdServers
from tokenlake_testing.ports import reserve_port

T = TypeVar("T")
LIMIT_S = 30.0
CLUSTER = "test"


def config_of(name: str, **settings: object) -> ServerConfig:
    flags = {"node": name, "memory": "64MiB", "cluster": CLUSTER, **settings}
    return load_config(toml_text=None, environ={}, flags=flags, uid=1000).config


class Node:
    """A membership as a daemon has it, and the members that it reported. Its handshakes with other such nodes
    succeed."""

    running: ClassVar[list[Node]] = []

    def __init__(self, membership: Membership, address: Address, incarnation: int) -> None:
        self.membership = membership
        self.address = address
        self.incarnation = incarnation
        self.reported: list[Members] = []
        self.trusts = True
        membership.start(address, self.reported.append)

    async def shake_hands(self) -> None:
        while True:
            for name, address in self.membership.members.unproven.items():
                for other in self.running:
                    if self.trusts and other.trusts and other.address == address:
                        self.membership.proven(name, other.incarnation)
            await asyncio.sleep(0.01)

    @property
    def record(self) -> RingRecord:
        return self.membership.members.record

    @property
    def names(self) -> list[str]:
        return sorted(self.record.members)


@asynccontextmanager
async def node(name: str, endpoints: str, port: int | None = None, **settings: Any) -> AsyncIterator[Node]:
    address = Address("127.0.0.1", port or reserve_port())
    config = config_of(name, etcd=endpoints, **settings)
    thread = AdminThread()
    incarnation = time.time_ns()
    opened = open_membership(config, incarnation, asyncio.get_running_loop(), thread)
    made = Node(opened, address, incarnation)
    Node.running.append(made)
    hands = asyncio.create_task(made.shake_hands())
    try:
        yield made
    finally:
        Node.running.remove(made)
        hands.cancel()
        await opened.close()
        await asyncio.to_thread(thread.close)


@asynccontextmanager
async def nodes(names: str, endpoints: str, **settings: Any) -> AsyncIterator[list[Node]]:
    """A node for each letter, once all of them know the addresses of the others."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(node(name, endpoints, **settings)) for name in names]
        await until(lambda: all(each.names == sorted(names) for each in made))
        await until(lambda: all(len(each.membership.members.addresses) == len(names) - 1 for each in made))
        yield made


async def until(reached: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait for a state."""
    began = time.monotonic()
    while not reached():
        assert time.monotonic() < began + limit_s, "not reached"
        await asyncio.sleep(0.01)


def access(servers: EtcdServers) -> Access:
    return Access(tuple(map(parse_address, servers.endpoints.split(","))))


async def ask(servers: EtcdServers, work: Callable[[Etcd], Awaitable[T]]) -> T:
    return await on_any(access(servers), work, LIMIT_S)


async def clear(servers: EtcdServers) -> None:
    async def delete(etcd: Etcd) -> None:
        for each in await etcd.read(b"/"):
            await etcd.write({}, [], [each.key])

    await ask(servers, delete)


async def put(servers: EtcdServers, key: bytes, value: bytes) -> None:
    await ask(servers, lambda etcd: etcd.write({}, [Put(key, value)]))


async def stored_ring(servers: EtcdServers) -> RingRecord:
    found = await ask(servers, lambda etcd: etcd.read(ring_key(CLUSTER)))
    return decode_ring(found[0].key, found[0].value)
