"""What a match found, and the arrays that look at it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import LeaseId, SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake.wire.engine import Fetch, Fetched, Match, Matched
from tokenlake.wire.slots import SLOT_BYTES, SlotRef, join_keys, unpack_slots
from tokenlake_client.books import Books, Holding
from tokenlake_client.checksums import CHECKSUM_BYTES, shard_checksums
from tokenlake_client.link import Link
from tokenlake_client.regions import Mapping, address_interface

__all__ = ["Lease", "PendingMatch", "Reading"]

GRACE_S = 0.030
"""The daemon keeps its deadlines; this much later we stop waiting for it to say so."""


class Reading:
    """How a pool reads: shared by its leases. While it lives, so does the connection (`tokenlake_client.heart`)."""

    def __init__(self, books: Books, layout: Layout, verify: bool) -> None:
        self.books = books
        self.layout = layout
        self.verify = verify
        self.corrupt = 0
        """Segments whose bytes did not match their checksum (only with `verify`)."""


class _Look:
    """Owns one look at one segment. It is the base of the array handed out and of every view of that, so it
    dies with the last of them; a finaliser on the array itself would fire while views of it live."""

    __slots__ = ("__array_interface__", "_index", "_lease", "_mapping")

    def __init__(self, lease: Lease, index: int, mapping: Mapping, slot: int) -> None:
        shape = mapping.shape
        self.__array_interface__ = address_interface(mapping.address + shape.offset(slot), shape.slot_bytes)
        self._lease = lease
        self._index = index
        self._mapping = mapping

    def __del__(self) -> None:
        self._lease._looked(self._index)


class Lease:
    """A promise not to evict the first `hits` of `keys`, kept alive by the pool's heartbeats.

    Leave it as a context manager, or `release` it. Arrays from `fetch` keep their segment leased beyond that,
    for as long as any view of them lives. Usable from several threads.
    """

    def __init__(
        self,
        reading: Reading,
        link: Link,
        keys: Sequence[SegmentKey],
        matched: Matched,
    ) -> None:
        """`link`: what the answer `matched` came over."""
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
        self._slots = bytearray(matched.slots)
        self._checksums = bytearray(matched.checksums)
        self._holding = Holding(self.id, link, hits)
        self._wanted = self._holding.wanted
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

    def fetch(self, start: int = 0, stop: int | None = None, deadline_s: float = 0.0) -> list[NDArray[np.uint8]]:
        """Read-only arrays of shape [segment_bytes] for the segments `start` to `stop` (default: `hits`), from
        the first on without a gap: fewer when something was lost on the way, or does not match its checksum
        where the pool verifies. Segments on other nodes are brought here first.

        `deadline_s`: give up after this; 0 lets the daemon predict it. Raises `Unreachable`.
        """
        stop = self.hits if stop is None else min(stop, self.hits)
        if self._here.count(Code.LOCAL, start, stop) < stop - start:
            reply = self._bring(start, stop, deadline_s)
            self._note(start, stop, reply.codes, reply.slots, reply.checksums)
        arrays: list[NDArray[np.uint8]] = []
        for index, place in enumerate(self._places(start, stop), start):
            if self._here[index] != Code.LOCAL:
                break
            array = self._look(index, place)
            if array is None:
                break
            reading = self._reading
            if reading.verify and shard_checksums(array, reading.layout.shards) != self._checksum(index):
                reading.corrupt += 1
                break
            arrays.append(array)
        return arrays

    def copy(self, index: int, out: NDArray[np.uint8]) -> bool:
        """Copy segment `index`, which `fetch` has brought here, into `out`. False when it is not here, or when
        its slot had another owner before the copy was done: `out` is then worth nothing."""
        if self._here[index] != Code.LOCAL:
            return False
        place = self._places(index, index + 1)[0]
        mapping = self._books.current(self.link).regions.get(place)
        np.copyto(out, mapping.slot(place.slot))
        return mapping.generation(place.slot) == place.generation

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Give back the segments `start` to `stop` (default: all). Idempotent; never raises."""
        stop = self.hits if stop is None else min(stop, self.hits)
        if stop <= start or not any(self._wanted[start:stop]):
            return
        with self._books.lock:
            looks = self._holding.looks
            free = [index for index in range(start, stop) if self._wanted[index] and not looks[index]]
            self._wanted[start:stop] = bytes(stop - start)
            self._books.give_back(self._holding, free)
        self._books.sweep()

    def _bring(self, start: int, stop: int, deadline_s: float) -> Fetched:
        self._books.sweep()
        link = self._books.current(self.link)
        pending = link.channel.begin(lambda number: Fetch(number, self.id, start, stop, deadline_s))
        if deadline_s:
            return link.expect(link.channel.wait(pending, deadline_s + GRACE_S), Fetched)
        return link.expect(link.wait_while_alive(pending), Fetched)

    def _note(self, start: int, stop: int, codes: bytes, slots: bytes, checksums: bytes) -> None:
        # A lease that ended at the daemon is answered with fewer codes: the rest is lost as well.
        end = min(stop, start + len(codes))
        size = CHECKSUM_BYTES * self._reading.layout.shards
        self._here[start:stop] = codes[: end - start] + bytes([Code.LOST]) * (stop - end)
        self._slots[start * SLOT_BYTES : end * SLOT_BYTES] = slots
        self._checksums[start * size : end * size] = checksums

    def _places(self, start: int, stop: int) -> list[SlotRef]:
        return unpack_slots(bytes(self._slots[start * SLOT_BYTES : stop * SLOT_BYTES]))

    def _checksum(self, index: int) -> bytes:
        size = CHECKSUM_BYTES * self._reading.layout.shards
        return bytes(self._checksums[index * size : (index + 1) * size])

    def _look(self, index: int, place: SlotRef) -> NDArray[np.uint8] | None:
        """None when the segment was given back meanwhile."""
        mapping = self._books.current(self.link).regions.get(place)
        with self._books.lock:
            self._books.current(self.link)
            if not self._wanted[index]:
                return None
            self._holding.looks[index] += 1
            self._books.count_look()
        return np.asarray(_Look(self, index, mapping, place.slot))

    def _looked(self, index: int) -> None:
        # Called by the garbage collector, perhaps in the middle of anything: only note it.
        self._books.ended_looks.append((self._holding, index))


class PendingMatch:
    """A match that was begun. For one thread."""

    def __init__(self, reading: Reading, keys: Sequence[SegmentKey], deadline_s: float) -> None:
        self._reading = reading
        self._keys = keys
        self._deadline_s = deadline_s
        self._lease: Lease | None = None
        packed = join_keys(keys)
        self._link = reading.books.link
        self._pending = self._link.channel.begin(lambda number: Match(number, packed, deadline_s))

    def poll(self) -> Lease | None:
        """The lease once the answer is here, None before. Never waits. Raises `Unreachable`."""
        if self._lease is None:
            reply = self._link.channel.poll(self._pending)
            if reply is not None:
                self._lease = Lease(self._reading, self._link, self._keys, self._link.expect(reply, Matched))
        return self._lease

    def wait(self) -> Lease:
        """The lease. Raises `Unreachable`, after the deadline at the latest."""
        if self._lease is None:
            reply = self._link.channel.wait(self._pending, self._deadline_s + GRACE_S)
            self._lease = Lease(self._reading, self._link, self._keys, self._link.expect(reply, Matched))
        return self._lease

    def cancel(self) -> None:
        """Nobody wants it: what was leased, if anything, is given back when the answer comes."""
        if self._lease is not None:
            self._lease.release()
        else:
            self._link.channel.drop(self._pending)
