"""The engine of a live replay: matches each prompt, reads the hits and compares every byte, and stores the missing
segments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import DeadlinePassed
from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench import payload
from tokenlake_bench.payload import PayloadIdentity
from tokenlake_client import Pool

WINDOW: Final = 32
"""Maximum number of segments that are fetched, compared and released at a time (one window)."""
MATCH_S: Final = 1.0
"""Seconds that a match may take, so long that hit rates do not depend on it; latencies are reported separately."""
PATIENCE_S: Final = 5.0
"""Seconds that a store waits at most without progress while the daemon's bound on segments being written is reached."""


@dataclass(slots=True)
class Served:
    """The outcome of one prompt of a replay: segments found and stored in the pool. Counts are numbers of segments
    unless the name says otherwise."""

    keys: Sequence[SegmentKey]
    hits: int = 0
    """Number of segments read from the pool, which are a contiguous prefix of the prompt."""
    remote: list[int] = field(default_factory=list)
    """Positions in the prompt of the hits that came from another node, ascending."""
    wrong_segments: int = 0
    wrong_bytes: int = 0
    match_s: float = 0.0
    fetch_s: list[float] = field(default_factory=list)
    """Seconds of each fetch of up to `window` segments."""
    cut_by: Code | None = None
    """Code of the first segment that was not found or not read; None if all full segments were read."""
    failures: int = 0
    """Number of calls that the daemon did not answer in time."""
    stored: Counter[Code] = field(default_factory=Counter)


class LiveClient:
    """A replaying engine at one node: a client of the node's daemon, without a model."""

    def __init__(self, pool: Pool, seed: int, *, window: int = WINDOW, match_s: float | None = MATCH_S) -> None:
        """`window`: number of segments read at a time. `match_s`: deadline of a match; None: the daemon's."""
        self.pool = pool
        self._window = window
        self._match_s = match_s
        self._identity = PayloadIdentity(seed, pool.engine.tenant, pool.layout.fingerprint())

    def serve(self, tokens: NDArray[np.uint32], *, store: bool = True) -> Served:
        """Serve one prompt: read its longest prefix from the pool, compare its bytes, and with `store` store the
        missing segments. Calls without an answer are counted as failures and their segments as missing. Raises
        `Unreachable` when the daemon has ended."""
        keys = self.pool.prefix(tokens).keys
        digests = self._identity.digests(tokens, self.pool.layout.segment_tokens)
        served = Served(keys)
        for step in (self._read, self._store) if store else (self._read,):
            try:
                step(served, digests)
            except DeadlinePassed:
                served.failures += 1
        return served

    def _read(self, served: Served, digests: list[bytes]) -> None:
        began = time.perf_counter()
        with self.pool.match(served.keys, deadline_s=self._match_s) as lease:
            served.match_s = time.perf_counter() - began
            if lease.hits < len(served.keys):
                served.cut_by = Code(lease.codes[lease.hits])
            while served.hits < lease.hits:
                start, stop = served.hits, min(served.hits + self._window, lease.hits)
                began = time.perf_counter()
                arrays = lease.fetch(start, stop, deadline_s=0.0)
                served.fetch_s.append(time.perf_counter() - began)
                served.hits += len(arrays)
                served.remote += [index for index in range(start, served.hits) if lease.codes[index] == Code.REMOTE]
                # Arrays over a segment keep it leased, so they are dropped before the lease is released.
                while arrays:
                    _compare(arrays.pop(), digests[start + len(arrays)], served)
                lease.release(start, served.hits)
                if served.hits < stop:
                    served.cut_by = Code.LOST
                    break

    def _store(self, served: Served, digests: list[bytes]) -> None:
        missing = served.keys[served.hits :]
        if not missing:
            return

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            payload.fill(slot, digests[served.hits + index])

        codes = self.pool.store_all(missing, fill, served.hits, PATIENCE_S)
        served.stored.update(Code(code) for code in codes)


def _compare(array: NDArray[np.uint8], digest: bytes, served: Served) -> None:
    wrong = payload.wrong_bytes(array, digest)
    served.wrong_segments += wrong > 0
    served.wrong_bytes += wrong
