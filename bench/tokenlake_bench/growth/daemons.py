"""Daemons of `bench growth`, filled with segments or only started, and measurements of their memory and processor
time."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tokenlake.core.engines.grants import PIECE
from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake.memory.region import RegionShape
from tokenlake.wire import Code
from tokenlake_bench.growth.client import LAYOUT, PROMPT_KEYS, held_keys
from tokenlake_bench.soak.gauges import process_gauges
from tokenlake_client import Pool
from tokenlake_testing.cluster import Node
from tokenlake_testing.ports import reserve_port

START_S: Final = 300.0
PATIENCE_S: Final = 30.0
FILLED_AT_A_TIME: Final = 128
REGION_BYTES: Final = 16 << 20
PAGE: Final = 4096


class GrowthDaemon:
    """A daemon that has room for exactly the segments stored in it, with a client. `empty_bytes`, `full_bytes`:
    resident memory of its process without shared memory, before and after the segments were stored."""

    def __init__(self, segments: int) -> None:
        """Start the daemon and store segments until it is full. Raises TokenLakeError."""
        self.segments = segments
        self._directory = tempfile.TemporaryDirectory(prefix="tokenlake-")
        memory, region = _sizes(segments)
        # The limits on calls are so high that the daemon refuses none because of its size.
        shares = {"dirty_share": "0.8", "session_reserve_share": "1", "session_lease_share": "1"}
        self._node = _node(self._directory.name, memory, region, **shares)
        self._open = ExitStack()
        self._open.callback(self._directory.cleanup)
        self._open.callback(self._node.stop)
        try:
            _start(self._node)
            self.pool = self._open.enter_context(Pool.connect(self._node.socket, LAYOUT))
            self.empty_bytes = self.memory()
            for number in range(-(-segments // PROMPT_KEYS)):
                keys = held_keys(number, min(PROMPT_KEYS, segments - number * PROMPT_KEYS))
                for start in range(0, len(keys), FILLED_AT_A_TIME):
                    store(self.pool, keys[start : start + FILLED_AT_A_TIME])
            self.full_bytes = self.memory()
        except BaseException:
            self.close()
            raise

    @property
    def socket(self) -> Path:
        """Path of the daemon's local socket, for further clients."""
        return self._node.socket

    def memory(self) -> float:
        """Resident bytes of the daemon's process without the arena, which is shared memory."""
        assert self._node.process is not None
        return process_gauges(self._node.process.pid)["memory"]

    def processor_s(self) -> float:
        """Seconds of processor time that all threads of the daemon have used since its start."""
        assert self._node.process is not None
        # The number of another process's processor time clock is computed as clock_getcpuclockid(3) does it, which
        # Python does not offer.
        return time.clock_gettime((~self._node.process.pid << 3) | 2)

    def close(self) -> None:
        """Close the client and end the daemon. Idempotent."""
        self._open.close()


def store(pool: Pool, keys: Sequence[SegmentKey]) -> None:
    """Store segments with these keys. Raises TokenLakeError unless all are committed."""
    for at in range(0, len(keys), PIECE):
        part = keys[at : at + PIECE]
        with pool.store(part, patience=PATIENCE_S) as write:
            for index, slot in write.slots:
                slot[:] = index & 0xFF
        if write.codes.count(Code.COMMITTED) < len(part):
            raise TokenLakeError(f"segments were not stored: {Counter(Code(code).name for code in write.codes)}")


def start_seconds(memory: int) -> float:
    """Start a daemon with `memory` bytes of arena. Returns the seconds until it serves an engine, with all pages of the
    arena touched; `start_child` takes some 20 ms of them. Raises TokenLakeError."""
    with tempfile.TemporaryDirectory(prefix="tokenlake-") as directory:
        node = _node(directory, memory, min(64 << 20, memory))
        try:
            began = time.monotonic()
            _start(node)
            Pool.connect(node.socket, LAYOUT).close()
            return time.monotonic() - began
        finally:
            node.stop()


def _node(directory: str, memory: int, region: int, **settings: str) -> Node:
    port = reserve_port()
    given = {"memory": str(memory), "region-size": str(region), "listen": f"127.0.0.1:{port}"}
    return Node("growth", Path(directory), given | {name.replace("_", "-"): value for name, value in settings.items()})


def _start(node: Node) -> None:
    node.start()
    until = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            node.metrics()
            return
        if not node.running or time.monotonic() > until:
            raise Unreachable(f"the daemon does not serve: {node.log.read_text()[-1000:]}")
        time.sleep(0.02)


def _sizes(segments: int) -> tuple[int, int]:
    """(bytes of an arena, bytes of each of its regions) with room for `segments` segments and for less than one region
    more."""
    if segments <= RegionShape(REGION_BYTES, LAYOUT.segment_bytes).slots:
        region = -(-(segments * (LAYOUT.segment_bytes + 8) + PAGE) // PAGE) * PAGE
        return region, region
    regions = -(-segments // RegionShape(REGION_BYTES, LAYOUT.segment_bytes).slots)
    return regions * REGION_BYTES, REGION_BYTES
