"""A pool in this process, for the tests of programs that use one: no daemon, no other process, no network.

::

    with MemoryPool(layout) as pool:
        pool.store_all(keys, fill)                          # as with `Pool.connect(socket, layout)`

A `MemoryPool` is a `Pool` whose messages go to a `MemoryDaemon`: the rules of one node, with real slots in memory.
Codes, leases, pins, markers, budgets and quotas are therefore those of a daemon. Only other nodes and query engines are
missing. A request is answered before the call that sends it returns, unless the answer waits for another engine. Time
is that of the real clock."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.core import CoreConfig, NodeCore, events, instructions
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.identity import SegmentKey, SessionId
from tokenlake.keys import probe
from tokenlake.memory.region import GENERATION_BYTES, PAGE, RegionShape
from tokenlake.opaque_layout import AnyLayout, decode_layout
from tokenlake.wire import HEADER_BYTES, engine, pack_frame
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import join_keys, unpack_slots
from tokenlake.wire.version import PROTOCOL_VERSION
from tokenlake_client.channel import Channel, Pending
from tokenlake_client.checksums import shard_checksums
from tokenlake_client.deadlines import DEFAULT_DEADLINES, Deadlines
from tokenlake_client.heartbeat import Wake
from tokenlake_client.link import Connector, Link
from tokenlake_client.mapped_memory import MappedMemory
from tokenlake_client.pool import Pool

TENANT, SECRET = "memory", b"the secret of every memory pool."
PATH = Path("memory.sock")
REGIONS = 16
Intercept = Callable[[engine.EngineRequest], engine.EngineReply | None]


class MemoryPool(Pool):
    """A `Pool` at a `MemoryDaemon`, its own or that of other pools of the test."""

    def __init__(
        self,
        layout: AnyLayout,
        daemon: MemoryDaemon | None = None,
        *,
        session: SessionId | None = None,
        verify: bool = False,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> None:
        """`session`: join the session of another pool of the same daemon, as another process of an engine does.
        `verify`, `deadlines`: as of `Pool.connect`. Raises as `Pool.connect` does."""
        self.daemon = daemon or MemoryDaemon()
        wake = Wake()
        connector = _Connector(PATH, None, layout, None, wake, deadlines, daemon=self.daemon)
        super().__init__(connector, wake, session or SessionId(0), verify=verify)


class MemoryDaemon:
    """The rules of one node and its memory. Pools of several layouts, and several pools of one session, may use it.
    Thread-safe."""

    def __init__(self, memory: int = 64 << 20, quota: float = 1.0, node: str = "memory") -> None:
        """`memory`: bytes of the arena, of which only those are allocated that are used. `quota`: the largest share of
        it for segments."""
        self.node = node
        self.published: tuple[str, ...] = ()
        """The models whose segments this daemon publishes to routers: pools that connect later send their contents."""
        self.intercept: Intercept | None = None
        """Called with each message of a pool but the first of its connection, before the rules see it: a place to
        record messages, and to make calls fail. It may return another reply than theirs (the field `id` is set here),
        or raise a `TokenLakeError`, which the call raises then; None: the rules answer."""
        self.incarnation = 0
        self._memory, self._quota = memory, quota
        self._lock = threading.RLock()
        self._held: list[tuple[_Channel, engine.EngineRequest]] | None = None
        self._channels: dict[int, _Channel] = {}
        self.start()

    def start(self) -> None:
        """Begin a new life, without segments. Pools connect again in the background."""
        self.stop()
        with self._lock:
            self.incarnation += 1
            ring = RingRecord.of({self.node: 1})
            region_bytes = max(self._memory // REGIONS // PAGE * PAGE, PAGE)
            quotas = {TENANT: self._quota}
            config = CoreConfig(
                self.node, self.incarnation, ring, REGIONS, region_bytes, made=False, quotas=quotas, sync_grace_s=0.0
            )
            self._arena: dict[int, _Region] = {}
            self.core = NodeCore(config)
            self.stopped = False
            self.core.start(time.monotonic())
            self.tick()

    def stop(self) -> None:
        """End as a daemon that is killed: connections break, and arrays stay readable."""
        with self._lock:
            self.stopped = True
            self._held = None
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.end()

    def freeze(self) -> None:
        """Answer no request until `thaw`, as a daemon that is suspended."""
        with self._lock:
            self._held = self._held or []

    def thaw(self) -> None:
        """Answer the requests since `freeze`."""
        with self._lock:
            held, self._held = self._held or [], None
            for channel, message in held:
                self.request(channel, message)

    def evict(self, keys: Sequence[SegmentKey] = ()) -> None:
        """Evict these segments, or all, as an operator does."""
        with self._lock:
            self._handle(events.EvictRequested(1, TENANT, join_keys(keys)))

    def tick(self) -> float:
        """Do what is due. Returns the time of `time.monotonic` at which more is due."""
        with self._lock:
            if self.stopped or self._held is not None:
                return float("inf")
            while (due := self.core.next_wake()) is not None and due <= time.monotonic():
                self._handle(events.Tick())
            return float("inf") if due is None else due

    # -- the daemon's end of a connection

    def connect(self, channel: _Channel, hello: engine.Hello) -> None:
        """Let the process at `channel` join a session; `Welcome` follows."""
        with self._lock:
            if self.stopped:
                raise Unreachable("the memory daemon was stopped")
            same = hello.incarnation == self.incarnation
            number = max(self._channels, default=0) + 1
            channel.number, channel.layout = number, decode_layout(hello.layout)
            self._channels[number] = channel
            layout, session = channel.layout, hello.session if same or not hello.incarnation else 0
            sizes = layout.segment_bytes, layout.shards, layout.segment_tokens
            self._handle(events.Joined(number, hello.id, TENANT, *sizes, session, hello.resume if same else 0))

    def request(self, channel: _Channel, message: engine.EngineRequest) -> None:
        """Answer a message of a process that has joined."""
        self.tick()
        with self._lock:
            if self._held is not None:
                self._held.append((channel, message))
                return
            reply = self.intercept(message) if self.intercept is not None else None
            if reply is not None:
                channel.give(msgspec.structs.replace(reply, id=getattr(message, "id", 0)))
            elif isinstance(message, engine.OpenRegion):
                channel.give(*self._arena[message.region].opened(message))
            elif isinstance(message, engine.OpenQuery):
                channel.give(engine.Failed(message.id, Unreachable.__name__, "a memory daemon has no query engine"))
            elif isinstance(message, engine.Bye):
                self._channels.pop(channel.number, None)
                self._handle(events.ProcessGone(channel.number))
            elif not isinstance(message, engine.Unpublished):
                if isinstance(message, engine.Prepare):
                    message = msgspec.structs.replace(message, contents=())
                self._handle(events.Requested(channel.number, message))

    def _handle(self, event: events.Event) -> None:
        """Pass an event to the rules and carry out their instructions, with the events that follow from these."""
        left = deque([event])
        while left:
            for order in self.core.handle(left.popleft(), time.monotonic()):
                match order:
                    case instructions.Answer() if order.connection in self._channels:
                        self._channels[order.connection].give(order.message)
                    case instructions.Welcomed():
                        self._welcome(self._channels[order.connection], order)
                    case instructions.MakeRegion():
                        left.append(events.RegionReady(order.region))
                    case instructions.CutRegion():
                        self._arena[order.region] = _Region(RegionShape(order.nbytes, order.slot_bytes))
                    case instructions.CloseRegion():
                        self._arena.pop(order.region, None)
                        for channel in self._channels.values():
                            channel.give(engine.RegionClosed(0, order.region))
                    case instructions.Stamp():
                        for place in unpack_slots(order.slots):
                            self._arena[place.region].generations[place.slot] = place.generation
                    case instructions.CheckSlot():
                        (place,) = unpack_slots(order.slot)
                        shards = len(order.checksums) // CHECKSUM_BYTES
                        found = shard_checksums(self._arena[place.region].slot(place.slot), shards)
                        left.append(events.SlotChecked(order.check, found == order.checksums))

    def _welcome(self, channel: _Channel, order: instructions.Welcomed) -> None:
        welcome = engine.Welcome(
            id=order.request,
            version=PROTOCOL_VERSION,
            node=self.node,
            incarnation=self.incarnation,
            session=order.session,
            connection=channel.number,
            tenant=TENANT,
            secret=SECRET,
            probe=probe(SECRET, channel.layout.fingerprint()),
            heartbeat_s=self.core.config.lease_s / 3,
            max_frame=engine.MAX_FRAME,
            published=self.published,
        )
        channel.give(welcome)


class _Region:
    """The memory of one region; pools map it as they map a region of a daemon."""

    def __init__(self, shape: RegionShape) -> None:
        self._shape = shape
        self._descriptor = os.memfd_create("tokenlake-memory", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, shape.file_bytes)
        self._bytes = np.asarray(MappedMemory(self._descriptor, shape.file_bytes, write=True))
        self.generations = self._bytes[: shape.slots * GENERATION_BYTES].view(np.uint64)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def opened(self, message: engine.OpenRegion) -> tuple[engine.Region, int]:
        """The reply, and a descriptor that the receiver owns."""
        reply = engine.Region(message.id, message.region, *self._shape)
        return reply, os.dup(self._descriptor)

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot."""
        start = self._shape.offset(slot)
        return self._bytes[start : start + self._shape.slot_bytes]


@dataclass(frozen=True)
class _Connector(Connector):
    """Opens links to a `MemoryDaemon`."""

    daemon: MemoryDaemon = field(kw_only=True)

    def connect(self, session: SessionId, resume: int = 0, incarnation: int = 0) -> Link:
        channel = _Channel(self.daemon, self.on_end)
        hello = self._hello(session, resume, incarnation)
        try:
            welcome = Link.expect(channel.call(hello, self.deadlines.connect_s), engine.Welcome)
        except TokenLakeError:
            channel.close()
            raise
        return Link(channel, welcome, self.deadlines)


class _Channel(Channel):
    """A connection to a `MemoryDaemon`. Messages take the form that they have on the wire, and no socket."""

    def __init__(self, daemon: MemoryDaemon, on_end: Callable[[], None]) -> None:
        ours, self._other_end = socket.socketpair()
        super().__init__(ours, PATH, on_end)
        self._daemon = daemon
        self.number = 0
        self.layout: AnyLayout

    def end(self) -> None:
        """Called when the daemon has ended."""
        self._break(Unreachable("the memory daemon has ended"))

    def give(self, reply: engine.EngineReply, descriptor: int | None = None) -> None:
        """Hand a reply of the daemon to the thread that waits for it."""
        arrived = decode(engine.reply_decoder, pack_frame(reply)[HEADER_BYTES:])
        with self._changed:
            self._liveness.heard(time.monotonic())
            if descriptor is not None:
                self._descriptors.add([(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))])
            self._deliver(arrived)
            self._changed.notify_all()

    def _close_socket(self) -> None:
        super()._close_socket()
        self._other_end.close()

    def _request(self, message: engine.EngineRequest, pending: Pending | None = None) -> None:
        sent = decode(engine.request_decoder, pack_frame(message)[HEADER_BYTES:])
        try:
            if isinstance(sent, engine.Hello):
                self._daemon.connect(self, sent)
            else:
                self._daemon.request(self, sent)
        except TokenLakeError as error:
            if pending is None:
                raise
            self.drop(pending)
            pending.error = error

    def _await(self, request: Pending, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while not request.done:
            due = self._daemon.tick()
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            with self._changed:
                self._changed.wait_for(lambda: request.done, min(left_s, max(0.0, due - time.monotonic())))
        return request.done
