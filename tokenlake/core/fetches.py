"""Segments on their way here: one transfer for many waiters.

A *flight* is one pull from one node into slots reserved here. Whoever wants a segment that is in flight waits
for that flight. The slots stay pinned by the flight until its receiver has returned, so late bytes never
reach a slot that has a new owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tokenlake.core.background import Background
from tokenlake.core.context import Context
from tokenlake.core.instructions import AbortFetch, Note, StartFetch
from tokenlake.core.peers import Peers
from tokenlake.core.timers import Timer
from tokenlake.hints import NO_HINTS, Hints
from tokenlake.identity import NodeId, SegmentKey, TenantId
from tokenlake.metrics import Metric
from tokenlake.store import Kind, Segment, State
from tokenlake.wire import Code
from tokenlake.wire import peer as wire
from tokenlake.wire.checks import KNOWN_CODES
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys

__all__ = ["Fetches", "OnArrival", "deadline_s"]

ARRIVED = Metric("tokenlake_received_segments_total", "Segments received whole from other nodes")
ARRIVED_BYTES = Metric("tokenlake_received_bytes_total", "Bytes of segments received whole from other nodes")
CORRUPT = Metric("tokenlake_corrupt_segments_total", "Segments whose checksum was wrong on arrival")
ABORTED = Metric("tokenlake_aborted_fetches_total", "Transfers that missed their deadline")

OnArrival = Callable[[Segment | None, Code], None]
"""Called once: the segment, pinned for the caller, with LOCAL; or None with the reason."""


def deadline_s(predicted_s: float) -> float:
    """Give-up time of a transfer: predicted x 3 + 50 ms (design section 6)."""
    return predicted_s * 3 + 0.050


class _Flight:
    def __init__(self, node: NodeId, tenant: TenantId, kind: Kind, slot_bytes: int, shards: int, wait_s: float) -> None:
        self.node = node
        self.tenant = tenant
        self.kind = kind
        self.slot_bytes = slot_bytes
        self.shards = shards
        self.wait_s = wait_s
        self.request = ""
        self.began = 0.0
        self.segments: list[Segment] = []
        self.timer: Timer | None = None

    @property
    def background(self) -> bool:
        """No engine waits for it."""
        return self.kind is not Kind.CACHED

    @property
    def nbytes(self) -> int:
        return self.slot_bytes * len(self.segments)


class Fetches:
    """Flights, by id and by segment."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._flights: dict[int, _Flight] = {}
        self._waiters: dict[Segment, list[OnArrival]] = {}
        self._background = Background(context.config.background_share)
        self._queue: dict[_Flight, None] = {}
        """What waits for its turn: no engine reads it."""
        self._queued: dict[Segment, _Flight] = {}
        """Where each segment of the queue waits."""

    def bring(
        self,
        node: NodeId,
        tenant: TenantId,
        wanted: Sequence[tuple[SegmentKey, int, OnArrival]],
        *,
        kind: Kind,
        slot_bytes: int,
        shards: int,
        wait_s: float,
        request: str = "",
        hints: Hints | None = None,
    ) -> None:
        """Fetch (key, depth) each from `node` as copies of `kind`. Those that are here or on their way already
        are not fetched again; those without a slot are refused at once. `wait_s`: give up after this."""
        flight = _Flight(node, tenant, kind, slot_bytes, shards, wait_s)
        flight.request = request
        refused: list[tuple[OnArrival, Code]] = []
        for key, depth, on_arrival in wanted:
            known = self._context.store.get(tenant, key)
            if known is not None:
                self._join(known, on_arrival, refused)
                if known in self._queued and not flight.background:
                    # An engine wants it: the piece that it waits in goes now.
                    self._leave_queue(self._queued[known])
                continue
            segment = self._context.store.reserve(
                tenant, slot_bytes, key, kind, depth, self._context.now, hints or NO_HINTS
            )
            if isinstance(segment, Code):
                refused.append((on_arrival, segment))
                continue
            segment.source = node if kind is Kind.CACHED else None
            self._waiters[segment] = [on_arrival]
            flight.segments.append(segment)
        if flight.segments and flight.background:
            self._wait_in_turn(flight)
        elif flight.segments:
            self._depart(flight)
        for on_arrival, code in refused:
            on_arrival(None, code)

    def _join(self, known: Segment, on_arrival: OnArrival, refused: list[tuple[OnArrival, Code]]) -> None:
        if known in self._waiters:
            self._waiters[known].append(on_arrival)
        elif known.state is State.READY:
            self._context.store.pin(known)
            on_arrival(known, Code.LOCAL)
        else:
            # A local engine is writing it: its commit may never come, so nobody waits for it here.
            refused.append((on_arrival, Code.PENDING))

    def _depart(self, flight: _Flight) -> None:
        fetch = self._context.next_id()
        self._flights[fetch] = flight
        self._background.departs(flight.nbytes, background=flight.background)
        flight.began = self._context.now
        flight.timer = self._context.after(flight.wait_s, lambda: self._abort(fetch))
        keys = join_keys(segment.key for segment in flight.segments)
        slots = b"".join(segment.packed for segment in flight.segments)
        self._context.emit(
            StartFetch(
                fetch,
                flight.node,
                flight.tenant,
                keys,
                slots,
                flight.slot_bytes,
                flight.shards,
                flight.request,
                background=flight.background,
            )
        )

    # -- what no engine waits for

    def _wait_in_turn(self, flight: _Flight) -> None:
        """In pieces, so that what an engine wants next waits for a piece at most."""
        piece_s = self._peers.predict_s(flight.node, flight.slot_bytes)
        size = self._background.piece(flight.slot_bytes, piece_s)
        for start in range(0, len(flight.segments), size):
            piece = _Flight(flight.node, flight.tenant, flight.kind, flight.slot_bytes, flight.shards, flight.wait_s)
            piece.request = flight.request
            piece.segments = flight.segments[start : start + size]
            piece.timer = self._context.after(flight.wait_s, partial(self._too_late, piece))
            self._queue[piece] = None
            self._queued.update(dict.fromkeys(piece.segments, piece))
        self._depart_more()

    def _depart_more(self) -> None:
        while self._queue:
            piece = next(iter(self._queue))
            if not self._background.may_depart(piece.nbytes):
                return
            self._leave_queue(piece)

    def _leave_queue(self, piece: _Flight) -> None:
        self._unqueue(piece)
        if piece.timer is not None:
            piece.timer.cancel()
        self._depart(piece)

    def _unqueue(self, piece: _Flight) -> None:
        del self._queue[piece]
        for segment in piece.segments:
            del self._queued[segment]

    def _too_late(self, piece: _Flight) -> None:
        """Whoever offered it has given up by now."""
        self._unqueue(piece)
        for segment in piece.segments:
            self._context.store.unpin(segment)
            self._context.store.discard(segment, self._context.now)
        for segment in piece.segments:
            for on_arrival in self._waiters.pop(segment):
                on_arrival(None, Code.LOST)

    def _abort(self, fetch: int) -> None:
        self._context.counters.add(ABORTED)
        flight = self._flights[fetch]
        self._peers.silent_since(flight.node, flight.began)
        nbytes = sum(segment.slot_bytes for segment in flight.segments)
        self._peers.missed(flight.node, nbytes, self._context.now - flight.began)
        self._context.emit(AbortFetch(fetch))
        self._note(flight, "missed its deadline")

    def _note(self, flight: _Flight, what: str) -> None:
        named = f" for request {flight.request!r}" if flight.request else ""
        self._context.emit(Note(f"a fetch of {len(flight.segments)} segments from {flight.node}{named}: {what}"))

    def check_done(self, fetch: int, codes: bytes, checksums: bytes) -> None:
        """Raises `ValueError` when no such fetch is under way, or this cannot have become of it. Changes nothing."""
        flight = self._flights.get(fetch)
        if flight is None:
            raise ValueError(f"fetch {fetch} is not under way")
        count = len(flight.segments)
        if len(codes) != count or codes.translate(None, KNOWN_CODES):
            raise ValueError(f"fetch {fetch} of {count} segments ended with the codes {codes.hex()}")
        if len(checksums) != CHECKSUM_BYTES * flight.shards * count:
            raise ValueError(
                f"fetch {fetch} of {count} segments of {flight.shards} shards ended with {len(checksums)} bytes of "
                "checksums"
            )

    def done(self, fetch: int, codes: bytes, checksums: bytes) -> None:
        """The receiver returned: publish what arrived, give back the rest, tell the waiters."""
        flight = self._flights.pop(fetch)
        if flight.timer is not None:
            flight.timer.cancel()
        self._background.returned(background=flight.background)
        store = self._context.store
        size = len(checksums) // max(1, len(codes))
        arrived = [s for s, code in zip(flight.segments, codes, strict=True) if code == Code.LOCAL]
        for index, segment in enumerate(flight.segments):
            if codes[index] == Code.LOCAL:
                store.publish(segment, checksums[index * size : (index + 1) * size], self._context.now)
            else:
                store.unpin(segment)
                store.discard(segment, self._context.now)
        if Code.BAD_CHECKSUM in codes:
            self._report(flight, [s.key for s, c in zip(flight.segments, codes, strict=True) if c == Code.BAD_CHECKSUM])
        store.touch([s for s in arrived if s.kind is not Kind.DIRTY], self._context.now)
        nbytes = sum(segment.slot_bytes for segment in arrived)
        self._context.counters.add(ARRIVED, len(arrived))
        self._context.counters.add(ARRIVED_BYTES, nbytes)
        if arrived:
            self._peers.measured(flight.node, nbytes, self._context.now - flight.began)
        for index, segment in enumerate(flight.segments):
            code = Code(codes[index])
            for on_arrival in self._waiters.pop(segment):
                if code is Code.LOCAL:
                    store.pin(segment)
                    on_arrival(segment, code)
                else:
                    on_arrival(None, code)
            if code is Code.LOCAL:
                store.unpin(segment)
        self._depart_more()

    def _report(self, flight: _Flight, wrong: list[SegmentKey]) -> None:
        """The node that sent these checks its copies; what is wrong there, and not on the way, it drops."""
        self._context.counters.add(CORRUPT, len(wrong))
        self._note(flight, f"{len(wrong)} arrived with a wrong checksum")
        for key in wrong:
            self._context.store.found_corrupt(flight.tenant, key)
        self._peers.tell(flight.node, wire.Corrupt(flight.tenant, join_keys(wrong)))

    def pinned(self) -> Iterator[Segment]:
        """A segment per pin held here; for integrity checks."""
        return (segment for flight in (*self._flights.values(), *self._queue) for segment in flight.segments)

    def census(self) -> dict[str, int]:
        """Entries of each map."""
        return {
            "flights": len(self._flights),
            "flights to come": len(self._queue),
            "segments in flight": len(self._waiters),
        }

    def check_integrity(self) -> None:
        """AssertionError when a segment waits in no flight or in two."""
        flying = list(self.pinned())
        assert len(flying) == len(set(flying)) == len(self._waiters)
        assert all(segment in self._waiters for segment in flying)
        assert self._queued == {segment: piece for piece in self._queue for segment in piece.segments}
