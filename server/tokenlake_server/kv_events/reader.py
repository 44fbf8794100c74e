"""The connections of readers: of events, and of replays.

A reader is a position in the messages that the stream keeps anyway: one that reads slowly costs no memory, and misses
those that are dropped before it comes to them. Its messages are read a little at a time, and a subscription is kept as
a length, because it either is a beginning of the topic of the stream or of no use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tokenlake.errors import ProtocolRefused
from tokenlake_server.kv_events.replay import Replay
from tokenlake_server.kv_events.zmtp import Incoming, message, opening

log = logging.getLogger(__name__)

MAX_REPLAYS = 8
"""Limit of the replays at a time; further requests are answered as if the messages were not kept."""
READY_S = 5.0
"""Seconds in which a connection must be READY."""
IDLE_S = 60.0
"""Seconds after which a reader of events that has not subscribed to this stream is closed."""
STALL_S = 5.0
"""Seconds after which the reader of a replay is closed if it takes no message."""
READ_BYTES, READS, READ_PAUSE_S = 2048, 16, 0.2
"""After so many reads of at most `READ_BYTES` from one connection come `READ_PAUSE_S` seconds without one."""
WRITE_BYTES = 64 << 10
"""Bytes that wait in this process for a reader, beyond which it is sent no further message."""
SLICE, SLICE_S = 32, 0.01
"""Limit of the messages that one reader gets at once, and the seconds until it gets further ones."""
NUMBER_BYTES = 8
_END = b"\xff" * NUMBER_BYTES

Refuse = Callable[[str, str], None]
"""Counts a connection that is closed: (a word for reasons that are logged as one, reason)."""


class Published:
    """What the readers of a stream share."""

    def __init__(self, topic: str, kept: Replay) -> None:
        self.topic = topic.encode()
        self.kept = kept
        self.replays = 0
        """Number of the replays that are under way."""
        self.refused = 0
        """Number of requests that were malformed, or beyond `MAX_REPLAYS`."""
        self.wanted = False
        """True if a reader has to be told all blocks anew: it has subscribed, or asks for messages that are not kept.
        The publisher takes it back."""

    def refuse_request(self, reason: str) -> None:
        """Count a request for a replay that is refused."""
        if not self.refused:
            log.warning("a request for a replay of '%s' was refused: %s", self.topic.decode(), reason)
        self.refused += 1


class Reader(asyncio.BufferedProtocol):
    """The connection of a reader."""

    kind: str
    """The kind of this side's ZMQ socket."""
    kinds: frozenset[str]
    """The kinds of the other side's."""
    prefix: tuple[bytes, ...] = ()
    """The frames of a message before the topic."""

    def __init__(self, published: Published, refuse: Refuse, left: Callable[[Reader], None]) -> None:
        """`left` is called when the connection has ended."""
        self._published = published
        self._refuse = refuse
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._chunk = memoryview(bytearray(READ_BYTES))
        self._incoming = Incoming(self.kinds)
        self._transport: asyncio.Transport | None = None
        self._reads = 0
        self._full = False
        """True while the reader does not take what waits for it."""
        self._sliced = False
        """True while the rest of the messages waits for `SLICE_S`."""
        self._position: int | None = None
        """The number of the next message for this reader; None: it wants none."""
        self._timer: asyncio.TimerHandle | None = None

    # -- what happens at the connection (asyncio.BufferedProtocol)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        transport.write(opening(self.kind))
        self._within(READY_S, "it is not READY")

    def connection_lost(self, error: Exception | None) -> None:
        self._at_ease()
        self._end()
        self._transport = None
        self._left(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._chunk

    def buffer_updated(self, nbytes: int) -> None:
        was_ready = self._incoming.ready
        try:
            messages, answer = self._incoming.take(self._chunk[:nbytes])
        except ProtocolRefused as error:
            self._refuse("protocol", str(error))
            self.close()
            return
        assert self._transport is not None
        if answer and not self._full:
            self._transport.write(answer)
        if self._incoming.ready and not was_ready:
            self._at_ease()
            self.is_ready()
        for each in messages:
            self.received(each)
        self._reads += 1
        if self._reads >= READS and not self._transport.is_closing():
            self._reads = 0
            self._transport.pause_reading()
            self._loop.call_later(READ_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.pump()

    # -- for the kinds of readers

    def is_ready(self) -> None:
        """The connection is READY."""

    def received(self, frames: tuple[bytes, ...]) -> None:
        """A message of the reader."""

    def pump(self) -> None:
        """Send messages from the position of the reader on, as many as it takes."""
        sent = 0
        while self._position is not None and not self._full and not self._sliced and self._transport is not None:
            found = self._published.kept.next(self._position)
            if found is None or self.ends_before(found[0]):
                return
            if sent == SLICE:
                self._sliced = True
                self._loop.call_later(SLICE_S, self._next_slice)
                return
            self._position = found[0] + 1
            sent += 1
            self.send(found[0].to_bytes(NUMBER_BYTES, "big"), found[1])

    def ends_before(self, number: int) -> bool:
        """True if the message with this number is not sent."""
        return False

    def send(self, number: bytes, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message((*self.prefix, self._published.topic, number, payload)))

    def _next_slice(self) -> None:
        self._sliced = False
        self.pump()

    def _end(self) -> None:
        self._position = None

    def _within(self, seconds: float, reason: str) -> None:
        """Close the connection in so many seconds, unless `_at_ease` is called before."""
        self._at_ease()
        self._timer = self._loop.call_later(seconds, self._late, reason)

    def _at_ease(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, reason: str) -> None:
        self._refuse("late", reason)
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class EventReader(Reader):
    """A reader of events, which subscribes."""

    kind = "XPUB"
    kinds = frozenset(("SUB", "XSUB"))

    def __init__(self, published: Published, refuse: Refuse, left: Callable[[Reader], None]) -> None:
        super().__init__(published, refuse, left)
        self._lengths: set[int] = set()
        """The lengths of the subscriptions to this stream."""

    def is_ready(self) -> None:
        self._idle()

    def _idle(self) -> None:
        self._within(IDLE_S, f"it has not subscribed to this stream for {IDLE_S:.0f} s")

    def received(self, frames: tuple[bytes, ...]) -> None:
        head, beginning = frames[0][:1], frames[0][1:]
        if len(frames) != 1 or head not in (b"\0", b"\1") or not self._published.topic.startswith(beginning):
            return
        if head == b"\0":
            self._lengths.discard(len(beginning))
            if not self._lengths and self._position is not None:
                self._end()
                self._idle()
            return
        self._lengths.add(len(beginning))
        self._published.wanted = True
        if self._position is None:
            self._at_ease()
            self._position = self._published.kept.end


class ReplayReader(Reader):
    """A reader that asks for messages that it missed."""

    kind = "ROUTER"
    kinds = frozenset(("DEALER", "REQ", "ROUTER"))
    prefix = (b"",)

    def __init__(self, published: Published, refuse: Refuse, left: Callable[[Reader], None]) -> None:
        super().__init__(published, refuse, left)
        self._until = 0
        """The number behind that of the last message of the replay."""

    def received(self, frames: tuple[bytes, ...]) -> None:
        if len(frames) != 2 or frames[0] or len(frames[1]) != NUMBER_BYTES:
            self._published.refuse_request("it is not [empty, number of 8 bytes]")
            return
        self._end()
        if self._published.replays >= MAX_REPLAYS:
            self._published.refuse_request(f"{MAX_REPLAYS} others are under way")
            start = None
        else:
            start = self._published.kept.start(int.from_bytes(frames[1], "big"))
        self._published.wanted |= start is None
        if self._full:
            return  # it does not read what it was sent, and is closed soon
        if start is None:
            self.send(_END, b"")
            return
        self._until = self._published.kept.end
        self._position = start
        self._published.replays += 1
        self.pump()

    def pump(self) -> None:
        super().pump()
        self._finish()

    def ends_before(self, number: int) -> bool:
        # A message between was dropped before the reader came to it: what follows would be a gap.
        return number != self._position or number >= self._until

    def _finish(self) -> None:
        if self._position is None or self._full or self._sliced:
            return
        self._published.wanted |= self._position < self._until
        self._end()
        self.send(_END, b"")

    def _end(self) -> None:
        if self._position is not None:
            self._position = None
            self._published.replays -= 1

    def pause_writing(self) -> None:
        super().pause_writing()
        self._within(STALL_S, f"it takes no message of its replay for {STALL_S:.0f} s")

    def resume_writing(self) -> None:
        self._at_ease()
        super().resume_writing()
