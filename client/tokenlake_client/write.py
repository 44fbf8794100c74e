"""Storing segments: prepare, fill in place, commit or abort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import SegmentKey, WriteId
from tokenlake.wire import Code
from tokenlake.wire.engine import Prepared
from tokenlake.wire.slots import unpack_slots
from tokenlake_client.checksums import shard_checksums

if TYPE_CHECKING:
    from tokenlake_client.pool import Link, Pool

__all__ = ["Reservation", "Write"]


class Write:
    """Slots to fill. As a context manager it commits at the end, and aborts when an exception passes.

    `slots` are writable arrays of shape [segment_bytes] in the arena, for the segments that were granted; they
    must not be written after commit or abort. For one thread.
    """

    def __init__(self, pool: Pool, link: Link, keys: Sequence[SegmentKey], prepared: Prepared) -> None:
        self.id = WriteId(prepared.write)
        """For another process of the session: `Pool.attach_write`."""
        self.keys = keys
        self.codes = bytearray(prepared.codes)
        """What happened to each key, one `Code` each; commit changes RESERVED to COMMITTED or EXPIRED."""
        self._pool = pool
        self._link = link
        self._done = not self.id
        self.slots: list[tuple[int, NDArray[np.uint8]]] = [
            (index, link.regions.get(place, write=True).slot(place.slot))
            for index, place in enumerate(unpack_slots(prepared.slots))
            if self.codes[index] == Code.RESERVED
        ]
        """(index into `keys`, array)."""
        if not self._done:
            pool._count_writing(link, 1)

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
        layout = self._pool.layout
        mask = (1 << layout.shards) - 1 if shards is None else shards
        checksums = b"".join(shard_checksums(array, layout.shards, mask) for _, array in self.slots)
        indices = tuple(index for index, _ in self.slots)
        self._done = True
        for _, array in self.slots:
            array.flags.writeable = False
        self._pool._count_writing(self._link, -1)
        codes = self._pool._commit(self, indices, mask, checksums)
        for index, code in zip(indices, codes, strict=True):
            self.codes[index] = code
        return bytes(self.codes)

    def leave(self) -> None:
        """After `commit` of some shards: this process holds nothing of the write any more, whatever becomes of the
        shards of others. Idempotent; never raises."""
        if Code.RESERVED in self.codes:
            self._pool._abort(self._link, self.id)

    def abort(self) -> None:
        """Give the slots back. Idempotent; never raises."""
        if not self._done:
            self._done = True
            self._pool._count_writing(self._link, -1)
            self._pool._abort(self._link, self.id)


class Reservation:
    """Slots that other processes of the session fill: each attaches, commits its shards and leaves. They stay reserved
    until all shards are in, or until everybody who holds them, this process too, gave them back."""

    def __init__(self, pool: Pool, link: Link, prepared: Prepared) -> None:
        self.id = WriteId(prepared.write)
        """For `Pool.attach_write`; 0 when no slot was granted."""
        self.codes = prepared.codes
        """What happened to each key, one `Code` each."""
        self._pool = pool
        self._link = link

    def release(self) -> None:
        """Hold it no longer. Idempotent; never raises."""
        if self.id:
            self._pool._abort(self._link, self.id)
            self.id = WriteId(0)
