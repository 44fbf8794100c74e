"""Bugs planted in the rules, each found by the state machine of `test_cluster_machine`.

At most 400 examples of 30 steps each, without shrinking. Without a planted bug the machine passes: that is the
test beside this one.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.sim.plants import Plant, planted
from tests.sim.test_cluster_machine import ClusterMachine
from tokenlake.core.checks import Checks
from tokenlake.core.cluster.directory_node import DirectoryNode
from tokenlake.core.cluster.owner import Ownership
from tokenlake.core.cluster.peers import Peers
from tokenlake.core.cluster.serve import Serving
from tokenlake.core.cluster.transfers import Transfers
from tokenlake.core.engines.found import Found
from tokenlake.core.engines.grants import Grants, SessionGrants, Write
from tokenlake.core.engines.sessions import Sessions
from tokenlake.core.events import PeerSent, Requested
from tokenlake.core.instructions import AbortFetch
from tokenlake.core.node import HandlerFailed, NodeCore
from tokenlake.identity import ConnectionId, NodeId
from tokenlake.memory import Kind, SegmentStore
from tokenlake.memory.slot_table import SlotTable
from tokenlake.wire import Code, peer
from tokenlake.wire.slots import SlotRef


def generation_ignored(patch: pytest.MonkeyPatch) -> None:
    """A slot keeps its generation when its owner changes: a copy out does not notice."""

    def next_generation(self: SlotTable, region: int, slot: int) -> SlotRef:
        return SlotRef(region, slot, 1)

    patch.setattr(SlotTable, "next_generation", next_generation)


def stamp_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Generations change, and the driver is not told to write them into the page that engines read."""
    original = NodeCore.handle

    def handle(self: NodeCore, event: Any, now: float) -> Any:
        self.store.take_slots()
        out = original(self, event, now)
        return [i for i in out if type(i).__name__ != "Stamp"]

    patch.setattr(NodeCore, "handle", handle)


def lease_ignored(patch: pytest.MonkeyPatch) -> None:
    """A lease pins nothing once it is granted: segments that an engine reads are evicted as any other."""
    original = NodeCore.handle

    def handle(self: NodeCore, event: Any, now: float) -> Any:
        out = original(self, event, now)
        for session in self._sessions:
            for lease in session.leases.values():
                for index, segment in enumerate(lease.segments):
                    if segment is not None:
                        lease.segments[index] = None
                        self.store.unpin(segment)
        return out

    patch.setattr(NodeCore, "handle", handle)


def late_receiver_ignored(patch: pytest.MonkeyPatch) -> None:
    """The slots of a fetch are given away at its deadline, while its receiver may still write into them."""
    returned = Transfers.done

    def abort(self: Transfers, fetch: int) -> None:
        transfer = self._under_way.get(fetch)
        self._context.emit(AbortFetch(fetch))
        if transfer is not None:
            count = len(transfer.segments)
            returned(self, fetch, bytes([Code.LOST]) * count, bytes(16 * count), None)

    def done(
        self: Transfers, fetch: int, codes: bytes, checksums: bytes, answered: bool | None, held: bytes, notes: bytes
    ) -> None:
        if fetch in self._under_way:
            returned(self, fetch, codes, checksums, answered, notes=notes)

    patch.setattr(Transfers, "_abort", abort)
    patch.setattr(Transfers, "done", done)
    _nothing_settles(patch)


def _nothing_settles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfers, "settled", lambda self, fetch: None)


def held_slot_given_away(patch: pytest.MonkeyPatch) -> None:
    """A slot is free at the end of its fetch, while a read that cannot be stopped may still write into it."""
    original = Transfers.done

    def done(
        self: Transfers, fetch: int, codes: bytes, checksums: bytes, answered: bool | None, held: bytes, notes: bytes
    ) -> None:
        original(self, fetch, codes, checksums, answered, notes=notes)

    patch.setattr(Transfers, "done", done)
    _nothing_settles(patch)


def aborted_fetch_trusted(patch: pytest.MonkeyPatch) -> None:
    """The segments of an aborted fetch are published without a look at the fetch's codes."""
    original = Transfers.done

    def done(
        self: Transfers, fetch: int, codes: bytes, checksums: bytes, answered: bool | None, held: bytes, notes: bytes
    ) -> None:
        original(self, fetch, bytes([Code.LOCAL]) * len(codes), checksums, answered, notes=notes)

    patch.setattr(Transfers, "done", done)
    _nothing_settles(patch)


def dead_engine_frees_nothing(patch: pytest.MonkeyPatch) -> None:
    """The slots that a dead process held stay pinned."""

    def gone(self: Sessions, connection: Any) -> None:
        self._processes.pop(connection, None)

    patch.setattr(Sessions, "gone", gone)


def write_of_two_held_by_one(patch: pytest.MonkeyPatch) -> None:
    """A second process that fills shards of a write is not counted as its owner."""
    patch.setattr(Grants, "attach", lambda self, session, write, connection: True)


def expired_write_reused(patch: pytest.MonkeyPatch) -> None:
    """The deadline of a reservation takes its slots from processes that may still write into them."""

    def expire(self: Grants, session: SessionGrants, write: Write) -> None:
        for connection in list(write.held):
            self.give_back(session, write, connection)

    patch.setattr(Grants, "expire", expire)


def push_delivered_twice(patch: pytest.MonkeyPatch) -> None:
    """An offer that comes again takes slots again."""
    original = Transfers.bring

    def bring(self: Transfers, node: NodeId, tenant: Any, wanted: Any, *, kind: Kind, **how: Any) -> None:
        for key, _, _ in wanted if kind is Kind.PRIMARY else ():
            self._context.store.index(tenant).pop(key, None)
        original(self, node, tenant, wanted, kind=kind, **how)

    patch.setattr(Transfers, "bring", bring)


def send_unpinned(patch: pytest.MonkeyPatch) -> None:
    """A send does not pin its slots, so that the bytes of a later segment may be sent."""
    original = Serving.pull

    def pull(self: Serving, stream: int, node: Any, tenant: Any, keys: Any, **how: Any) -> None:
        original(self, stream, node, tenant, keys, **how)
        self.sent(stream)

    patch.setattr(Serving, "pull", pull)


def directory_node_restarted_empty(patch: pytest.MonkeyPatch) -> None:
    """No node advertises to a directory node that came back, and it answers MISSING."""
    patch.setattr(DirectoryNode, "restored", lambda self, peer_: None)
    patch.setattr(DirectoryNode, "complete", property(lambda self: True))


def stand_in_not_told(patch: pytest.MonkeyPatch) -> None:
    """Owners do not tell the other candidate the segments of a directory node that died."""
    patch.setattr(DirectoryNode, "lost", lambda self, peer_: None)


def second_primary_copy_kept(patch: pytest.MonkeyPatch) -> None:
    """A directory node believes each node that reports a primary copy, and names no copy as redundant."""

    def owned(self: DirectoryNode, node: NodeId, tenant: Any, keys: Any, previous: Any = None) -> peer.Redundant:
        for key, other in self._directory.own(tenant, keys, node, self._incarnation(node)).items():
            self._directory.gone(tenant, (key,), other)
            self._directory.own(tenant, (key,), node, self._incarnation(node))
        return peer.Redundant(tenant, b"", ())

    patch.setattr(DirectoryNode, "owned", owned)


def redundant_copy_stays_primary(patch: pytest.MonkeyPatch) -> None:
    """A node that is told of another owner keeps its primary copy."""
    patch.setattr(Ownership, "redundant", lambda self, message: None)


def heard_before_it_is_checked(patch: pytest.MonkeyPatch) -> None:
    """A malformed message ends the suspicion of its sender, as a sign of life."""
    original = Checks.check

    def check(self: Checks, event: Any) -> None:
        if isinstance(event, PeerSent) and self._peers.get(NodeId(event.node)) is not None:
            self._peers.heard(NodeId(event.node))
        original(self, event)

    patch.setattr(Checks, "check", check)


def renewed_before_it_is_checked(patch: pytest.MonkeyPatch) -> None:
    """A malformed request keeps a session alive."""
    original = Checks.check

    def check(self: Checks, event: Any) -> None:
        if isinstance(event, Requested) and (process := self._sessions.process(ConnectionId(event.connection))):
            self._sessions.renew(process.session)
        original(self, event)

    patch.setattr(Checks, "check", check)


def call_ended_by_a_wrong_reply(patch: pytest.MonkeyPatch) -> None:
    """A reply for other keys than were asked about is refused, and its call is gone."""
    original = Peers.check_reply

    def check_reply(self: Peers, node: NodeId, message: Any, count: int) -> None:
        try:
            original(self, node, message, count)
        except ValueError:
            del self._peers[node].calls[message.call]
            raise

    patch.setattr(Peers, "check_reply", check_reply)


def wrong_copy_kept(patch: pytest.MonkeyPatch) -> None:
    """A copy that a check found wrong stays in the index; only its directory node is told."""
    patch.setattr(SegmentStore, "drop", lambda self, segment, now: self._gone.append(segment))


def independent_keys_end_at_a_gap(patch: pytest.MonkeyPatch) -> None:
    """Independent keys behind one that no node has are not leased, as if they were those of a prefix."""
    original = Found.places

    def places(self: Found) -> list[int]:
        found = original(self)
        return [place for number, place in enumerate(found) if place == number]

    patch.setattr(Found, "places", places)


SEEN_BY_ENGINES = (
    generation_ignored,
    stamp_forgotten,
    lease_ignored,
    late_receiver_ignored,
    held_slot_given_away,
    aborted_fetch_trusted,
    write_of_two_held_by_one,
    expired_write_reused,
    send_unpinned,
    wrong_copy_kept,
)
"""Wrong bytes, or a slot with two owners."""

SEEN_INSIDE = (
    push_delivered_twice,
    dead_engine_frees_nothing,
    directory_node_restarted_empty,
    stand_in_not_told,
    second_primary_copy_kept,
    redundant_copy_stays_primary,
    heard_before_it_is_checked,
    renewed_before_it_is_checked,
    call_ended_by_a_wrong_reply,
    independent_keys_end_at_a_gap,
)
"""Lost slots, segments that no node finds or leases, too many copies, refused events that leave a trace."""


class SeenByEngines(ClusterMachine):
    """Checks only the bytes that engines see: a bug must not be found by the bookkeeping that it breaks."""

    look_inside = False


def _run(machine: type[ClusterMachine], examples: int = 400) -> None:
    found_by = settings(max_examples=examples, stateful_step_count=30, phases=[Phase.generate], deadline=None)
    run_state_machine_as_test(machine, settings=found_by)


@pytest.mark.parametrize("plant", planted(SEEN_BY_ENGINES))
def test_wrong_bytes_are_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"wrong bytes|reissued|other bytes"):
        _run(SeenByEngines)


@pytest.mark.parametrize("plant", planted(SEEN_INSIDE))
def test_broken_rules_are_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    # After the failure the machine ends its scene with the broken rules, which may raise further errors.
    with pytest.raises((AssertionError, KeyError, HandlerFailed)):
        _run(ClusterMachine)
