"""A pool of independent keys in this process, for the manager and the workers behind vLLM's OffloadingConnector."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import Salt
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake.wire import Code
from tokenlake_client.match import MatchOptions

Segment = NDArray[np.uint8]
TIMEOUT_S = 10.0


def layout_of(shards: int = 1, shard_bytes: int = 64) -> OpaqueLayout:
    """An opaque layout of these sizes."""
    return OpaqueLayout(
        model_id="m",
        weights_digest="w",
        engine="e 1",
        cache="c",
        shards=shards,
        shard_bytes=shard_bytes,
        segment_tokens=32,
    )


LAYOUT = layout_of()


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ChunkPools:
    """The daemon, and the connections of the manager and of all ranks, in one object."""

    def __init__(self, layout: OpaqueLayout = LAYOUT) -> None:
        self.layout = layout
        self.session, self.incarnation, self.connected = 7, 1, True
        self.segments: dict[bytes, Segment] = {}
        self.remote: set[bytes] = set()
        """Keys of segments on another node; a fetch makes them local."""
        self.fetching = threading.Semaphore(0)
        """Released once by each fetch."""
        self.fetches = threading.Event()
        """A fetch waits for it."""
        self.fetches.set()
        self.lost: set[bytes] = set()
        """Keys of segments that a fetch does not find."""
        self.answers = True
        """Does the daemon answer matches?"""
        self.matches: list[MatchOptions] = []
        self.asked: list[int] = []
        """The number of keys of each match."""
        self.leases: dict[int, _Lease] = {}
        self.writes: dict[int, _Write] = {}
        self.closed = 0

    def opaque_keys(
        self,
        engine_keys: Iterable[tuple[int, bytes]],
        *,
        adapter: str | None = None,
        salt: Salt = None,
        weights_digest: str | None = None,
    ) -> list[SegmentKey]:
        named = [(group, key, adapter, salt, weights_digest) for group, key in engine_keys]
        return [SegmentKey(hashlib.sha256(repr(each).encode()).digest()) for each in named]

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions, *, deadline_s: float | None = None
    ) -> _Pending:
        self.matches.append(options)
        self.asked.append(len(keys))
        return _Pending(self, keys)

    def reserve(self, keys: Sequence[SegmentKey], first: int = 0, **_: Any) -> _Reservation:
        number = len(self.writes) + 1
        self.writes[number] = _Write(self, keys)
        return _Reservation(number, self.incarnation, self.writes[number].codes)

    def attach(self, *parts: LeaseId, request: str = "", deadline_s: float | None = None) -> _Lease:
        if not self.connected:
            raise Unreachable("no daemon")
        return self.leases[int(parts[0])]

    def attach_write(self, write: WriteId) -> _Write:
        return self.writes[int(write)]

    def store_all(
        self,
        keys: Sequence[SegmentKey],
        fill: Callable[[int, Segment], None],
        first: int = 0,
        patience: float = 0.0,
        **_: Any,
    ) -> bytes:
        codes = bytearray()
        for index, key in enumerate(keys):
            if bytes(key) in self.segments:
                codes.append(Code.EXISTS)
                continue
            slot = np.zeros(self.layout.segment_bytes, np.uint8)
            fill(index, slot)
            self.segments[bytes(key)] = slot
            codes.append(Code.COMMITTED)
        return bytes(codes)

    def close(self) -> None:
        self.closed += 1

    def leased(self) -> int:
        """The number of leased segments."""
        return sum(sum(lease.held) for lease in self.leases.values())


class _Pending:
    def __init__(self, pools: ChunkPools, keys: Sequence[SegmentKey]) -> None:
        self._pools, self._keys = pools, keys
        self._lease: _Lease | None = None
        self._cancelled = False
        self.answers = 0

    def poll(self) -> _Lease | None:
        if not self._pools.connected:
            raise Unreachable("no daemon")
        if self._lease is None and self._pools.answers:
            self.answers += 1
            self._lease = _Lease(self._pools, self._keys)
        return self._lease

    def cancel(self) -> None:
        if self._lease is not None:
            self._lease.release()


class _Lease:
    def __init__(self, pools: ChunkPools, keys: Sequence[SegmentKey]) -> None:
        self._pools = pools
        held = [bytes(key) for key in keys if bytes(key) in pools.segments]
        self.keys = held
        self.hits, self.incarnation = len(held), pools.incarnation
        self.held = [True] * self.hits
        found = {key: Code.REMOTE if key in pools.remote else Code.LOCAL for key in held}
        self.codes = bytes(found.get(bytes(key), Code.MISSING) for key in keys)
        self.ids = (LeaseId(len(pools.leases) + 1),)
        self.took: tuple[int, int] | None = None
        pools.leases[int(self.ids[0])] = self

    def takes(self, start: int, stop: int) -> None:
        self.took = start, stop

    def fetch(self, start: int, stop: int) -> list[Segment]:
        self._pools.fetching.release()
        assert self._pools.fetches.wait(TIMEOUT_S)
        if not self._pools.connected:
            raise Unreachable("no daemon")
        arrays = []
        for index in range(start, stop):
            key = self.keys[index]
            if key in self._pools.lost:
                break
            self._pools.remote.discard(key)
            arrays.append(self._pools.segments[key])
        return arrays

    def release(self, start: int = 0, stop: int | None = None) -> None:
        for index in range(start, self.hits if stop is None else stop):
            self.held[index] = False


class _Reservation:
    def __init__(self, number: int, incarnation: int, codes: bytes) -> None:
        self.id, self.incarnation, self.codes = WriteId(number), incarnation, codes
        self.released = False

    def release(self) -> None:
        self.released = True


class _Write:
    def __init__(self, pools: ChunkPools, keys: Sequence[SegmentKey]) -> None:
        self._pools, self._keys = pools, [bytes(key) for key in keys]
        self.incarnation = pools.incarnation
        self.slots = [(index, np.zeros(pools.layout.segment_bytes, np.uint8)) for index in range(len(keys))]
        self.codes = bytes([Code.RESERVED]) * len(keys)
        self.committed = 0
        self.aborted = False

    def commit(self, shards: int | None = None) -> bytes:
        self.committed |= shards or 0
        if self.committed == (1 << self._pools.layout.shards) - 1:
            self._pools.segments.update((self._keys[index], slot) for index, slot in self.slots)
        return bytes([Code.COMMITTED]) * len(self._keys)

    def leave(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True
