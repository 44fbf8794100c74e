"""Simulated engines: processes of one session that match, fetch, read, store, stall and die."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.sim.arena import HALF, SHARDS, SLOT_BYTES, View, content
from tests.sim.clock import Channel
from tests.sim.node import SimNode
from tokenlake.core import events, instructions
from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code, engine
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.slots import join_keys, unpack_slots

SEGMENT_TOKENS = 16
Took = tuple[tuple[int, int, int, float], ...]


class SimProcess:
    """One connection to a daemon. `views` and `fills` hold the slots that it may read and write; it removes an entry
    before it tells the daemon."""

    def __init__(self, node: SimNode, tenant: str, session: int, joined: Callable[[int, bool], None]) -> None:
        """`joined`: called with the number of its session, and whether the process has returned to the next daemon."""
        self.node = node
        self.tenant = tenant
        self.connection = node.cluster.next_id()
        self.views: dict[tuple[int, int], View] = {}
        """By (lease, index)."""
        self.fills: dict[tuple[int, int], View] = {}
        """By (write, index)."""
        self.dead = False
        self.survivor = 0
        """Its number for the next daemon of the node, once it was given a lock; 0 before."""
        self.session = 0
        """Number of its session at the daemon that it joined last."""
        self.items: dict[int, int] = {}
        """Number of the items of its leases."""
        self.returns_after_s: float | None = 0.0
        """Seconds after which it connects to the next daemon that has kept the memory; None: it drops its mappings, as
        a process that speaks an earlier version."""
        self._returning = False
        """It may not send anything until the daemon has welcomed it."""
        self.up: Channel[events.Event] = Channel(node.cluster.clock, node.deliver)
        self.down: Channel[Any] = Channel(node.cluster.clock, self._receive)
        self._joined = joined
        self._waiting: dict[int, Callable[[Any], None]] = {}
        node.processes[self.connection] = self
        hello = events.Joined(self.connection, 0, tenant, SLOT_BYTES, SHARDS, SEGMENT_TOKENS, session, 0)
        self.up.send(hello)

    @property
    def attached(self) -> bool:
        """The process lives, and so does the daemon that it joined."""
        return not self.dead and self.node.processes.get(self.connection) is self and not self._returning

    def tell(self, message: engine.EngineRequest) -> None:
        """Send one frame to the daemon."""
        if self.attached:
            arrived = decode(engine.request_decoder, encode(message))
            if isinstance(arrived, engine.Explain):
                self.up.send(events.ExplainRequested(self.connection, self.tenant, arrived))
            else:
                self.up.send(events.Requested(self.connection, arrived))

    def request(self, make: Callable[[int], engine.EngineRequest], reply: Callable[[Any], None]) -> None:
        """Send a request. `reply` is called with the reply, unless the process or the daemon dies first."""
        number = self.node.cluster.next_id()
        self._waiting[number] = reply
        self.tell(make(number))

    def _receive(self, message: Any) -> None:
        if self.dead:
            return
        if isinstance(message, instructions.Welcomed):
            self.session = message.session
            if self.node.kept is not None:
                self.node.kept.connected(self)
            again, self._returning = self._returning, False
            if again:
                self._regrant()
            self._joined(message.session, again)
        elif isinstance(message, engine.Failed):
            self.node.cluster.refusals.append(message.reason)
            if self._returning:
                self._returning = False
                del self.node.processes[self.connection]
        else:
            arrived = decode(engine.reply_decoder, encode(message))
            self._waiting.pop(message.id)(arrived)

    def disconnected(self) -> None:
        """The daemon is gone. Views stay, as the memory is still mapped."""
        self.down.cut()
        self.up.cut()
        self._waiting.clear()
        self._returning = False

    def back(self) -> None:
        """The next daemon of the node runs, and has kept the memory: connect to it, or drop all mappings."""
        life = self.node.life
        clock = self.node.cluster.clock

        def connect() -> None:
            if self.dead or life.stopped or self.attached or self._returning:
                return
            self.connection = self.node.cluster.next_id()
            self.node.processes[self.connection] = self
            self._returning = True
            sizes = self.tenant, SLOT_BYTES, SHARDS, SEGMENT_TOKENS
            self.up.send(events.Joined(self.connection, 0, *sizes, self.session, 0, self.survivor))

        def drop() -> None:
            if self.dead or life.stopped:
                return
            if self.views or self.fills:
                clock.after(0.02, drop)
            elif self.node.kept is not None:
                self.node.kept.gone(self)

        if self.returns_after_s is None:
            drop()
        else:
            clock.after(self.returns_after_s, connect)

    def _regrant(self) -> None:
        """Say which leases and writes it holds, in two parts."""
        leases: list[tuple[int, int, int, bytes]] = []
        for (lease, index), view in self.views.items():
            leases.append((lease, self.items[lease], index, view.place.pack()))
        writes: dict[int, bytes] = {}
        for (write, index), view in sorted(self.fills.items()):
            writes[write] = writes.get(write, b"").ljust(16 * index, b"\0") + view.place.pack()
        half = len(leases) // 2

        def regranted(reply: engine.Regranted) -> None:
            known = (Code.LOCAL, Code.LOST, Code.EXPIRED, Code.COMMITTED, Code.SESSION_LIMIT)
            assert all(code in known for code in reply.codes)

        self.request(lambda number: engine.Regrant(number, tuple(leases[:half]), (), False), regranted)
        rest = tuple(leases[half:]), tuple(writes.items())
        self.request(lambda number: engine.Regrant(number, *rest, True), regranted)

    def die(self) -> None:
        """SIGKILL, or Bye: the process touches nothing any more, and the daemon is told."""
        if self.dead:
            return
        attached = self.node.processes.get(self.connection) is self
        self.dead = True
        self.views.clear()
        self.fills.clear()
        if attached:
            self.up.send(events.ProcessGone(self.connection))
            del self.node.processes[self.connection]
        elif self.node.kept is not None and self.survivor:
            self.node.kept.gone(self)

    def view(self, packed: bytes, key: SegmentKey) -> View:
        """A pointer to the slot that a reply names."""
        place = unpack_slots(packed)[0]
        return View(self.node.arena.regions[place.region], place, content(self.tenant, key))


@dataclass(frozen=True)
class Reading:
    """Options of a read."""

    attach: bool = False
    """The second process reads, too."""
    fetch: bool = True
    hold_s: float = 0.01
    split: int = 0
    """The range is fetched and released in two parts, cut here."""
    took: tuple[int, int, float] | None = None
    """The tokens that the engine takes, as in `engine.Release.took`; None: it does not say so."""
    verify: bool = False
    """Report wrong bytes, and do not read them."""
    in_flight_wait_s: float = 0.0
    """How long the match waits for missing segments that another engine computes."""
    independent: bool = False
    """Each segment that is found is read, not only a prefix."""


@dataclass(frozen=True)
class Storing:
    """Options of a store."""

    ending: str = "commit"
    """commit, singly, abort, die, leave."""
    fill_s: float = 0.005
    """Time between the reservation and the end of writing."""
    shared: bool = False
    """The second process writes the second shard."""
    account: str = ""
    """The salt of the request, as its hints name it."""


class Engine:
    """One session of one or two processes at a node."""

    def __init__(self, node: SimNode, tenant: str, processes: int = 1) -> None:
        self.node = node
        self.clock = node.cluster.clock
        self.tenant = tenant
        self.session = 0
        self.silent_until = 0.0
        self.processes: list[SimProcess] = []
        self.answers: list[Any] = []
        """Replies to matches, fetches, prepares and commits, in order of arrival."""
        self._dropped: set[tuple[int, int]] = set()
        """(lease, start) of the ranges that the first process released."""
        self._join(processes)
        self._beat()

    def _join(self, more: int) -> None:
        def joined(session: int, again: bool) -> None:
            self.session = session
            if again:
                self._beat()
            elif more > 1:
                self._join(more - 1)

        self.processes.append(SimProcess(self.node, self.tenant, self.session, joined))

    def _beat(self) -> None:
        if not self.alive:
            return
        if self.clock.now >= self.silent_until:
            self.processes[0].request(engine.Heartbeat, lambda reply: None)
        self.clock.after(self.node.cluster.lease_s / 3, self._beat)

    @property
    def alive(self) -> bool:
        """Its first process lives and its daemon does too."""
        return self.processes[0].attached

    @property
    def second(self) -> SimProcess:
        """The second process, or the first where there is only one."""
        return self.processes[-1]

    def die(self) -> None:
        """Kill all its processes."""
        for process in self.processes:
            process.die()

    # -- reading

    def read(self, keys: Sequence[SegmentKey], how: Reading) -> None:
        """Match, perhaps fetch, read while the lease is held, release."""
        first = self.processes[0]

        def matched(reply: engine.Matched) -> None:
            self.answers.append(reply)
            found = [at for at, code in enumerate(reply.codes) if code in (Code.LOCAL, Code.REMOTE)]
            if not how.independent:
                assert found[: reply.hits] == list(range(reply.hits))
            else:
                assert len(found) == reply.hits, f"{len(found)} keys were found, {reply.hits} are leased"
            if not reply.hits:
                first.tell(engine.Release(((reply.lease, 0, 0),), took=_took(how, reply.lease)))
                return
            leased = [keys[at] for at in found[: reply.hits]]
            codes = bytes(reply.codes[at] for at in found[: reply.hits])
            self._look(first, reply.lease, leased, 0, codes, reply.slots, verify=how.verify)
            cut = min(how.split, reply.hits)
            if how.attach and self.second is not first:
                self._attach(reply.lease, leased, how)
            if how.fetch:
                self._fetch(first, reply.lease, leased, range(0, cut), verify=how.verify)
                self._fetch(first, reply.lease, leased, range(cut, reply.hits), verify=how.verify)
            took = _took(how, reply.lease)
            self.clock.after(how.hold_s / 2, lambda: self._release(first, reply.lease, range(0, cut), took))
            self.clock.after(how.hold_s, lambda: self._release(first, reply.lease, range(cut, reply.hits)))

        def match(number: int) -> engine.Match:
            wait_s, packed = how.in_flight_wait_s, join_keys(keys)
            return engine.Match(number, packed, 0.0, True, f"r{number}", None, 0, wait_s, independent=how.independent)

        first.request(match, matched)

    def _attach(self, lease: int, keys: Sequence[SegmentKey], how: Reading) -> None:
        second = self.second

        def attached(reply: engine.Matched) -> None:
            self._look(second, lease, keys, 0, reply.codes, reply.slots, verify=how.verify)
            self.clock.after(2 * how.hold_s, lambda: self._release(second, lease, range(len(keys))))

        second.request(lambda number: engine.Attach(number, lease), attached)

    def _fetch(
        self, process: SimProcess, lease: int, keys: Sequence[SegmentKey], items: range, *, verify: bool
    ) -> None:
        def fetched(reply: engine.Fetched) -> None:
            self.answers.append(reply)
            # The range was released meanwhile: its slots must not be read any more.
            if (lease, items.start) not in self._dropped:
                self._look(process, lease, keys, items.start, reply.codes, reply.slots, verify=verify)

        if items:
            process.request(lambda number: engine.Fetch(number, lease, items.start, items.stop, 0.0), fetched)

    def _look(
        self,
        process: SimProcess,
        lease: int,
        keys: Sequence[SegmentKey],
        first: int,
        codes: bytes,
        slots: bytes,
        *,
        verify: bool,
    ) -> None:
        process.items[lease] = len(keys)
        for offset, code in enumerate(codes):
            if code == Code.LOCAL:
                view = process.view(slots[16 * offset : 16 * offset + 16], keys[first + offset])
                if verify and view.flipped:
                    process.tell(engine.Corrupt(lease, first + offset))
                else:
                    process.views[lease, first + offset] = view

    def _release(self, process: SimProcess, lease: int, items: range, took: Took = ()) -> None:
        if not items:
            return
        if process is self.processes[0]:
            self._dropped.add((lease, items.start))
        read: list[bool] = []
        for index in items:
            view = process.views.pop((lease, index), None)
            if view is not None:
                self.node.cluster.remember(view)
            read.append(view is not None)
        stop = items.stop
        for was_read, run in itertools.groupby(reversed(read)):
            start = stop - len(list(run))
            process.tell(engine.Release(((lease, start, stop),), was_read, took))
            stop = start

    # -- storing

    def store(self, keys: Sequence[SegmentKey], first: int, how: Storing) -> None:
        """Prepare, write, and end as `how` says."""
        process = self.processes[0]

        def prepared(reply: engine.Prepared) -> None:
            self.answers.append(reply)
            if not reply.write:
                return
            self._begin(process, reply, keys)
            both = how.shared and self.second is not process
            shards = [0] if both else list(range(SHARDS))
            self.clock.after(how.fill_s, lambda: self._finish(process, reply.write, shards, how))
            if both:
                self.second.request(lambda number: engine.Attach(number, reply.write), joined)

        def joined(reply: engine.Prepared | engine.Matched) -> None:
            if isinstance(reply, engine.Prepared):
                self._begin(self.second, reply, keys)
                self.clock.after(1.5 * how.fill_s, lambda: self._finish(self.second, reply.write, [1], how))

        hints = Hints(account=how.account) if how.account else None
        process.request(lambda number: engine.Prepare(number, join_keys(keys), first, "", hints), prepared)

    def _begin(self, process: SimProcess, reply: engine.Prepared, keys: Sequence[SegmentKey]) -> None:
        for index, code in enumerate(reply.codes):
            if code == Code.RESERVED:
                view = process.view(reply.slots[16 * index : 16 * index + 16], keys[index])
                process.fills[reply.write, index] = view
                if process is self.processes[0]:
                    for shard in range(SHARDS):
                        view.write(shard, HALF)

    def _finish(self, process: SimProcess, write: int, shards: list[int], how: Storing) -> None:
        if process.dead:
            return
        indices = [index for number, index in process.fills if number == write]
        for index in indices:
            for shard in shards:
                process.fills[write, index].write(shard, process.fills[write, index].expected[shard])
        if how.ending == "die":
            process.die()
            return
        if how.ending == "leave":
            return
        if how.ending == "commit":
            self._commit(process, write, indices, shards)
        elif how.ending == "singly":
            for index in indices:
                self._commit(process, write, [index], shards)
        for index in indices:
            process.fills.pop((write, index), None)
        process.tell(engine.Abort(write))

    def _commit(self, process: SimProcess, write: int, indices: list[int], shards: list[int]) -> None:
        views = [process.fills.pop((write, index)) for index in indices]
        checksums = b"".join(view.expected[shard] for view in views for shard in shards)
        mask = sum(1 << shard for shard in shards)

        def committed(reply: engine.Committed) -> None:
            self.answers.append(reply)
            known = (Code.COMMITTED, Code.RESERVED, Code.EXPIRED)
            assert all(code in known for code in reply.codes)

        process.request(lambda number: engine.Commit(number, write, tuple(indices), mask, checksums), committed)


def _took(how: Reading, lease: int) -> Took:
    return () if how.took is None else ((lease, *how.took),)
