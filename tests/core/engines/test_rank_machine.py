"""The ranks of one engine store together: up to 64 processes, each with its shards of every segment.

100 examples of 40 steps, with 1, 16, 32 or 64 ranks and 8 to 64 shards. In a step the scheduler reserves or gives up
slots; a rank attaches, commits its shards, leaves, or dies and starts anew; or time passes, beyond the deadline of the
writes too. After each step the core is whole, and the segments that another engine finds are those whose shards were
all committed in time, with the checksums of their writers.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.connector.test_ranks import layout
from tests.profiles import examples
from tokenlake.core import NodeCore, events
from tokenlake.core.context import CoreConfig
from tokenlake.core.instructions import Answer, MakeRegion, Welcomed
from tokenlake.directory.ring_record import RingRecord
from tokenlake.wire import Code, engine
from tokenlake_client.engines.vllm.known.ranks import rank_shards

KEYS = [number.to_bytes(32, "big") for number in range(24)]
SHAPES = ((1, 8), (1, 64), (16, 8), (16, 32), (16, 64), (32, 32), (64, 64), (64, 8), (20, 40))
"""Ranks, and KV heads of the model."""
MEMORY = 1 << 20
SCHEDULER, READER = 1, 2
picks = st.integers(0, 1 << 10)


def checksum(key: bytes, shard: int) -> bytes:
    """The checksum of a shard in this test."""
    return key[-2:] + shard.to_bytes(6, "big")


class Write:
    """A write as the model knows it: per open index, the key, the committed shards, and the processes that hold it."""

    def __init__(self, keys: dict[int, bytes], began: float) -> None:
        self.keys = keys
        self.masks = dict.fromkeys(keys, 0)
        self.holders = {SCHEDULER: set(keys)}
        self.filled: dict[int, set[int]] = {}
        self.began = began
        self.expired = False

    def give_back(self, connection: int, indices: set[int]) -> None:
        """The process does not write these any more; what no process holds is discarded."""
        held = self.holders.get(connection, set())
        for index in indices & held:
            held.discard(index)
            if not any(index in others for others in self.holders.values()):
                del self.keys[index]


class RankMachine(RuleBasedStateMachine):
    """Compares a core with the model."""

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: tuple[int, int]) -> None:
        self.size, heads = shape
        self.layout = layout(heads)
        self.whole = (1 << self.layout.shards) - 1
        self.config = CoreConfig("n", 1, RingRecord.of({"n": 1}), 1, MEMORY, made=False, sync_grace_s=0.0)
        self.core, self.now = NodeCore(self.config), 100.0
        self.core.start(self.now)
        self.session, self.last = 0, READER
        self.writes: dict[int, Write] = {}
        self.ready: set[bytes] = set()
        self.join(SCHEDULER)
        self.ranks = [self.start_rank() for _ in range(self.size)]
        self.join(READER, other=True)

    def feed(self, event: events.Event) -> list[Any]:
        """The answers to an event, and the numbers of sessions."""
        found: list[Any] = []
        for out in self.core.handle(event, self.now):
            if isinstance(out, MakeRegion):
                found += self.feed(events.RegionReady(out.region))
            elif isinstance(out, Answer):
                found.append(out.message)
            elif isinstance(out, Welcomed):
                found.append(out.session)
        return found

    def join(self, connection: int, *, other: bool = False) -> None:
        session = 0 if other else self.session
        (number,) = self.feed(events.Joined(connection, 1, "default", 4096, self.layout.shards, 16, session, 0))
        self.session = self.session or number

    def start_rank(self) -> int:
        self.last += 1
        self.join(self.last)
        return self.last

    def ask(self, connection: int, message: engine.EngineRequest) -> Any:
        (reply,) = self.feed(events.Requested(connection, message))
        return reply

    def pick(self, pick: int) -> tuple[int, Write]:
        return sorted(self.writes.items())[pick % len(self.writes)]

    # -- rules

    @rule(first=st.integers(0, len(KEYS) - 3), count=st.integers(1, 3))
    def reserve(self, first: int, count: int) -> None:
        keys = KEYS[first : first + count]
        reply = self.ask(SCHEDULER, engine.Prepare(1, b"".join(keys), first))
        pending = {key for write in self.writes.values() if not write.expired for key in write.keys.values()}
        expected = [
            Code.EXISTS if key in self.ready else Code.PENDING if key in pending else Code.RESERVED for key in keys
        ]
        assert list(reply.codes) == expected
        reserved = {at: key for at, key in enumerate(keys) if expected[at] == Code.RESERVED}
        assert bool(reply.write) == bool(reserved)
        if reserved:
            self.writes[reply.write] = Write(reserved, self.now)

    @precondition(lambda self: self.writes)
    @rule(pick=picks, rank=picks)
    def attach(self, pick: int, rank: int) -> None:
        number, write = self.pick(pick)
        connection = self.ranks[rank % self.size]
        reply = self.ask(connection, engine.Attach(1, number))
        code = Code.EXPIRED if write.expired else Code.RESERVED
        assert {at: each for at, each in enumerate(reply.codes) if each != Code.COMMITTED} == dict.fromkeys(
            write.keys, code
        )
        write.holders[connection] = set(write.keys)

    @precondition(lambda self: self.writes)
    @rule(pick=picks, rank=picks, all_of_them=st.booleans())
    def commit(self, pick: int, rank: int, all_of_them: bool) -> None:
        """A rank commits its shards of the segments that it holds; or all ranks do, from this one on."""
        number, write = self.pick(pick)
        for at in range(self.size if all_of_them else 1):
            self.commit_one(number, write, (rank + at) % self.size)
            if not self.writes.get(number):
                return

    def commit_one(self, number: int, write: Write, rank: int) -> None:
        connection, own = self.ranks[rank], rank_shards(self.layout, rank, self.size)
        if not write.holders.get(connection):
            if write.expired or not own.writes:
                return
            self.attach(sorted(self.writes).index(number), rank)
        if not own.writes:
            return
        held = sorted(write.holders[connection])
        keys = [write.keys[index] for index in held]
        sums = b"".join(checksum(key, shard) for key in keys for shard in range(own.first, own.stop))
        reply = self.ask(connection, engine.Commit(1, number, tuple(held), own.mask, sums))
        if write.expired:
            assert list(reply.codes) == [Code.EXPIRED] * len(held)
            write.give_back(connection, set(held))
        else:
            for index, code in zip(held, reply.codes, strict=True):
                write.masks[index] |= own.mask
                done = write.masks[index] == self.whole
                assert code == (Code.COMMITTED if done else Code.RESERVED)
                write.filled.setdefault(connection, set()).add(index)
                if done:
                    self.ready.add(write.keys.pop(index))
                    for holder in write.holders.values():
                        holder.discard(index)
        self.forget_ended()

    @precondition(lambda self: self.writes)
    @rule(pick=picks, rank=st.none() | picks)
    def leave(self, pick: int, rank: int | None) -> None:
        """A rank, or the scheduler, gives a write back."""
        number, write = self.pick(pick)
        connection = SCHEDULER if rank is None else self.ranks[rank % self.size]
        self.feed(events.Requested(connection, engine.Abort(number)))
        write.give_back(connection, set(write.keys))
        self.forget_ended()

    @rule(rank=picks)
    def die(self, rank: int) -> None:
        at = rank % self.size
        gone, self.ranks[at] = self.ranks[at], self.start_rank()
        self.feed(events.ProcessGone(gone))
        for write in self.writes.values():
            write.give_back(gone, set(write.keys))
        self.forget_ended()

    @rule(seconds=st.sampled_from((0.1, 5.0, 40.0)))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.core.next_wake()) is not None and due <= until:
            self.now = max(self.now, due)
            for connection in (SCHEDULER, READER):
                self.feed(events.Requested(connection, engine.Heartbeat(1)))
            self.feed(events.Tick())
        self.now = until
        for write in self.writes.values():
            if not write.expired and write.began + self.config.reservation_s <= until:
                write.expired = True
                for connection, indices in write.filled.items():
                    write.give_back(connection, indices)
        self.forget_ended()

    def forget_ended(self) -> None:
        self.writes = {number: write for number, write in self.writes.items() if write.keys}

    # -- invariants

    @invariant()
    def whole_segments_are_found(self) -> None:
        if not hasattr(self, "ranks"):
            return
        self.core.check_integrity()
        reply = self.ask(READER, engine.Match(1, b"".join(KEYS), 0.0, checksums=True, independent=True))
        found = {key for key, code in zip(KEYS, reply.codes, strict=True) if code == Code.LOCAL}
        assert found == self.ready
        sums = b"".join(checksum(key, at) for key in KEYS if key in found for at in range(self.layout.shards))
        assert reply.checksums == sums
        self.feed(events.Requested(READER, engine.Release(((reply.lease, 0, len(KEYS)),), True)))

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        for connection in (SCHEDULER, READER, *self.ranks):
            self.feed(events.ProcessGone(connection))
        assert self.core.idle()
        self.core.check_integrity()


TestRanks = RankMachine.TestCase
TestRanks.settings = settings(max_examples=examples(100), stateful_step_count=40)
