"""NIXL alone: one process reads windows of segments out of the memory of another one, without daemons."""

from __future__ import annotations

import mmap
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from tokenlake.errors import TokenLakeError
from tokenlake.wire.places import HOST
from tokenlake_bench.transfer.base import WINDOWS, Size
from tokenlake_bench.transfer.windows import Windows, fill_windows
from tokenlake_server.nixl.agent import Agent, Span, State
from tokenlake_testing.children import end_with_parent

POLL_S = 0.0002
STOP_S = 5.0


class BareNixl:
    """NIXL as a `System`: the spans of a call are those of the pool's slots, one for each segment, in one read."""

    name = "bare-nixl"

    def __init__(self, size: Size, windows: Windows) -> None:
        """Starts the process whose memory is read."""
        self._size = size
        self._windows = windows
        shape = (WINDOWS, size.count, size.segment_bytes)
        self._memory = mmap.mmap(-1, int(np.prod(shape)))
        self._target = np.frombuffer(self._memory, np.uint8).reshape(shape)
        self._target[:] = 1
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_lend, args=(theirs, shape), daemon=True)
        self._process.start()
        self._agent = Agent("bare/reader")
        self._agent.register((self._target.ctypes.data, self._target.nbytes, HOST))
        description, self._there = self._ours.recv()
        self._name = self._agent.meet(description)

    def rows(self) -> Sequence[str]:
        """Names of the kinds of calls; see `System`."""
        return (f"fetch_tcp_{self._size.many}", f"fetch_{self._size.one}")

    def sample(self, row: str, turn: int) -> list[float]:
        """Read one window, or one segment; see `System`."""
        window = turn % WINDOWS
        count = 1 if row == f"fetch_{self._size.one}" else self._size.count
        here = self._spans(self._target.ctypes.data, window, count)
        there = self._spans(self._there, window, count)
        self._target[window, :count, 0] += 1
        began = time.perf_counter()
        read = self._agent.read(self._name, here, there)
        while (state := self._agent.state(read)) is State.UNDER_WAY:
            pass
        took = time.perf_counter() - began
        if state is State.FAILED:
            raise TokenLakeError("NIXL alone does not read")
        self._agent.release(read)
        if not np.array_equal(self._target[window, :count], self._windows.source[window, :count]):
            raise TokenLakeError("NIXL alone has read wrong bytes")
        return [took]

    def _spans(self, base: int, window: int, count: int) -> list[Span]:
        size = self._size.segment_bytes
        return [(base + (window * self._size.count + index) * size, size, HOST) for index in range(count)]

    def close(self) -> None:
        """End the process; see `System`."""
        self._ours.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _lend(pipe: Connection, shape: tuple[int, int, int]) -> None:
    """The main function of the process whose memory is read: it ends with the pipe."""
    end_with_parent()
    source = np.empty(shape, np.uint8)
    fill_windows(source)
    agent = Agent("bare/owner")
    agent.register((source.ctypes.data, source.nbytes, HOST))
    pipe.send((agent.description(), source.ctypes.data))
    while not pipe.poll(POLL_S):
        agent.progress()
