"""Attention over segments of other nodes: a query engine asks those of one, two or four others, over loopback.

The ceiling is the same kernel over the same segments in one process, then the bare transfer of as many bytes there and
back. The fleet's processes share this machine's processors.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tokenlake.attention import AttentionShape, Stored, from_float32
from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import engine
from tokenlake_bench.attention.echo import Echo
from tokenlake_bench.cluster import Cluster
from tokenlake_client import Pool
from tokenlake_client.queries import QueryBuffer, View
from tokenlake_query.kernels import Kernel, kernel_for

__all__ = ["RemoteCase", "remote_cases"]

Q_HEADS: Final = 32
LAYERS: Final = 2
SEGMENTS: Final = 16
"""Of every view: 4,096 tokens."""
STORED: Final = 120
"""So many that each of five nodes has `SEGMENTS`."""
OWNERS: Final = (1, 2, 4)
NODES: Final = 1 + max(OWNERS)
READY_S: Final = 60.0
PATIENT_S: Final = 10.0
TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 3e-2}
LAYOUT: Final = Layout(
    model_id="bench",
    weights_digest="00",
    dtype="bfloat16",
    layers=LAYERS,
    kv_heads=8,
    key_dim=128,
    value_dim=128,
    position="none",
)


class RemoteCase:
    """`tokens` query tokens over `SEGMENTS` segments that lie at `places`: (pool of the node, their keys) each."""

    def __init__(self, name: str, fleet: _Fleet, places: Sequence[tuple[Pool, list[SegmentKey]]], tokens: int) -> None:
        shape = AttentionShape.of(fleet.layout, Q_HEADS)
        self.name = name
        size = 2 if fleet.layout.dtype == "bfloat16" else 4
        away = any(pool is not fleet.asker for pool, _ in places)
        self.bytes_formula = sum(len(keys) > 0 for _, keys in places) * tokens * shape.query_bytes(size, size) * away
        self._fleet = fleet
        self._bytes = 0
        self._slots = [slot for pool, keys in places for slot in _slots_at(pool, keys)]
        self._view = _open_view(fleet.asker, [key for _, keys in places for key in keys], shape)
        self._buffer: QueryBuffer = fleet.asker.init_query([(self._view, tokens)])
        drawn = np.random.default_rng(tokens).standard_normal((tokens, Q_HEADS, LAYOUT.key_dim), np.float32)
        self._queries: Stored = from_float32(drawn, fleet.layout.dtype)
        self._buffer.queries[...] = self._queries
        self._sent = self._received = 0
        self._compare()

    def sample(self, turn: int) -> float:
        """See `Case`: the round trip of an engine's query."""
        began = time.perf_counter()
        answer = self._fleet.asker.query(self._buffer, turn % LAYERS, deadline_s=PATIENT_S).wait()
        taken = time.perf_counter() - began
        if answer.lost:
            raise Unreachable(f"{self.name}: the query was lost")
        self._sent, self._received = answer.sent_bytes, answer.received_bytes
        return taken

    def ceiling(self, turn: int) -> float:
        """See `Case`."""
        began = time.perf_counter()
        self._fleet.kernel.attend(self._queries, self._slots, turn % LAYERS)
        if self._sent:
            self._fleet.echo.exchange(self._sent, self._received)
        return time.perf_counter() - began

    def bytes(self) -> int:
        """See `Case`: frames included."""
        return self._sent + self._received

    def close(self) -> None:
        """Give back what it holds."""
        self._buffer.close()
        self._view.close()

    def _compare(self) -> None:
        self.sample(1)
        expected = self._fleet.kernel.attend(self._queries, self._slots, 1)
        worst = float(np.abs(self._buffer.output - expected.out).max())
        if not worst <= TOLERANCE[self._fleet.layout.dtype]:
            raise TokenLakeError(f"{self.name}: differs by {worst} from the kernel over the same segments")
