"""A memory pool of independent keys for the manager behind vLLM's OffloadingConnector, whose leased segments may be on
another node, lost, or slow to fetch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.engines.faulty_pool import opened
from tokenlake.identity import SegmentKey
from tokenlake.opaque_layout import OpaqueLayout
from tokenlake.wire import Code
from tokenlake_client.engine_calls import EngineCalls
from tokenlake_client.lease import Lease
from tokenlake_client.match import DEFAULT_MATCH, MatchOptions, PendingMatch
from tokenlake_client.testing import MemoryPool

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


class ChunkPool(MemoryPool):
    """The connection of the manager, and its daemon."""

    def __init__(self, layout: OpaqueLayout) -> None:
        super().__init__(layout)
        opened.append(self)
        self.engine = _Engine(self)
        self.remote: set[SegmentKey] = set()
        """Keys of segments on another node; a fetch makes them local."""
        self.lost: set[SegmentKey] = set()
        """Keys of segments that a fetch does not find."""
        self.fetching = threading.Semaphore(0)
        """Released once by each fetch."""
        self.fetches = threading.Event()
        """A fetch waits for it."""
        self.fetches.set()
        self.asked: list[tuple[int, MatchOptions]] = []
        """The number of keys of each match, and its options."""
        self.leases: list[Lease] = []
        self.took: tuple[int, int] | None = None
        """The tokens that the last lease was told of."""

    def put(self, keys: Sequence[SegmentKey]) -> None:
        """Store segments, as a rank does."""
        codes = self.store_all(keys, lambda index, slot: slot.fill(index))
        assert set(codes) <= {Code.COMMITTED, Code.EXISTS}

    def leased(self, lease: int = -1) -> list[int]:
        """The indices of the segments of a lease that are not released."""
        held = [bool(each) for hold in self.leases[lease]._holds for each in hold.unreleased]
        return [index for index, each in enumerate(held) if each]


class _Engine(EngineCalls):
    def __init__(self, pool: ChunkPool) -> None:
        super().__init__(pool._state, pool._heartbeat)
        self._pool = pool

    def begin_match(
        self, keys: Sequence[SegmentKey], options: MatchOptions = DEFAULT_MATCH, *, deadline_s: float | None = None
    ) -> Any:
        self._pool.asked.append((len(keys), options))
        return _Pending(self._pool, super().begin_match(keys, options, deadline_s=deadline_s), keys)


class _Pending:
    def __init__(self, pool: ChunkPool, pending: PendingMatch, keys: Sequence[SegmentKey]) -> None:
        self._pool, self._pending, self._keys = pool, pending, keys
        self._lease: _Lease | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def poll(self) -> _Lease | None:
        lease = self._pending.poll()
        if lease is not None and self._lease is None:
            self._pool.leases.append(lease)
            self._lease = _Lease(self._pool, lease, self._keys)
        return self._lease


class _Lease:
    def __init__(self, pool: ChunkPool, lease: Lease, keys: Sequence[SegmentKey]) -> None:
        self._pool, self._lease = pool, lease
        codes = zip(keys, lease.codes, strict=True)
        self.codes = bytes(Code.REMOTE if key in pool.remote else code for key, code in codes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def takes(self, start: int, stop: int, saved_s: float = 0.0) -> None:
        self._pool.took = start, stop
        self._lease.takes(start, stop, saved_s)

    def fetch(self, start: int, stop: int) -> list[NDArray[np.uint8]]:
        self._pool.fetching.release()
        assert self._pool.fetches.wait(TIMEOUT_S)
        keys = self._lease.keys[start:stop]
        stop = next((start + at for at, key in enumerate(keys) if key in self._pool.lost), stop)
        self._pool.remote.difference_update(keys)
        return self._lease.fetch(start, stop)
