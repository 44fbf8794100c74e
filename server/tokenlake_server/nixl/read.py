"""One read out of the memory of another node: its pieces, and the thread that waits for them."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenlake.errors import ProtocolRefused
from tokenlake.wire import peer
from tokenlake.wire.places import HOST, unpack_places
from tokenlake_server.bulk.transport import Incoming, ReadFailed
from tokenlake_server.nixl.agent import Span

PIECE_BYTES = 4 << 20
"""Bytes of a read, of one segment or several: a piece is verified while the next ones come."""
TAKEN_S = 1.0
"""Seconds after which a reader reports its progress to the sender."""


class Piece(NamedTuple):
    here: list[Span]
    there: list[Span]
    stop: int
    """Bytes of the whole read up to the end of this piece."""


class Read:
    """One read of a thread, cut into pieces that come in order. The reader calls `wait`, `cancel`, `end` and
    `on_settled`; the other methods are called by the agent's thread."""

    def __init__(self, node: str, agent: str, pieces: Sequence[Piece]) -> None:
        self.node = node
        self.agent = agent
        self.handles: deque[tuple[int, int]] = deque()
        """The pieces under way: NIXL's handle, and the bytes of the read up to the end of the piece."""
        self.ended_at = 0.0
        """The time at which the reader left; 0: it has not."""
        self.settled = False
        self.failed = ""
        """The reason why no further bytes will be received; empty while some may be."""
        self._pieces = deque(pieces)
        self._changed = threading.Condition()
        self._arrived = 0
        """The bytes of the read that are there, from its beginning on."""
        self._asked = 0
        """The bytes up to the end of the last piece that was started."""
        self._moved_at = 0.0
        self._cancelled = False
        self._calls: list[Callable[[], None]] = []

    def wait(self, nbytes: int, until: float, stall_s: float) -> None:
        """Wait until the first `nbytes` are there, at most until the time `until`, or `stall_s` after the last piece.
        Raises `ReadFailed`; and TimeoutError when it was cancelled."""
        with self._changed:
            while self._arrived < nbytes:
                if self._cancelled:
                    raise TimeoutError("aborted")
                left_s = max(until, self._moved_at + stall_s) - time.monotonic()
                if self.failed or left_s <= 0:
                    raise ReadFailed(self.failed or "no bytes came in time")
                self._changed.wait(left_s)

    def cancel(self) -> None:
        """End the wait of the reader."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def end(self) -> range:
        """The reader leaves: no further piece is started. Returns the bytes of the read that may still be written."""
        with self._changed:
            self.ended_at = time.monotonic()
            self._pieces.clear()
            return range(self._arrived, self._asked)

    def on_settled(self, call: Callable[[], None]) -> None:
        """See `Settling`."""
        with self._changed:
            if not self.settled:
                self._calls.append(call)
                return
        call()

    @property
    def whole(self) -> bool:
        """True if all pieces have come, or were started."""
        return not self._pieces

    def next_piece(self) -> Piece | None:
        """The next piece, which is started then; None where there is none."""
        with self._changed:
            if not self._pieces or self.failed:
                return None
            piece = self._pieces.popleft()
            self._asked = piece.stop
            return piece

    def not_started(self) -> None:
        """Record that the piece that was to be started was not, so that no piece is under way."""
        with self._changed:
            self._asked = self._arrived

    def came(self, stop: int) -> int:
        """Record that the bytes up to `stop` have been received. Returns the number of those that are new."""
        with self._changed:
            nbytes, self._arrived = stop - self._arrived, stop
            self._moved_at = time.monotonic()
            self._changed.notify_all()
        return nbytes

    def fail(self, reason: str) -> None:
        """Record that the read has failed: no further bytes are expected, although the network may still write some."""
        with self._changed:
            self.failed = self.failed or reason
            self._changed.notify_all()

    def settle(self) -> None:
        """Record that no piece of the read is under way any more, so that its slots may be reused."""
        with self._changed:
            self.settled = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()


class ReadInflow:
    """The bytes of a read; see `Inflow`."""

    def __init__(self, incoming: Incoming, read: Read) -> None:
        self._incoming = incoming
        self._read = read
        self._wanted = 0
        self._told_at = time.monotonic()

    def fill(self, target: memoryview) -> None:
        """See `Inflow`."""
        first = not self._wanted
        self._wanted += len(target)
        self._read.wait(self._wanted, self._incoming.until, self._incoming.stall_s)
        if first:
            self._incoming.began()

    def taken(self, count: int) -> None:
        """See `Inflow`."""
        now = time.monotonic()
        if count == len(self._incoming.slots) or now - self._told_at > TAKEN_S:
            self._told_at = now
            self._incoming.stream.send_frame(peer.Taken(count))


def pieces_of(incoming: Incoming) -> list[Piece]:
    """Cut a read into pieces of at most `PIECE_BYTES`, of whole segments or of one. Raises `ProtocolRefused`."""
    size = incoming.answer.slot_bytes
    try:
        places = unpack_places(incoming.answer.places)
    except ValueError as error:
        raise ProtocolRefused(f"node {incoming.node} sent no places: {error}") from error
    if len(places) != len(incoming.slots) or any(place.length != size for place in places):
        raise ProtocolRefused(f"node {incoming.node} sent the places of other segments than it has")
    pieces: list[Piece] = []
    here, there, room, stop = list[Span](), list[Span](), PIECE_BYTES, 0
    for slot, place in zip(incoming.slots, places, strict=True):
        address = address_of(slot)
        for at in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - at)
            if length > room:
                pieces.append(Piece(here, there, stop))
                here, there, room = [], [], PIECE_BYTES
            here.append((address + at, length, HOST))
            there.append((place.address + at, length, place.device))
            room -= length
            stop += length
    return [*pieces, Piece(here, there, stop)] if here else pieces


def address_of(memory: mmap.mmap | memoryview) -> int:
    """The address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
