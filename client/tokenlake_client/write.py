"""Storing segments: prepare, fill in place, commit or abort."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import TokenLakeError
from tokenlake.identity import SegmentKey, WriteId
from tokenlake.wire import Code
from tokenlake.wire.engine import Commit, Committed, Prepared
from tokenlake.wire.slots import unpack_slots
from tokenlake_client.books import Books
from tokenlake_client.checksums import shard_checksums
from tokenlake_client.link import Link

__all__ = ["Reservation", "Write"]


class Write:
    """Slots to fill. As a context manager it commits at the end, and aborts when an exception passes.

    `slots` are writable arrays of shape [segment_bytes] in the arena, for the segments that were granted; they
    must not be written after commit or abort. For one thread.
    """

    def __init__(self, books: Books, link: Link, shards: int, keys: Sequence[SegmentKey], prepared: Prepared) -> None:
        """`shards`: how many a segment has. Raises what mapping the slots raises; they are given back then."""
        self.id = WriteId(prepared.write)
        """For another process of the session: `Pool.attach_write`."""
        self.keys = keys
        self.codes = bytearray(prepared.codes)
        """What happened to each key, one `Code` each; commit changes RESERVED to COMMITTED or EXPIRED."""
        self._books = books
        self._link = link
        self._shards = shards
        self._done = not self.id
        try:
            self.slots: list[tuple[int, NDArray[np.uint8]]] = [
                (index, link.regions.get(place, write=True).slot(place.slot))
                for index, place in enumerate(unpack_slots(prepared.slots))
                if self.codes[index] == Code.RESERVED
            ]
            """(index into `keys`, array)."""
        except BaseException:
            books.abort(link, self.id)
            raise
        if not self._done:
            books.count_writing(link, 1)

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
        self._books.count_writing(self._link, -1)
        codes = self._publish(indices, mask, checksums)
        for index, code in zip(indices, codes, strict=True):
            self.codes[index] = code
        return bytes(self.codes)

    def leave(self) -> None:
        """After `commit` of some shards: this process holds nothing of the write any more, whatever becomes of the
        shards of others. Idempotent; never raises."""
        if Code.RESERVED in self.codes:
            self._books.abort(self._link, self.id)

    def abort(self) -> None:
        """Give the slots back. Idempotent; never raises."""
        if not self._done:
            self._done = True
            self._books.count_writing(self._link, -1)
            self._books.abort(self._link, self.id)

    def _publish(self, indices: tuple[int, ...], mask: int, checksums: bytes) -> bytes:
        link = self._books.link
        if self._link.incarnation != link.incarnation:
            return bytes([Code.EXPIRED]) * len(indices)
        try:
            return link.call(lambda number: Commit(number, self.id, indices, mask, checksums), Committed).codes
        except TokenLakeError:
            # Whether it arrived or not: what it did not publish is given back.
            self._books.abort(self._link, self.id)
            raise


class Reservation:
    """Slots that other processes of the session fill: each attaches, commits its shards and leaves. They stay reserved
    until all shards are in, or until everybody who holds them, this process too, gave them back."""

    def __init__(self, books: Books, link: Link, prepared: Prepared) -> None:
        self.id = WriteId(prepared.write)
        """For `Pool.attach_write`; 0 when no slot was granted."""
        self.codes = prepared.codes
        """What happened to each key, one `Code` each."""
        self._books = books
        self._link = link

    @property
    def incarnation(self) -> int:
        """Of the daemon that granted it; its number means nothing to another."""
        return self._link.incarnation

    def release(self) -> None:
        """Hold it no longer. Idempotent; never raises."""
        if self.id:
            self._books.abort(self._link, self.id)
            self.id = WriteId(0)
