"""Storing segments: prepare, fill in place, commit or abort."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey, WriteId
from tokenlake.wire import Code
from tokenlake.wire.engine import Commit, Committed, Prepared
from tokenlake.wire.slots import unpack_slots
from tokenlake_client.checksums import shard_checksums
from tokenlake_client.lease import Reading
from tokenlake_client.link import STORE_S, Link

__all__ = ["Reservation", "Write"]


class Write:
    """Slots to fill. As a context manager it commits at the end, and aborts when an exception passes.

    `slots` are writable arrays of shape [segment_bytes] in the arena, for the segments that were granted; they
    must not be written after commit or abort. For one thread.
    """

    def __init__(
        self, reading: Reading, link: Link, shards: int, keys: Sequence[SegmentKey], prepared: Prepared
    ) -> None:
        """`shards`: how many a segment has. Raises what mapping the slots raises; they are given back then."""
        self.id = WriteId(prepared.write)
        """For another process of the session: `Pool.attach_write`."""
        self.keys = keys
        self.codes = bytearray(prepared.codes)
        """What happened to each key, one `Code` each; commit changes RESERVED to COMMITTED or EXPIRED."""
        self._reading = reading
        self._books = books = reading.books
        self._link = link
        self._shards = shards
        self._done = not self.id
        self.slots: list[tuple[int, NDArray[np.uint8]]] = []
        """(index into `keys`, array)."""
        if self._done:
            return
        books.begin_filling(link)
        books.hold_write(link, self.id)
        try:
            self.slots += (
                (index, link.regions.get(place, write=True).slot(place.slot))
                for index, place in enumerate(unpack_slots(prepared.slots))
                if self.codes[index] == Code.RESERVED
            )
        except BaseException:
            self.slots.clear()
            self.abort()
            raise

    @property
    def incarnation(self) -> int:
        """Of the daemon that granted it; its number means nothing to another."""
        return self._link.incarnation

    def __enter__(self) -> Write:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def commit(self, shards: int | None = None) -> bytes:
        """Publish all slots; the codes. `shards`: bit mask of those this process filled (default: all). The
        checksums are made here, over what lies in the slots. Raises `Unreachable`: nothing is known then."""
        if self._done:
            return bytes(self.codes)
        mask = (1 << self._shards) - 1 if shards is None else shards
        checksums = b"".join(shard_checksums(array, self._shards, mask) for _, array in self.slots)
        indices = tuple(index for index, _ in self.slots)
        self._done = True
        for _, array in self.slots:
            array.flags.writeable = False
        self._books.end_filling(self._link)
        try:
            codes = self._publish(indices, mask, checksums)
        except BaseException:
            # Whether it arrived or not: what it did not publish is given back.
            self._books.drop_write(self._link, self.id, abort=True)
            raise
        self._books.drop_write(self._link, self.id, abort=False)
        for index, code in zip(indices, codes, strict=True):
            self.codes[index] = code
        return bytes(self.codes)

    def leave(self) -> None:
        """After `commit` of some shards: this process holds nothing of the write any more, whatever becomes of the
        shards of others. Idempotent; never raises."""
        if Code.RESERVED in self.codes:
            self._books.leave_write(self._link, self.id)

    def abort(self) -> None:
        """Give the slots back. Idempotent; never raises."""
        if not self._done:
            self._done = True
            self._books.end_filling(self._link)
            self._books.drop_write(self._link, self.id, abort=True)

    def _publish(self, indices: tuple[int, ...], mask: int, checksums: bytes) -> bytes:
        link = self._books.link
        if self._link.life != link.life:
            return bytes([Code.EXPIRED]) * len(indices)
        return link.call(lambda number: Commit(number, self.id, indices, mask, checksums), Committed, STORE_S).codes


class Reservation:
    """Slots that other processes of the session fill: each attaches, commits its shards and leaves. They stay reserved
    until all shards are in, or until everybody who holds them, this process too, gave them back."""

    def __init__(self, reading: Reading, link: Link, prepared: Prepared) -> None:
        self.id = WriteId(prepared.write)
        """For `Pool.attach_write`; 0 when no slot was granted."""
        self.codes = prepared.codes
        """What happened to each key, one `Code` each."""
        self._reading = reading
        self._link = link
        reading.books.hold_write(link, self.id)

    @property
    def incarnation(self) -> int:
        """Of the daemon that granted it; its number means nothing to another."""
        return self._link.incarnation

    def release(self) -> None:
        """Hold it no longer. Idempotent; never raises."""
        if self.id:
            self._reading.books.drop_write(self._link, self.id, abort=True)
            self.id = WriteId(0)
