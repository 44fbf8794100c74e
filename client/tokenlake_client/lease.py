"""What a match found, and the arrays that look at it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import ProtocolRefused, TokenLakeError, Unreachable
from tokenlake.hints import Hints
from tokenlake.identity import LeaseId, SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake.wire.engine import (
    HERE,
    AttendedInPlace,
    Corrupt,
    Fetch,
    Fetched,
    Heartbeat,
    Hint,
    Locate,
    Located,
    Match,
    Matched,
)
from tokenlake.wire.fields import CHECKSUM_BYTES
from tokenlake.wire.slots import join_keys, slot_array
from tokenlake_client.books import Books, Holding
from tokenlake_client.checksums import shard_checksums
from tokenlake_client.hands import Hands
from tokenlake_client.link import Link
from tokenlake_client.regions import Mapping, Window

__all__ = ["Lease", "PendingBeat", "PendingMatch", "PendingNodes", "Reading"]

log = logging.getLogger(__name__)

COPY_BYTES = 4 << 20
"""At most, at a time: what two threads share."""
_LOCAL = bytes([Code.LOCAL])
GRACE_S = 0.030
"""The daemon keeps its deadlines; this much later we stop waiting for it to say so."""


class Reading:
    """How a pool reads: shared by its leases. While it lives, so does the connection (`tokenlake_client.heart`)."""

    def __init__(self, books: Books, layout: Layout, verify: bool) -> None:
        self.books = books
        self.hands = Hands()
        self.layout = layout
        self.verify = verify
        self.corrupt = 0
        """Segments whose bytes did not match their checksum (only with `verify`)."""


class _Look:
    """One look at segments `start` to `stop` of a lease. The windows that `fetch` cut its arrays from refer to it, so
    it ends with the last view of any of them."""

    __slots__ = ("_lease", "_start", "_stop")

    def __init__(self, lease: Lease, start: int, stop: int) -> None:
        self._lease = lease
        self._start = start
        self._stop = stop

    def __del__(self) -> None:
        self._lease._looked(self._start, self._stop)


class Lease:
    """A promise not to evict the first `hits` of `keys`, kept alive by the pool's heartbeats.

    Leave it as a context manager, or `release` it. Arrays from one `fetch` keep all its segments leased beyond that,
    for as long as any view of any of them lives. Usable from several threads.
    """

    def __init__(
        self,
        reading: Reading,
        link: Link,
        keys: Sequence[SegmentKey],
        matched: Matched,
        request: str = "",
    ) -> None:
        """`link`: what the answer `matched` came over."""
        self.request = request
        """What the logs of the nodes call it by; empty for one that another process made."""
        hits = matched.hits
        self.id = LeaseId(matched.lease)
        """For another process of the session: `Pool.attach`."""
        self.keys = keys[:hits]
        self.hits = hits
        self.codes = matched.codes
        """What happened to each key that was asked for, one `Code` each."""
        self.link = link
        self._reading = reading
        self._books = reading.books
        # Packed as they came: a lease that is only counted, or fetched in part, unpacks no more than it needs.
        self._here = bytearray(matched.codes[:hits])
        self._places = slot_array(bytearray(matched.slots))
        self._checksums = bytearray(matched.checksums)
        """Empty unless the pool verifies."""
        self._holding = Holding(self.id, link, hits)
        self._books.hold(self._holding)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def incarnation(self) -> int:
        """Of the daemon that granted it; its number means nothing to another."""
        return self.link.incarnation

    @property
    def local_hits(self) -> int:
        """How many of the hits need no transfer now."""
        return self._here.count(Code.LOCAL)

    def nodes(self) -> list[str]:
        """The node where each segment lies, this daemon's for what is here; fewer than `hits` where one was lost.
        Raises `Unreachable`."""
        link = self._books.current(self.link)
        return _node_names(link, link.call(lambda number: Locate(number, self.id), Located))

    def begin_nodes(self) -> PendingNodes:
        """The same without waiting: `poll` the result. Raises `Unreachable`."""
        return PendingNodes(self._books.current(self.link), self.id)

    def fetch(self, start: int = 0, stop: int | None = None, deadline_s: float = 0.0) -> list[NDArray[np.uint8]]:
        """Read-only arrays of shape [segment_bytes] for the segments `start` to `stop` (default: `hits`), from
        the first on without a gap: fewer when something was lost on the way, or does not match its checksum
        where the pool verifies. Segments on other nodes are brought here first.

        `deadline_s`: give up after this; 0 lets the daemon predict it. Raises `Unreachable`.
        """
        stop = self.hits if stop is None else min(stop, self.hits)
        stop = self._come(start, stop, deadline_s)
        arrays = self._look(start, stop) if start < stop else []
        if self._reading.verify:
            for at, array in enumerate(arrays):
                if not self._is_right(start + at, array):
                    return arrays[:at]
        return arrays

    def copy_into(self, arrays: Sequence[NDArray[np.uint8]], start: int = 0, deadline_s: float = 0.0) -> int:
        """Copy the segments from `start` on into `arrays`, each writable, of shape [segment_bytes]; in two threads
        when they are large. Returns how many, from the first on, hold their segment: fewer than `arrays` where the
        lease ends, and where `fetch` would return fewer. The others are then worth nothing.

        Segments on other nodes are brought here first, as by `fetch`. Raises `Unreachable`.
        """
        stop = self._come(start, min(start + len(arrays), self.hits), deadline_s)
        if start >= stop:
            return 0
        places = self._places[start:stop].copy()
        mappings = self._mappings(places)
        slots = [mappings[region].slots[slot] for region, slot in zip(*_columns(places), strict=True)]
        parts = [
            (array[at : at + COPY_BYTES], slot[at : at + COPY_BYTES])
            for array, slot in zip(arrays, slots, strict=False)
            for at in range(0, len(slot), COPY_BYTES)
        ]
        self._reading.hands.each(_copy_part, parts, sum(slot.nbytes for slot in slots))
        right = np.empty(len(slots), np.bool_)
        for region, mapping in mappings.items():
            mine = places["region"] == region
            right[mine] = mapping.generations[places["slot"][mine]] == places["generation"][mine]
        count = len(slots) if right.all() else int(right.argmin())
        if self._reading.verify:
            for at in range(count):
                if not self._is_right(start + at, arrays[at]):
                    return at
        return count

    def shipped(self, stop: int) -> None:
        """The segments up to `stop` were attended to where they lie: for the daemon's counts. Never raises."""
        with contextlib.suppress(Unreachable):
            self._books.current(self.link).channel.tell(AttendedInPlace(self.id, stop))

    def hint(self, hints: Hints) -> None:
        """As `Pool.hint`, of all its segments, and of what is still to be read of it. Never waits, never raises."""
        if self.id:
            with contextlib.suppress(TokenLakeError):
                self._books.current(self.link).channel.tell(Hint(b"", hints, self.id))

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Give back the segments `start` to `stop` (default: all). Idempotent; never raises."""
        stop = self.hits if stop is None else min(stop, self.hits)
        if stop <= start or not self._holding.wanted[start:stop].any():
            return
        with self._books.lock:
            self._books.give_back(self._holding, start, self._holding.release(start, stop))
        self._books.sweep()

    def _come(self, start: int, stop: int, deadline_s: float) -> int:
        """Bring the segments `start` to `stop` here; up to which one they are, without a gap."""
        if self._here.count(Code.LOCAL, start, stop) < stop - start:
            reply = self._bring(start, stop, deadline_s)
            self._note(start, stop, reply.codes, reply.slots, reply.checksums)
        beyond = self._here[start:stop].lstrip(_LOCAL)
        return stop - len(beyond)

    def _bring(self, start: int, stop: int, deadline_s: float) -> Fetched:
        self._books.sweep()
        link = self._books.current(self.link)
        verify = self._reading.verify
        pending = link.channel.begin(
            lambda number: Fetch(number, self.id, start, stop, deadline_s, verify, self.request)
        )
        if deadline_s:
            return link.expect(link.channel.wait(pending, deadline_s + GRACE_S), Fetched)
        return link.expect(link.wait_while_alive(pending), Fetched)

    def _note(self, start: int, stop: int, codes: bytes, slots: bytes, checksums: bytes) -> None:
        if len(codes) > stop - start:
            raise ProtocolRefused("the daemon answered for more segments than were asked for")
        if self._reading.verify and len(checksums) != CHECKSUM_BYTES * self._reading.layout.shards * len(codes):
            raise ProtocolRefused(f"the daemon sent {len(checksums)} bytes of checksums for {len(codes)} segments")
        # A lease that ended at the daemon is answered with fewer codes: the rest is lost as well.
        end = min(stop, start + len(codes))
        size = CHECKSUM_BYTES * self._reading.layout.shards
        self._here[start:stop] = codes[: end - start] + bytes([Code.LOST]) * (stop - end)
        self._places[start:end] = slot_array(slots)
        if self._reading.verify:
            self._checksums[start * size : end * size] = checksums

    def _is_right(self, index: int, segment: NDArray[np.uint8]) -> bool:
        shards = self._reading.layout.shards
        size = CHECKSUM_BYTES * shards
        if shard_checksums(segment, shards) == self._checksums[index * size : (index + 1) * size]:
            return True
        self._reading.corrupt += 1
        # The daemon checks the copy again and drops it: engines that do not verify would go on reading it.
        with contextlib.suppress(TokenLakeError):
            self._books.current(self.link).channel.tell(Corrupt(self.id, index))
        return False

    def _mappings(self, places: NDArray[np.void]) -> dict[int, Mapping]:
        """Of the regions that they are in. Raises `Unreachable`."""
        regions = self._books.current(self.link).regions
        mappings = {region: regions.get(region) for region in dict.fromkeys(places["region"].tolist())}
        if places["slot"].max(initial=0) >= min((each.shape.slots for each in mappings.values()), default=1):
            raise ProtocolRefused("the daemon names a slot that its region does not have")
        return mappings

    def _look(self, start: int, stop: int) -> list[NDArray[np.uint8]]:
        """Arrays over the segments up to the first that was given back meanwhile."""
        places = self._places[start:stop].copy()
        mappings = self._mappings(places)
        with self._books.lock:
            self._books.current(self.link)
            stop = self._holding.look(start, stop)
            self._books.count_look()
        look = _Look(self, start, stop)
        windows = {region: np.asarray(Window(mapping, look)) for region, mapping in mappings.items()}
        regions, slots = _columns(places[: stop - start])
        return [windows[region][slot] for region, slot in zip(regions, slots, strict=True)]

    def _looked(self, start: int, stop: int) -> None:
        # Called by the garbage collector, perhaps in the middle of anything: only note it.
        self._books.ended_looks.append((self._holding, start, stop))


def _columns(places: NDArray[np.void]) -> tuple[list[int], list[int]]:
    """Regions and slots."""
    return places["region"].tolist(), places["slot"].tolist()


def _node_names(link: Link, placed: Located) -> list[str]:
    if any(HERE != owner >= len(placed.nodes) for owner in placed.owners):
        raise ProtocolRefused("the daemon names nodes that it does not list")
    return [link.node if owner == HERE else placed.nodes[owner] for owner in placed.owners]


def _copy_part(part: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
    np.copyto(*part)


class PendingMatch:
    """A match that was begun. For one thread."""

    def __init__(
        self,
        reading: Reading,
        keys: Sequence[SegmentKey],
        deadline_s: float,
        request: str,
        hints: Hints | None,
        tokens: int = 0,
        in_flight_wait_s: float = 0.0,
        planned: bool = False,
        in_flight_wait_per_segment_s: float = 0.0,
    ) -> None:
        self._request = request
        self._reading = reading
        self._keys = keys
        self._deadline_s = deadline_s
        self._patient = in_flight_wait_s > 0
        self._lease: Lease | None = None
        packed = join_keys(keys)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %r: match of %d segments", request, len(keys))
        self._link = reading.books.link
        waits = in_flight_wait_s, planned, in_flight_wait_per_segment_s
        self._pending = self._link.channel.begin(
            lambda number: Match(number, packed, deadline_s, reading.verify, request, hints, tokens, *waits)
        )

    def poll(self) -> Lease | None:
        """The lease once the answer is here, None before. Never waits. Raises `Unreachable`."""
        if self._lease is None:
            reply = self._link.channel.poll(self._pending)
            if reply is not None:
                self._lease = Lease(
                    self._reading, self._link, self._keys, self._link.expect(reply, Matched), self._request
                )
        return self._lease

    def wait(self) -> Lease:
        """The lease. Raises `Unreachable`, after the deadline at the latest; where it may wait for somebody, as soon as
        the daemon gives no sign of life."""
        if self._lease is None:
            if self._patient:
                reply = self._link.wait_while_alive(self._pending)
            else:
                reply = self._link.channel.wait(self._pending, self._deadline_s + GRACE_S)
            self._lease = Lease(self._reading, self._link, self._keys, self._link.expect(reply, Matched), self._request)
        return self._lease

    def cancel(self) -> None:
        """Nobody wants it: what was leased, if anything, is given back when the answer comes."""
        if self._lease is not None:
            self._lease.release()
        else:
            self._link.channel.drop(self._pending)


class PendingNodes:
    """`Lease.nodes` that was begun. For one thread."""

    def __init__(self, link: Link, lease: LeaseId) -> None:
        self._link = link
        self._pending = link.channel.begin(lambda number: Locate(number, lease))

    def poll(self) -> list[str] | None:
        """The nodes once the answer is here, None before. Never waits. Raises `Unreachable`."""
        reply = self._link.channel.poll(self._pending)
        return None if reply is None else _node_names(self._link, self._link.expect(reply, Located))

    def cancel(self) -> None:
        """Nobody wants it."""
        self._link.channel.drop(self._pending)


class PendingBeat:
    """A sign of life that was asked for. For one thread."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pending = link.channel.begin(Heartbeat)

    def poll(self) -> bool:
        """Has the daemon given it? Never waits. Raises `Unreachable`."""
        return self._link.channel.poll(self._pending) is not None
