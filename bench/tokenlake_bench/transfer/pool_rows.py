"""Measurements of the pool's calls. The time of a call begins with the keys and ends when the bytes are there: it
includes the match, but not the comparison of bytes and the release."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints, Outlook
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_bench import sizing
from tokenlake_bench.daemons import PATIENT
from tokenlake_bench.transfer.base import FAST, HASH_MANY, HASH_NEW, MATCH, WINDOWS, Size
from tokenlake_bench.transfer.windows import Windows, keys_of
from tokenlake_client import Lease, MatchOptions, Pool
from tokenlake_testing.cluster import Cluster

T = TypeVar("T")

OVER = Hints(Outlook.OVER)
LOW = MatchOptions(hints=Hints(priority=-1))
"""Options of reads at the other node: their copies leave in the order of last use, a whole window after the other."""
"""The hint on segments that are not read again: they leave before those that are, whatever the policy learns."""

HEADER = 1 << 20
"""Bytes of a region of the arena that are not taken by one window (set) of segments."""
STORED_WINDOWS = 2 * WINDOWS + 2
"""Size of the memory of a node that is written to, in windows (equal sets of segments, of which each measured call
moves one): `WINDOWS` that are read, as many for the measured stores, and 2 spare ones."""
READER_WINDOWS = 5
"""Size of the memory of the node that reads, in windows: so few that a fetched window is evicted before it is read
again."""

PROMPT_TOKENS = 32_768
VOCABULARY = 128_256
PAUSE_S = 0.001
"""Seconds of pause between calls that take well under a millisecond, in which the daemon handles the release of the
lease."""
PATIENCE_S = 5.0
MATCH_S = 1.0
FETCH_S = 10.0
"""Seconds that a fetch may take; many, because the benchmark measures the time of a call and not whether it meets a
deadline."""


def layout_of(size: Size) -> Layout:
    """A layout whose segments have the given size in bytes: 256 tokens, 32 layers, 8 KV heads."""
    dimension = size.segment_bytes // (32 * 8 * 256 * 2 * 2)
    return sizing.layout_of(f"bench-{size.label}", 256, dimension, layers=32, kv_heads=8, dtype="bfloat16")


class PoolRows:
    """The pool as a `System`: real daemons, with this process as their client."""

    name = "tokenlake"

    def __init__(self, size: Size, windows: Windows) -> None:
        """Starts the daemons and stores the segments that the measured calls read."""
        self._size = size
        self._windows = windows
        self._stored = 0
        self._open = ExitStack()
        self._tokens = np.random.default_rng(1).integers(0, VOCABULARY, PROMPT_TOKENS + 256).tolist()
        self._sets = [keys_of("read", number, size.count) for number in range(WINDOWS)]
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        self._rows = self._row_methods()

    def _cluster(self, nodes: int) -> Cluster:
        region = self._size.window_bytes + HEADER
        cluster = Cluster(nodes, str(STORED_WINDOWS * region), str(region), **PATIENT)
        if nodes > 1:
            cluster.nodes[0].settings |= {"memory": str(READER_WINDOWS * region)}
        return self._open.enter_context(cluster)

    def _start(self) -> None:
        layout = layout_of(self._size)
        pair = self._cluster(2)
        self._reader, writer = (self._open.enter_context(pair.connect(number, layout)) for number in range(2))
        self._alone = self._open.enter_context(self._cluster(1).connect(0, layout))
        # Every slot that the measured stores will take is written once, so that no page is touched for the first time
        # while the clock runs.
        for number in range(STORED_WINDOWS - WINDOWS):
            keys = keys_of("old", number, self._size.count)
            self._prepare(self._alone, keys, number % WINDOWS)
            self._alone.hint(keys, OVER)
        for number, keys in enumerate(self._sets):
            self._prepare(self._alone, keys, number)
            # The node that stores segments owns them: the writer owns these, and the reader has to fetch them.
            self._prepare(writer, keys, number)
        # Every window (set of segments) is fetched once, so that the reader's memory is mapped before the clock runs.
        for keys in self._sets:
            with self._reader.match(keys, LOW, deadline_s=MATCH_S) as lease:
                lease.fetch(deadline_s=FETCH_S)

    def _row_methods(self) -> dict[str, Callable[[int], list[float]]]:
        size, many, one = self._size, self._size.many, self._size.one
        rows: dict[str, Callable[[int], list[float]]] = {
            f"lease_{many}": self._lease,
            f"copy_{many}": lambda turn: self._copy(turn, size.count, _copy_views),
            f"copy_{many}_2_threads": lambda turn: self._copy(turn, size.count, Lease.copy_into),
            f"store_{many}": lambda turn: self._store(turn, size.count),
            f"fetch_tcp_{many}": lambda turn: self._fetch(turn, 0, size.count),
            f"copy_{one}": lambda turn: self._copy(turn, 1, Lease.copy_into),
            f"store_{one}": lambda turn: self._store(turn, 1),
            f"fetch_{one}": self._fetch_single,
        }
        if size.key_rows():
            rows |= {
                HASH_MANY: lambda _: _repeat(lambda: self._alone.prefix(self._tokens[:PROMPT_TOKENS])),
                HASH_NEW: self._hash_new,
                MATCH: lambda turn: self._match(self._alone, self._sets[turn % WINDOWS]),
                f"{MATCH}_remote": lambda turn: self._match(
                    self._reader, self._sets[self._remote_window(turn)], Code.REMOTE
                ),
            }
        return rows

    def rows(self) -> Sequence[str]:
        return list(self._rows)

    def sample(self, row: str, turn: int) -> list[float]:
        """Make one or several calls of a kind, and compare the bytes that they return with those that were stored.
        Returns the seconds of each call. Raises TokenLakeError when bytes are missing or wrong. See `System`."""
        return self._rows[row](turn)

    def close(self) -> None:
        self._open.close()

    # -- rows

    def _hash_new(self, _: int) -> list[float]:
        new = self._tokens[PROMPT_TOKENS:]
        chains = [self._alone.prefix(self._tokens[:PROMPT_TOKENS]) for _ in range(4)]
        return [took for chain in chains for took in _repeat(lambda chain=chain: chain.extend(new), 1)]  # type: ignore[misc]

    def _match(self, pool: Pool, keys: Sequence[SegmentKey], where: Code = Code.LOCAL) -> list[float]:
        return [self._match_once(pool, keys, where) for _ in range(FAST)]

    def _match_once(self, pool: Pool, keys: Sequence[SegmentKey], where: Code) -> float:
        took, lease = _timed(lambda: pool.match(keys, deadline_s=MATCH_S))
        with lease:
            found = lease.codes.count(where)
        if found < len(keys):
            raise TokenLakeError(f"{found} of {len(keys)} segments are {where.name}: {lease.codes!r}")
        time.sleep(PAUSE_S)
        return took

    def _lease(self, turn: int) -> list[float]:
        return [self._lease_once(turn + number) for number in range(FAST)]

    def _lease_once(self, turn: int) -> float:
        window = turn % WINDOWS
        took, (lease, arrays) = _timed(lambda: _views(self._alone, self._sets[window]))
        if turn % FAST == 0:
            _compare(arrays, self._windows.source[window])
        del arrays
        lease.release()
        time.sleep(PAUSE_S)
        return took

    def _copy(self, turn: int, count: int, copy: Callable[[Lease, list[NDArray[np.uint8]]], int]) -> list[float]:
        window = turn % WINDOWS
        keys, target = self._sets[window][:count], self._windows.target[window]
        target[:count, 0] += 1
        arrays = list(target[:count])

        def match_and_copy() -> tuple[Lease, int]:
            lease = self._alone.match(keys, deadline_s=MATCH_S)
            return lease, copy(lease, arrays)

        took, (lease, copied) = _timed(match_and_copy)
        lease.release()
        _compare(arrays[:copied], self._windows.source[window][:count])
        return [took]

    def _store(self, turn: int, count: int) -> list[float]:
        self._stored += 1
        window = turn % WINDOWS
        keys = keys_of(f"store-{count}", self._stored, count)
        took, _ = _timed(lambda: self._fill(self._alone, keys, window))
        with self._alone.match(keys, deadline_s=MATCH_S) as lease:
            _compare(lease.fetch(), self._windows.source[window][:count])
        self._alone.hint(keys, OVER)
        return [took]

    def _fetch(self, turn: int, start: int, stop: int) -> list[float]:
        window = self._remote_window(turn)
        keys = self._sets[window][start:stop]
        took, (lease, arrays) = _timed(lambda: _views(self._reader, keys))
        if lease.codes.count(Code.REMOTE) < len(keys):
            raise TokenLakeError(f"segments to fetch are not remote: {lease.codes!r}")
        _compare(arrays, self._windows.source[window][start:stop])
        del arrays
        lease.release()
        return [took]

    def _fetch_single(self, turn: int) -> list[float]:
        window = self._remote_window(turn)
        taken = self._fetch(window, 0, 1)
        # The other segments of the set are fetched, too, so that each set (window) is cached and evicted as a whole.
        with self._reader.match(self._sets[window], LOW, deadline_s=MATCH_S) as lease:
            lease.fetch(deadline_s=FETCH_S)
        return taken

    def _remote_window(self, turn: int) -> int:
        """The number of a window (set of segments) of which the reader's node has no cached copy."""
        for number in range(turn, turn + WINDOWS):
            with self._reader.match(self._sets[number % WINDOWS], LOW, deadline_s=MATCH_S) as lease:
                if lease.codes.count(Code.REMOTE) == self._size.count:
                    time.sleep(PAUSE_S)
                    return number % WINDOWS
        raise TokenLakeError("no window is at the other node alone")

    def _fill(self, pool: Pool, keys: Sequence[SegmentKey], window: int) -> None:
        with pool.store(keys) as write:
            write.fill(self._windows.source[window][: len(keys)])
        _check_stored(bytes(write.codes))

    def _prepare(self, pool: Pool, keys: Sequence[SegmentKey], window: int) -> None:
        _check_stored(pool.store_all(keys, self._windows.source[window][: len(keys)], patience=PATIENCE_S))


def _views(pool: Pool, keys: Sequence[SegmentKey]) -> tuple[Lease, list[NDArray[np.uint8]]]:
    lease = pool.match(keys, LOW, deadline_s=MATCH_S)
    return lease, lease.fetch(deadline_s=FETCH_S)


def _copy_views(lease: Lease, arrays: Sequence[NDArray[np.uint8]]) -> int:
    """Copy the leased segments in the calling thread alone, as an engine copies them into its own blocks."""
    views = lease.fetch(0, len(arrays))
    for array, view in zip(arrays, views, strict=False):
        np.copyto(array, view)
    return len(views)


def _check_stored(codes: bytes) -> None:
    if codes.count(Code.COMMITTED) < len(codes):
        raise TokenLakeError(f"segments were not stored: {codes!r}")


def _compare(arrays: Sequence[NDArray[np.uint8]], expected: NDArray[np.uint8]) -> None:
    if len(arrays) != len(expected):
        raise TokenLakeError(f"{len(arrays)} of {len(expected)} segments arrived")
    wrong = sum(not np.array_equal(array, right) for array, right in zip(arrays, expected, strict=True))
    if wrong:
        raise TokenLakeError(f"{wrong} of {len(arrays)} segments have wrong bytes")


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _repeat(call: Callable[[], object], times: int = 4) -> list[float]:
    return [_timed(call)[0] for _ in range(times)]
