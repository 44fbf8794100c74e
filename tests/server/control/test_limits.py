"""Calls and room for messages are bounded in all and by tenant, and given by turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("grpc")

from tokenlake.config import Secret, ServerConfig, Tenant
from tokenlake.errors import LimitReached
from tokenlake_proto.v1 import role_pb2
from tokenlake_server.control import limits
from tokenlake_server.control.callers import Caller
from tokenlake_server.control.limits import ADMINS, Calls, Room
from tokenlake_server.engines.tenants import Tenants

TENANTS = Tenants(
    ServerConfig(
        tenants=tuple(Tenant(name=name, secret=Secret(name.encode() * 8), tokens=(name,)) for name in ("red", "blue"))
    )
)


def caller(tenant: str, role: role_pb2.Role.ValueType = role_pb2.ROLE_SCHEDULER) -> Caller:
    return Caller(role, "x", tenant, None, TENANTS)


async def settled() -> None:
    """Every task has gone on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_tenant_leaves_calls_to_others_and_to_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS", 6)
    monkeypatch.setattr(limits, "TENANT_CALLS", 4)
    monkeypatch.setattr(limits, "ADMIN_CALLS", 2)
    calls = Calls()

    def open_(who: Caller, count: int) -> int:
        opened = 0
        for _ in range(count):
            call = calls.call(who)
            try:
                call.__enter__()
            except LimitReached as error:
                assert "make fewer calls at a time" in str(error)
                continue
            held.append(call)
            opened += 1
        return opened

    held: list[Any] = []
    admin = caller("", role_pb2.ROLE_ADMIN)
    assert open_(caller("red"), 10) == 4
    assert open_(caller("blue"), 10) == 2
    assert open_(admin, 10) == 2
    assert (calls.under_way, calls.refused) == (8, 22)
    for each in held:
        each.__exit__(None, None, None)
    assert (calls.under_way, calls.kept_bytes) == (0, 0)


def test_a_caller_without_a_tenant_has_an_account_of_its_own() -> None:
    assert caller("red").account == "red"
    assert caller("").account == ""


async def test_room_is_given_in_turns_of_the_tenants() -> None:
    room, given = Room(10, 6), list[str]()

    async def take(of: str, name: str, nbytes: int) -> None:
        assert await room.take(of, nbytes) == min(nbytes, 6)
        given.append(name)

    tasks = [asyncio.ensure_future(take("red", f"red {number}", 3)) for number in range(6)]
    tasks += [asyncio.ensure_future(take("blue", f"blue {number}", 3)) for number in range(3)]
    await settled()
    assert given == ["red 0", "red 1", "blue 0"], "the part of a tenant, and room for another one"
    assert room.taken == 9
    room.give_back("red", 3)
    await settled()
    assert given[3:] == ["red 2"]
    room.give_back("blue", 3)
    await settled()
    assert given[4:] == ["blue 1"]
    room.give_back("red", 3)
    await settled()
    room.give_back("red", 3)
    await settled()
    assert sorted(given[5:]) == ["blue 2", "red 3"], "a turn for each"
    for each in tasks:
        each.cancel()
    await settled()
    big = asyncio.ensure_future(take("green", "more than a tenant may have", 100))
    await settled()
    room.give_back("red", 3)
    await settled()
    assert not big.done()
    room.give_back("blue", 6)
    await settled()
    assert big.done()
    room.give_back("green", 6)
    assert room.taken == 0


async def test_a_caller_that_leaves_gives_its_room_back() -> None:
    room = Room(4, 4)
    await room.take("red", 4)
    waiting = [asyncio.ensure_future(room.take("blue", 4)) for _ in range(3)]
    await settled()
    waiting[0].cancel()
    await settled()
    room.give_back("red", 4)
    # The room was granted, and its caller has not run since.
    waiting[1].cancel()
    await settled()
    assert waiting[2].done()
    assert not waiting[2].cancelled()
    room.give_back("blue", 4)
    assert room.taken == 0


async def test_a_message_has_room_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the bytes of all messages together have a limit, and not each of them only."""
    monkeypatch.setattr(limits, "READ_S", 0.01)

    async def scene() -> None:
        calls, received = Calls(), 0

        async def receive() -> bytes:
            nonlocal received
            received += 1
            return b"x"

        with calls.call(caller("red")) as first, calls.call(caller("red")) as second:
            most = calls.kept_bytes
            for _ in range(limits.READING // 2 // limits.MAX_MESSAGE):
                await first.read(receive)
            waiting = asyncio.ensure_future(second.read(receive))
            await settled()
            assert received == limits.READING // 2 // limits.MAX_MESSAGE
            with calls.call(caller("blue")) as other:
                await other.read(receive)
            await first.begin(1 << 20)
            assert await waiting == b"x"
            assert calls.kept_bytes == most + (1 << 20) + limits.MAX_MESSAGE
            with pytest.raises(TimeoutError, match="did not arrive"):
                await second.read(asyncio.Event().wait)
        assert calls.kept_bytes == 0
        with calls.call(caller("", role_pb2.ROLE_ADMIN)) as admin:
            assert admin.of == ADMINS

    await scene()
