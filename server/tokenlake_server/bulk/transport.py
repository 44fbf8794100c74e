"""The contract of transports.

A reader asks for segments on a bulk connection, and the sender answers there. A transport carries the bytes:

::

    reader                                     sender
      | Pull: keys, and the agent of the sender --->| the rules pin the slots
      |<---------------- Pulled: codes, checksums --| TCP: the bytes follow, and the pins end with the last one
      |                                             | NIXL: places. The reader reads them by itself, sends `Taken`, and
      |                                             | the pins end with the last `Taken`, or with the connection
      | each segment is verified before it counts   |

The reader offers what it can use, and the sender chooses (`choice.Transports`): a sender that cannot be read any more
answers with bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenlake.wire import peer
from tokenlake.wire.slots import SlotRef
from tokenlake_server.bulk.stream import BulkStream

SEND_STALL_S = 10
"""Seconds after which a bulk connection is closed whose receiver has taken no bytes (twice as long in the worst case),
so that a frozen receiver does not keep the slots pinned."""


class Settling(Protocol):
    """A read that has ended for its reader, and that may still write."""

    def on_settled(self, call: Callable[[], None]) -> None:
        """Call `call` once, from any thread, when the read writes no more; at once if it does not any more."""


class ReadFailed(OSError):
    """A transport failed while the bulk connection is sound: the sender may be asked again, for bytes over TCP."""


Use = Callable[[object, Callable[[], None]], None]
"""Function that names a resource that the reader waits for and a call that ends the wait, which another thread makes
when the fetch is aborted. Raises TimeoutError when it was aborted before."""


@dataclass
class Incoming:
    """Segments that a sender has promised in its answer, for one thread of the reader."""

    node: str
    stream: BulkStream
    answer: peer.Pulled
    slots: Sequence[memoryview]
    """The slots that receive the segments, in the order of the answer."""
    until: float
    """The time (`time.monotonic`) at which the first bytes must have come."""
    stall_s: float
    """Seconds without progress after which the transfer is given up."""
    began: Callable[[], None]
    """To be called when the first bytes have come."""
    use: Use
    hold: Callable[[Settling, range], None]
    """To be called with a read that may still write, and the indices of the slots into which it may."""
    buffer: bytearray
    """Memory of the caller for encrypted bytes, which the transport may use during the transfer."""


class Inflow(Protocol):
    """The bytes of the segments of an `Incoming`, one segment after the other."""

    def fill(self, target: memoryview) -> None:
        """Return when `target`, which is the next part of the slots, has its bytes. Raises OSError: TimeoutError when
        no progress is made in time, ConnectionError when the sender ends, `ReadFailed`; and `ProtocolRefused`."""

    def taken(self, count: int) -> None:
        """Record that the first `count` segments have been verified. Raises OSError."""


@dataclass
class Outgoing:
    """Segments that a sender has pinned for a reader, and its answer."""

    stream: BulkStream
    answer: peer.Pulled
    """The answer without the places of segments in memory, which a transport may add."""
    slots: Sequence[SlotRef]
    """The segments whose code is LOCAL, in order; none where a probe is answered, with `answer.slot_bytes` bytes."""
    until: float
    """The time (`time.monotonic`) at which the reader must have taken all bytes."""
    limit_s: float
    """The seconds of that limit, for messages."""


class Transport(Protocol):
    """Carries the bytes of segments between two daemons. Used by many threads at the same time."""

    def receive(self, incoming: Incoming) -> contextlib.AbstractContextManager[Inflow]:
        """The bytes of the segments. When the context is left, no more bytes come into the slots, but for those that
        were given to `incoming.hold`."""

    def send(self, outgoing: Outgoing) -> None:
        """Send the answer, and return when the reader does not need the slots any more. Raises OSError when the reader
        has ended or takes too long, and `ProtocolRefused`."""
