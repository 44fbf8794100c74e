"""Calls and room for messages are bounded in all and by tenant, and the parts of a message before it is decoded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.config import Secret, ServerConfig, Tenant
from tokenlake.errors import LimitReached
from tokenlake_proto.v1 import role_pb2
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control import limits
from tokenlake_server.control.callers import Caller
from tokenlake_server.control.limits import ADMINS, Calls, Room
from tokenlake_server.control.messages import MAX_KEYS
from tokenlake_server.control.parts import count_parts
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


PLANS: Any = pb.GenPlansRequest.DESCRIPTOR


def plans(sequences: int, instances: int) -> pb.GenPlansRequest:
    keys = bytes(32)
    return pb.GenPlansRequest(
        fleet=pb.Fleet(name="f", instances={f"i{number}": "n" for number in range(instances)}),
        tree=pb.PrefixTree(
            prompts=[pb.Prompt(name="p", tokens=1)],
            segment_tokens=16,
            sequences=[
                pb.Sequence(parent=number - 1, keys=keys, nodes=["a"], requests=[0], disk_s=1.0)
                for number in range(sequences)
            ],
        ),
    )


def test_fields_of_inner_messages_count() -> None:
    assert count_parts(b"", PLANS) == 0
    few, more = (count_parts(plans(number, 3).SerializeToString(), PLANS) for number in (10, 11))
    assert more - few == 6, "the sequence and its five fields"
    packed = pb.Sequence(requests=range(100)).SerializeToString()
    kind: Any = pb.Sequence.DESCRIPTOR
    assert count_parts(packed, kind) == 1 + 100 // 16


def test_the_largest_message_of_a_scheduler_is_within_the_limit() -> None:
    count_parts(plans(MAX_KEYS, 1024).SerializeToString(), PLANS)


def test_two_bytes_for_a_message_of_a_hundred() -> None:
    """2 MiB of empty sequences would take 100 MiB."""
    with pytest.raises(LimitReached, match="divide it into several calls"):
        count_parts(b"\x1a\x00" * (1 << 20), PLANS)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_number_or_an_error(body: bytes) -> None:
    """What protobuf takes without groups is counted; nothing else raises another error."""
    try:
        count_parts(body, PLANS)
    except ValueError:
        return
    except LimitReached:
        raise AssertionError("200 bytes are few parts") from None


@given(st.integers(0, 20), st.integers(0, 20))
def test_what_protobuf_writes_is_counted(sequences: int, instances: int) -> None:
    body = plans(sequences, instances).SerializeToString()
    assert count_parts(body, PLANS) >= sequences + instances
    for cut in range(1, min(len(body), 40)):
        try:
            pb.GenPlansRequest.FromString(body[:-cut])
        except Exception:
            with pytest.raises(ValueError, match="the message is not"):
                count_parts(body[:-cut], PLANS)
