"""Lookups of chunks in the pool. No call waits for the daemon. Imports no engine.

The chunks of a request are leased by one match of independent keys. A leased chunk becomes a hit when its bytes are in
this node's arena and, where reads are verified, have the right checksum::

    vLLM asks for a chunk     answer
    before the match's reply  RETRY
    after it: no segment      MISS
    in the arena, unverified  HIT
    on another node, or to be verified: PENDING, and the chunk is wanted
    after the step            the wanted chunks are fetched in the background; then HIT or MISS

vLLM counts a PENDING chunk as a hit that it cannot use yet, so it goes on to the chunks that it would also need. Only
these are fetched.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenlake.wire import Code
from tokenlake_client.engines.vllm.load_worker import WINDOW, runs
from tokenlake_client.engines.vllm.polled_match import PolledMatch
from tokenlake_client.lease import Lease, LeaseParts
from tokenlake_client.match import PendingMatch

_LOCAL = int(Code.LOCAL)
_REMOTE = int(Code.REMOTE)
_LEASED = bytes([_LOCAL, _REMOTE])


class Found(enum.IntEnum):
    """The answer to a question for one chunk."""

    MISS = enum.auto()
    HIT = enum.auto()
    PENDING = enum.auto()
    RETRY = enum.auto()


class ChunkLookup(PolledMatch):
    """A match for all chunks of a request, and its answer. For the scheduler's thread, but for `start` and `fetch`."""

    def __init__(
        self,
        begin: Callable[[], PendingMatch],
        asked: Sequence[bytes],
        deadline_s: float,
        clock: Callable[[], float],
        *,
        verify: bool,
    ) -> None:
        """`begin` sends the match. `asked`: vLLM's keys of the chunks, in the order of the match. `verify`: chunks in
        the arena are fetched too, because `fetch` checks their bytes."""
        super().__init__(None, deadline_s, clock)
        self._begin = begin
        self._lock = threading.Lock()
        """Guards `_pending`, `_failure` and `_dropped`."""
        self._failure: Exception | None = None
        self._dropped = False
        self._asked = asked
        self._verify = verify
        self._segments: dict[bytes, int] = {}
        """For each leased chunk, the index of its segment in the lease."""
        self._found: list[Found] = []
        """For each leased segment: PENDING until it is fetched. `fetch` sets it from a background thread."""
        self._remote: set[int | None] = set()
        self._wanted: set[int] = set()
        self._taken: set[int] = set()
        """The segments that `take_wanted` has returned."""

    def start(self) -> None:
        """Send the match. For a background thread, because computing the keys of a long prompt takes a millisecond.
        Never raises."""
        try:
            pending = self._begin()
        except Exception as error:
            with self._lock:
                self._failure = error
            return
        with self._lock:
            self._pending, dropped = pending, self._dropped
        if dropped:
            pending.cancel()

    def poll(self) -> bool:
        """See `PolledMatch`."""
        if self.lease is not None:
            return True
        with self._lock:
            failure = self._failure
        if failure is not None:
            raise failure
        if super().poll():
            self._take_answer()
        return self.lease is not None

    def _take_answer(self) -> None:
        assert self.lease is not None
        codes = zip(self._asked, self.lease.codes, strict=True)
        leased = [pair for pair in codes if pair[1] in _LEASED][: self.lease.hits]
        self._segments = {key: index for index, (key, _) in enumerate(leased)}
        self._remote = {index for index, (_, code) in enumerate(leased) if code == _REMOTE}
        at_once = Found.PENDING if self._verify else Found.HIT
        self._found = [at_once if code == _LOCAL else Found.PENDING for _, code in leased]

    def find(self, key: bytes) -> Found:
        """The state of a chunk after the answer. A chunk that is PENDING is wanted from now on."""
        index = self._segments.get(key)
        if index is None:
            return Found.MISS
        found = self._found[index]
        if found is Found.PENDING:
            self._wanted.add(index)
        return found

    def remote(self, key: bytes) -> bool:
        """True if the chunk was on another node when it was leased."""
        return self._segments.get(key) in self._remote

    def take_wanted(self) -> list[int]:
        """The indices of the segments that are wanted and that no earlier call has returned, in order."""
        wanted, self._wanted = sorted(self._wanted - self._taken), set()
        self._taken.update(wanted)
        return wanted

    @property
    def dropped(self) -> bool:
        """True if the lease was released, or will be released when the answer arrives."""
        with self._lock:
            return self._dropped

    def fetch(self, wanted: Sequence[int], failed: Callable[[], None]) -> None:
        """Transfer the segments `wanted` to this node and verify them; each becomes a HIT or a MISS. `failed` is called
        before that if one is lost although it is leased. Waits; for a background thread. Raises `TokenLakeError`;
        segments without an outcome are misses then."""
        hits: set[int] = set()
        try:
            if self.lease is not None:
                for start, stop in runs(wanted, WINDOW):
                    hits.update(_fetched(self.lease, start, stop))
        finally:
            if len(hits) < len(wanted) and not self.dropped:
                failed()
            for index in wanted:
                self._found[index] = Found.HIT if index in hits else Found.MISS

    def fails(self) -> None:
        """Record that the load failed, and vLLM computes its tokens."""
        if self._took is not None:
            self.takes(self._took[0], self._took[0])

    def leading(self, keys: Sequence[bytes]) -> int:
        """The number of `keys`, from the first on, that are leased."""
        return next((at for at, key in enumerate(keys) if key not in self._segments), len(keys))

    def keep(self, keys: Iterable[bytes]) -> LeaseParts | None:
        """Release all segments but those of `keys`. Returns the parts of the lease that hold these; None: there is no
        lease."""
        if self.lease is None:
            return None
        kept = {index for key in keys if (index := self._segments.get(key)) is not None}
        for start, stop in runs([at for at in range(len(self._found)) if at not in kept], len(self._found)):
            self.lease.release(start, stop)
        return self.lease.parts_of(kept)

    def segment(self, key: bytes) -> int | None:
        """The index of the segment of a chunk in the lease; None: it is not leased."""
        return self._segments.get(key)

    def drop(self) -> None:
        """See `PolledMatch`."""
        with self._lock:
            self._dropped = True
        super().drop()


def _fetched(lease: Lease, start: int, stop: int) -> Iterator[int]:
    """Transfer the segments [start, stop); yields the index of each one that was not lost."""
    while start < stop:
        count = len(lease.fetch(start, stop))
        yield from range(start, start + count)
        # The segment after the last array was lost, or does not match its checksum.
        start += count + 1
