"""Buffers for the queries that one connection receives."""

from __future__ import annotations

import threading

MAX_PENDING_BYTES = 128 << 20
"""Limit of the bytes of one connection's queries that wait to be computed, with the bytes that are counted for their
objects; further queries are left in the socket. A single request may be larger."""
MAX_SPARE_BYTES = 4 << 20
"""Limit of the bytes of one connection's buffers that are kept for later queries: the buffers of most queries of a
decode step are smaller. No tenant's limits count them."""


class QueryBuffers:
    """Lends buffers, and keeps some of those that were given back for later queries. Thread-safe."""

    def __init__(self) -> None:
        self._room = threading.Condition()
        self._pending_bytes = 0
        self._spare: list[bytearray] = []

    @property
    def spare_bytes(self) -> int:
        """The bytes that are kept for later queries."""
        return sum(map(len, self._spare))

    def take(self, nbytes: int, counted: int) -> bytearray:
        """A buffer of at least `nbytes` for received queries, of a request whose objects take `counted` bytes. Blocks
        while `MAX_PENDING_BYTES` would be exceeded."""
        most = MAX_PENDING_BYTES - nbytes - counted
        with self._room:
            self._room.wait_for(lambda: not self._pending_bytes or self._pending_bytes <= most)
            for index, spare in enumerate(self._spare):
                if len(spare) >= nbytes:
                    buffer = self._spare.pop(index)
                    break
            else:
                # The new buffer replaces a spare one that is too small, so that spare buffers do not accumulate.
                self._spare[:1] = []
                buffer = bytearray(nbytes)
            self._pending_bytes += len(buffer) + counted
            return buffer

    def give_back(self, buffer: bytearray, counted: int) -> None:
        """End the use of a buffer that `take` returned for a request whose objects take `counted` bytes."""
        with self._room:
            self._pending_bytes -= len(buffer) + counted
            if self.spare_bytes + len(buffer) <= MAX_SPARE_BYTES:
                self._spare.append(buffer)
            self._room.notify()
