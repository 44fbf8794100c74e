"""`NodeCore.handle` takes an event whole or not at all."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.core.scenes import calm, match, placed, prepare, store, stored
from tests.sim.cluster import Cluster
from tests.sim.malformed import NEVER_MALFORMED, PEER_MESSAGES, REQUESTS, legal, malformed
from tests.sim.prompts import prompt
from tests.sim.snapshot import changes, snapshot
from tokenlake.core import NodeCore, events
from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.disk import Disk
from tokenlake.core.instructions import Answer, Instruction, SendToPeer, Stamp, StartFetch
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


def test_a_malformed_event_changes_nothing() -> None:
    """Every type of event and message is malformed in some way, or never."""
    cluster, core, connection = busy()
    every = list(malformed(core, connection, "n1"))
    before = snapshot(core)
    for event in every:
        with pytest.raises(ValueError, match=r"\w"):
            core.handle(event, cluster.clock.now + 0.001)
    assert not changes(before, snapshot(core))
    assert core.handle(events.SendDone(4711), cluster.clock.now) == []
    said = [event.message for event in every if isinstance(event, events.PeerSent) and event.node == "n1"]
    asked = [event.message for event in every if isinstance(event, events.Requested)]
    wrong = set(map(type, said)) & set(PEER_MESSAGES) | set(map(type, asked)) & set(REQUESTS)
    assert {*PEER_MESSAGES, *REQUESTS} - wrong == set(NEVER_MALFORMED)


@pytest.mark.parametrize("now", [-1.0, math.nan, math.inf])
def test_time_goes_on_and_is_a_number(now: float) -> None:
    core = calm(2).core(0)
    before = snapshot(core)
    with pytest.raises(AssertionError):
        core.handle(events.Tick(), now)
    assert not changes(before, snapshot(core))


@pytest.mark.parametrize("decoder", [peer.peer_decoder, engine.request_decoder, engine.reply_decoder])
def test_no_decoder_takes_what_is_no_number(decoder: msgspec.msgpack.Decoder[Any]) -> None:
    for kind in typing.get_args(decoder.type):
        for name in kind.__struct_fields__:
            if isinstance(getattr(legal(kind), name), float):
                for value in (math.nan, math.inf, -math.inf, -1.0):
                    with pytest.raises(ProtocolRefused):
                        decode(decoder, encode(msgspec.structs.replace(legal(kind), **{name: value})))


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


@pytest.mark.parametrize(
    ("where", "name", "made"), [(DirectoryNode, "announce", {Stamp}), (Disk, "follow", {Stamp, Answer})]
)
def test_what_a_failed_handler_made(where: type, name: str, made: set[type], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with its failure and not with the next event, also where the work for the disk fails. The slots were
    given to new owners: a reader that copies out of them must see a new generation."""
    cluster = calm(2)
    writer = cluster.join(0)
    cluster.run_for(0.05)
    core, now = cluster.core(0), cluster.clock.now
    with monkeypatch.context() as patch:
        failing(patch, where, name)
        request = engine.Prepare(1, join_keys(placed(cluster, 0, 1, 2)), 0)
        out = failed(core, events.Requested(writer.processes[0].connection, request), now)
    assert made <= {type(each) for each in out}
    assert core.handle(events.SendDone(4711), now) == []
    core.check_integrity()


def test_a_transfer_that_a_failed_handler_began_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, reader, keys = stored(2, pair=(1, 2), at=1, reader=0)
    found = match(cluster, reader, keys)
    core, now = cluster.core(0), cluster.clock.now
    with monkeypatch.context() as patch:
        failing(patch, type(core._transfers), "bring", type(core._transfers).bring)
        request = engine.Fetch(1, found.lease, 0, found.hits, 0.0)
        out = failed(core, events.Requested(reader.processes[0].connection, request), now)
    ordered = [each for each in out if isinstance(each, StartFetch)]
    # The fetch asks the other candidates for the segments that did not come.
    while ordered:
        fetch = ordered.pop()
        lost = bytes([Code.LOST]) * (len(fetch.keys) // KEY_BYTES)
        out = core.handle(events.FetchDone(fetch.fetch, lost, bytes(8 * fetch.shards * len(lost))), now)
        ordered += [each for each in out if isinstance(each, StartFetch)]
    core.check_integrity()
    assert not core.census()["transfers"]
