"""The service `Events`: streams of the changes of this node's segments and of the ring.

All streams read one log (`tokenlake/memory/changes.py`): a stream is a place in it, and a slow one costs no memory.

::

    no cursor  -> snapshot: the segments, a slice at a time, then the ring -> changes since the snapshot began
    a cursor   -> changes behind it
    either     -> OUT_OF_RANGE once the log has overtaken the stream: its reader takes a snapshot

A segment that changes during a snapshot may be in it or be absent; the changes behind the snapshot lead to the state
after it in both cases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import LimitReached
from tokenlake.memory import Cursor, State
from tokenlake.memory.changes import Change
from tokenlake_proto.v1 import events_pb2 as pb
from tokenlake_server.control.bridge import Bridge
from tokenlake_server.control.callers import Caller
from tokenlake_server.control.service import OutOfRange, Stream
from tokenlake_server.loop.driver import Driver

MAX_STREAMS = 64
"""Limit of the streams at a time; of one caller a quarter of it."""
PART = 512
"""Changes, or slots of a snapshot, in one message: some 40 KiB."""
POLL_S = 0.02
"""Seconds between two looks for changes, while streams wait for some."""
IDLE_S = 10.0
"""Seconds after which a stream without changes gets a message with its cursor."""


class Events:
    """The method of the service `Events`. It is called in the admin thread."""

    def __init__(self, bridge: Bridge, driver: Driver) -> None:
        self._bridge = bridge
        self._driver = driver
        self._log = driver.core.store.changes
        self._node = driver.core.config.node
        self._incarnation = driver.core.config.incarnation
        self._streams: Counter[str] = Counter()
        """Streams under way, by caller."""
        self._moved: asyncio.Future[None] | None = None
        """Done once the log has changes that the waiting streams have not read; None before the first stream waits."""
        self._poll: asyncio.Task[None] | None = None
        self.functions: dict[str, Stream] = {"Subscribe": self.subscribe}

    async def subscribe(self, caller: Caller, message: pb.SubscribeRequest) -> AsyncIterator[pb.SubscribeResponse]:
        """A snapshot and changes, or the changes behind a cursor."""
        tenant = None if caller.admin else caller.own().name
        with self._counted(f"{caller.role} {caller.tenant} {caller.name}"):
            if message.HasField("after"):
                at = message.after.sequence
                if message.after.incarnation != self._incarnation:
                    raise OutOfRange(f"the cursor is of another start of the daemon; {_SNAPSHOT}")
                if self._log.after(at, 0) is None:
                    raise OutOfRange(f"the log does not have the changes behind {at}; {_SNAPSHOT}")
            else:
                at = self._log.newest
                async for part in self._snapshot(tenant, at):
                    yield part
            while True:
                changes = self._log.after(at, PART)
                if changes is None:
                    raise OutOfRange(f"this stream was read too slowly: the log has overtaken {at}; {_SNAPSHOT}")
                if changes:
                    at = changes[-1].sequence
                    wanted = [_change(each) for each in changes if each.ring or tenant in (None, each.tenant)]
                    if wanted:
                        yield self._message(at, changes=wanted)
                elif not await self._wait(at):
                    yield self._message(at)

    def _message(self, at: int, **fields: object) -> pb.SubscribeResponse:
        cursor = pb.Cursor(incarnation=self._incarnation, sequence=at)
        return pb.SubscribeResponse(node=self._node, cursor=cursor, **fields)  # type: ignore[arg-type]

    async def _snapshot(self, tenant: str | None, at: int) -> AsyncIterator[pb.SubscribeResponse]:
        cursor: Cursor | None = Cursor()
        while cursor is not None:
            start = cursor

            def walk(start: Cursor = start) -> tuple[list[tuple[str, bytes, int, int]], Cursor | None]:
                segments, after = self._driver.core.store.walk(start, PART)
                ready = (each for each in segments if each.state is State.READY and tenant in (None, each.tenant))
                return [(each.tenant, each.key, each.slot_bytes, each.depth) for each in ready], after

            # The messages are made here: on the control loop they would take three times as long as the walk.
            found, cursor = await self._bridge.call(walk, tenant or "")
            if found:
                yield self._message(at, snapshot=pb.Snapshot(segments=[_segment(*each) for each in found]))
        record = await self._bridge.call(lambda: self._driver.core.record, tenant or "")
        yield self._message(at, snapshot=pb.Snapshot(ring=_ring(record), complete=True))

    @contextlib.contextmanager
    def _counted(self, caller: str) -> Iterator[None]:
        """Count a stream while it is under way. Raises `LimitReached`."""
        if self._streams.total() >= MAX_STREAMS or self._streams[caller] >= MAX_STREAMS // 4:
            raise LimitReached(
                f"{self._streams.total()} event streams are under way, {self._streams[caller]} of them of this caller; "
                f"the limit is {MAX_STREAMS}, and {MAX_STREAMS // 4} of one caller"
            )
        self._streams[caller] += 1
        try:
            yield
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    async def _wait(self, at: int) -> bool:
        """Wait for a change behind `at`. False after `IDLE_S` without one."""
        if self._moved is None or self._moved.done():
            self._moved = asyncio.get_running_loop().create_future()
            # One task looks for all streams.
            self._poll = asyncio.create_task(self._look(at, self._moved))
        try:
            async with asyncio.timeout(IDLE_S):
                await asyncio.shield(self._moved)
        except TimeoutError:
            return False
        return True

    async def _look(self, at: int, moved: asyncio.Future[None]) -> None:
        while self._log.newest == at:
            if not self._streams:
                break
            await asyncio.sleep(POLL_S)
        if not moved.done():
            moved.set_result(None)


_SNAPSHOT = "take a snapshot: subscribe without a cursor"


def _segment(tenant: str, key: bytes, slot_bytes: int, depth: int) -> pb.Segment:
    return pb.Segment(tenant=tenant, key=key, segment_bytes=slot_bytes, depth=depth)


def _ring(record: RingRecord) -> pb.RingChanged:
    return pb.RingChanged(epoch=record.epoch, members={name: each.weight for name, each in record.members.items()})


def _change(change: Change) -> pb.Change:
    if change.ring is not None:
        return pb.Change(sequence=change.sequence, ring=_ring(change.ring))
    segment = _segment(change.tenant, change.key, change.slot_bytes, change.depth)
    if change.stored:
        return pb.Change(sequence=change.sequence, stored=segment)
    return pb.Change(sequence=change.sequence, gone=segment)
