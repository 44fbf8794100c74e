"""`NodeCore.handle` takes an event whole or not at all."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.core.scenes import calm, match, placed, prepare, store
from tests.sim.cluster import Cluster
from tests.sim.malformed import NEVER_MALFORMED, NOT_FOR_THE_RULES, PEER_MESSAGES, REQUESTS, legal, malformed
from tests.sim.prompts import prompt
from tests.sim.snapshot import changes, snapshot
from tokenlake.core import NodeCore, events
from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.disk import Disk
from tokenlake.core.instructions import Answer, CheckSlot, Instruction, Note, SendToPeer, Stamp, StartFetch
from tokenlake.core.node import HandlerFailed
from tokenlake.errors import ProtocolRefused
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import TenantId
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine, peer
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.slots import join_keys

KEYS = prompt("whole", 4)


def busy() -> tuple[Cluster, NodeCore, int]:
    """A node with leases, an open write, a lookup, a fetch and a send under way; and a connection that joined."""
    cluster = calm(3, regions=8)
    writer, reader, other = cluster.join(0), cluster.join(0), cluster.join(1)
    store(cluster, other, KEYS)
    store(cluster, writer, prompt("here", 4))
    prepare(cluster, writer, prompt("open", 2))
    found = match(cluster, reader, KEYS)
    core, now = cluster.core(0), cluster.clock.now
    connection = reader.processes[0].connection
    core.handle(events.Requested(connection, engine.Fetch(77, found.lease, 0, found.hits, 0.0)), now)
    core.handle(events.Requested(connection, engine.Match(78, join_keys(prompt("nowhere", 3)), 0.0)), now)
    core.handle(events.PullRequested(900, "n1", "red", join_keys(prompt("here", 4))), now)
    assert all(core.census()[name] for name in ("transfers", "matches", "sends", "writes", "leases"))
    return cluster, core, connection


def refused(core: NodeCore, event: events.Event, now: float) -> None:
    """Check that the event is refused and changes nothing. `now` is later than all earlier events, so that a time that
    was set shows."""
    before = snapshot(core)
    with pytest.raises(ValueError, match=r"\w"):
        core.handle(event, now)
    assert not changes(before, snapshot(core)), event


def test_a_malformed_message_ends_no_suspicion() -> None:
    """A malformed message does not end the suspicion of a peer."""
    cluster = calm(3)
    cluster.node(1).freeze()
    cluster.run_for(1.0)
    core = cluster.core(0)
    suspect = core._peers.get("n1")  # type: ignore[arg-type]
    assert suspect is not None
    assert suspect.suspect
    with pytest.raises(ValueError, match="multiple of 32"):
        core.handle(events.PeerSent("n1", peer.Owned("red", bytes(31))), cluster.clock.now)
    assert suspect.suspect
    assert core.handle(events.SendDone(4711), cluster.clock.now) == []


def test_a_malformed_event_changes_nothing() -> None:
    cluster, core, connection = busy()
    events_ = list(malformed(core, connection, "n1"))
    assert len(events_) > 150
    before = snapshot(core)
    for event in events_:
        with pytest.raises(ValueError, match=r"\w"):
            core.handle(event, cluster.clock.now + 0.001)
    assert not changes(before, snapshot(core))
    assert core.handle(events.SendDone(4711), cluster.clock.now) == []


def test_every_type_has_malformed_examples() -> None:
    """Every type of message is malformed in some way or never."""
    _, core, connection = busy()
    wrong = {
        type(event.message)
        for event in malformed(core, connection, "n1")
        if (isinstance(event, events.PeerSent) and event.node == "n1" and type(event.message) in PEER_MESSAGES)
        or (isinstance(event, events.Requested) and type(event.message) in REQUESTS)
    }
    every = {*PEER_MESSAGES, *REQUESTS}
    assert every - wrong == set(NEVER_MALFORMED)


@pytest.mark.parametrize("now", [-1.0, math.nan, math.inf])
def test_time_goes_on_and_is_a_number(now: float) -> None:
    core = calm(2).core(0)
    before = snapshot(core)
    with pytest.raises(AssertionError):
        core.handle(events.Tick(), now)
    assert not changes(before, snapshot(core))


# -- each field at its worst

WORST: tuple[Any, ...] = (
    *(-1, 0, 1, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *(math.nan, math.inf, -math.inf, -1.0, 1e308, 5e-324),
    *("", "n0", "n1", "nobody", "\0", "x" * 300),
    *(b"", bytes(31), bytes(32), bytes(33), bytes(64), b"\0", b"\1", b"\xff", b"\7", b"\x12", b"\x11\x12"),
    *((), (0,), (0, 0), (-1,), ((1, 5, 2),), ((1, 0, 1 << 31),), ("n0",), ("nobody",), ("",) * 3, (math.nan,) * 3),
    *(None, True, 1.5),
)


def taken(core: NodeCore, event: events.Event, now: float) -> None:
    """Check that the event is either refused without a change, or taken; then other nodes and engines accept the
    messages that it leads to."""
    before = snapshot(core)
    try:
        out = core.handle(event, now)
    except ValueError:
        assert not changes(before, snapshot(core)), event
        return
    core.check_integrity()
    for instruction in out:
        if isinstance(instruction, SendToPeer):
            decode(peer.peer_decoder, encode(instruction.message))
        elif isinstance(instruction, Answer):
            decode(engine.reply_decoder, encode(instruction.message))


def broken_fields(kind: type[Any], decoder: msgspec.msgpack.Decoder[Any]) -> list[Any]:
    """Messages of this type with one extreme value each, without those that the decoder refuses."""
    found = []
    for name in kind.__struct_fields__:
        for value in WORST:
            try:
                found.append(decode(decoder, encode(msgspec.structs.replace(legal(kind), **{name: value}))))
            except (ProtocolRefused, OverflowError):
                continue
    return found


@pytest.mark.parametrize("kind", PEER_MESSAGES, ids=lambda kind: kind.__name__)
def test_each_field_of_what_a_peer_says_at_its_worst(kind: type[Any]) -> None:
    cluster, core, _ = busy()
    for message in broken_fields(kind, peer.peer_decoder):
        taken(core, events.PeerSent("n1", message), cluster.clock.now + 0.001)
    taken(core, events.Tick(), cluster.clock.now + 10.0)


@pytest.mark.parametrize(
    "kind", [kind for kind in REQUESTS if kind not in NOT_FOR_THE_RULES], ids=lambda kind: kind.__name__
)
def test_each_field_of_a_request_at_its_worst(kind: type[Any]) -> None:
    cluster, core, connection = busy()
    for message in broken_fields(kind, engine.request_decoder):
        taken(core, events.Requested(connection, message), cluster.clock.now + 0.001)
        taken(core, events.Requested(1 << 40, message), cluster.clock.now + 0.001)
    taken(core, events.Tick(), cluster.clock.now + 10.0)


@pytest.mark.parametrize("decoder", [peer.peer_decoder, engine.request_decoder, engine.reply_decoder])
def test_no_decoder_takes_what_is_no_number(decoder: msgspec.msgpack.Decoder[Any]) -> None:
    for kind in typing.get_args(decoder.type):
        for name in kind.__struct_fields__:
            if isinstance(getattr(legal(kind), name), float):
                for value in (math.nan, math.inf, -math.inf, -1.0):
                    with pytest.raises(ProtocolRefused):
                        decode(decoder, encode(msgspec.structs.replace(legal(kind), **{name: value})))


def test_a_release_beyond_the_end_of_a_lease() -> None:
    """A release beyond the end of a lease releases what there is."""
    cluster, core, connection = busy()
    leases = next(s for s in core._sessions if connection in s.processes).leases
    [number] = leases
    for ranges in (((number, 9, 12),), ((number, 0, 1), (number, 9, 9)), ((number, 2, 12),)):
        core.handle(events.Requested(connection, engine.Release(ranges)), cluster.clock.now)
        core.check_integrity()
    assert list(leases[number].held.values()) == [bytearray(b"\0\1\0\0")]


def test_no_segment_lies_deeper_than_messages_can_say() -> None:
    """The owner refuses such a depth, and would close the connection of the node that offers the segment."""
    cluster = calm(2)
    writer = cluster.join(0)
    cluster.run_for(0.05)
    deepest = (1 << 32) - 2
    refused(
        cluster.core(0),
        events.Requested(writer.processes[0].connection, engine.Prepare(1, join_keys(KEYS[:2]), deepest)),
        cluster.clock.now,
    )
    assert set(prepare(cluster, writer, KEYS[:1], deepest).codes) == {Code.RESERVED}


@pytest.mark.parametrize("first", [(1 << 32) - 2, (1 << 32) - 1])
def test_a_store_at_the_greatest_depth(first: int) -> None:
    """The record of the access counts one segment more than the index of the last one. A node that was sent 1 << 32
    closed the connection of the node with the segment, and did so again with each message about it."""
    cluster = calm(3)
    writer = cluster.join(0)
    cluster.run_for(0.05)
    core, connection, sent = cluster.core(0), writer.processes[0].connection, []
    [key] = placed(cluster, 1, 2)
    try:
        out = core.handle(events.Requested(connection, engine.Prepare(1, key, first)), cluster.clock.now)
    except ValueError:
        assert first + 1 == 1 << 32, "a depth that messages can say is refused"
        return
    [prepared] = [i.message for i in out if isinstance(i, Answer) and isinstance(i.message, engine.Prepared)]
    for event in (
        events.Requested(connection, engine.Commit(2, prepared.write, (0,), 3, bytes(16))),
        events.PeerSent("n1", peer.Lookup(1, "red", key)),
        events.PeerSent("n1", peer.Touched("red", key, Hints(Outlook.OVER))),
    ):
        sent += core.handle(event, cluster.clock.now)
    written = core.store.get(TenantId("red"), key)
    assert written is not None
    core._context.store.evict(written, cluster.clock.now)
    sent += core.handle(events.SendDone(4711), cluster.clock.now)
    messages = [each.message for each in sent if isinstance(each, SendToPeer)]
    assert {type(message) for message in messages} >= {peer.LookupReply, peer.Evicted}
    for message in messages:
        assert decode(peer.peer_decoder, encode(message)) == message


# -- mistakes of the rules


def failing(patch: pytest.MonkeyPatch, of: type, name: str, then: Callable[..., Any] | None = None) -> None:
    """Patch a method to raise an exception, after a call of `then` in its place."""

    def fail(self: Any, *args: Any, **how: Any) -> None:
        if then is not None:
            then(self, *args, **how)
        raise RuntimeError("a mistake")

    patch.setattr(of, name, fail)


def failed(core: NodeCore, event: events.Event, now: float) -> list[Instruction]:
    with pytest.raises(HandlerFailed) as failure:
        core.handle(event, now)
    assert isinstance(failure.value.__cause__, RuntimeError)
    return failure.value.instructions


def test_what_a_failed_handler_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a failed handler made comes with its failure and not with the next event."""
    cluster = calm(2)
    writer = cluster.join(0)
    cluster.run_for(0.05)
    core, now = cluster.core(0), cluster.clock.now
    keys = placed(cluster, 0, 1, 2)
    with monkeypatch.context() as patch:
        failing(patch, DirectoryNode, "announce")
        request = engine.Prepare(1, join_keys(keys), 0)
        out = failed(core, events.Requested(writer.processes[0].connection, request), now)
    # The slots were given to new owners: a reader that copies out of them must see a new generation.
    assert [type(each) for each in out] == [Stamp]
    assert core.handle(events.SendDone(4711), now) == []
    core.check_integrity()


def test_a_failed_report_of_evictions_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = calm(2)
    writer, keys = cluster.join(0), placed(cluster, 0, 1, 2)
    store(cluster, writer, keys)
    lease = match(cluster, writer, keys).lease
    core, now, connection = cluster.core(0), cluster.clock.now, writer.processes[0].connection
    [check] = core.handle(events.Requested(connection, engine.Corrupt(lease, 0)), now)
    assert isinstance(check, CheckSlot)
    with monkeypatch.context() as patch:
        failing(patch, DirectoryNode, "tell_evicted")
        out = failed(core, events.SlotChecked(check.check, False), now)
    assert [type(each) for each in out] == [Note]
    assert core.handle(events.SendDone(4711), now) == []
    core.check_integrity()


def test_a_failure_of_the_work_for_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure of the work for the disk after each event is reported like that of a handler."""
    cluster = calm(2)
    writer = cluster.join(0)
    cluster.run_for(0.05)
    core, now = cluster.core(0), cluster.clock.now
    with monkeypatch.context() as patch:
        failing(patch, Disk, "follow")
        request = engine.Prepare(1, join_keys(placed(cluster, 0, 1, 2)), 0)
        out = failed(core, events.Requested(writer.processes[0].connection, request), now)
    assert {Stamp, Answer} <= {type(each) for each in out}
    assert core.handle(events.SendDone(4711), now) == []
    core.check_integrity()


def test_a_transfer_that_a_failed_handler_began_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = calm(3)
    writer, reader = cluster.join(1), cluster.join(0)
    keys = placed(cluster, 1, 2, 2)
    store(cluster, writer, keys)
    found = match(cluster, reader, keys)
    core, now = cluster.core(0), cluster.clock.now
    with monkeypatch.context() as patch:
        failing(patch, type(core._transfers), "bring", type(core._transfers).bring)
        request = engine.Fetch(1, found.lease, 0, found.hits, 0.0)
        out = failed(core, events.Requested(reader.processes[0].connection, request), now)
    [ordered] = [each for each in out if isinstance(each, StartFetch)]
    lost = bytes([Code.LOST]) * (len(ordered.keys) // KEY_BYTES)
    out = core.handle(events.FetchDone(ordered.fetch, lost, bytes(8 * ordered.shards * len(lost))), now)
    # The fetch asks the other candidates for the segments that did not come.
    while further := [each for each in out if isinstance(each, StartFetch)]:
        for each in further:
            lost = bytes([Code.LOST]) * (len(each.keys) // KEY_BYTES)
            out = core.handle(events.FetchDone(each.fetch, lost, bytes(8 * each.shards * len(lost))), now)
    core.check_integrity()
    assert not core.census()["transfers"]
