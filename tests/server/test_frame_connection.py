"""The slices of time of a connection on the control loop, and answers that the other side does not read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import socket
from collections.abc import Callable

import pytest

from tokenlake.wire import HEADER_BYTES
from tokenlake_server.loop.frame_connection import MAX_UNSENT_DESCRIPTORS, SLICE_S, FrameConnection
from tokenlake_server.loop.loop_share import LoopShare

LIMIT_S = 20.0
FRAMES = 2000
PER_SLICE = 10
"""Frames that a slice has time for by the clock of these tests."""


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def stepped() -> Callable[[], float]:
    """A clock that moves by the tenth part of a slice whenever it is read."""
    return (SLICE_S / PER_SLICE * step for step in itertools.count()).__next__


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not reached():
            await asyncio.sleep(0)


class Scene:
    """A connection on the running loop, and the other end of its socket."""

    def __init__(self, on_frame: Callable[[bytes], None], pause_bytes: int = 0) -> None:
        ours, self.other = socket.socketpair()
        self.other.setblocking(False)
        self.closed: list[str] = []
        self.connection = FrameConnection(
            asyncio.get_running_loop(),
            ours,
            1 << 20,
            on_frame,
            self.closed.append,
            pause_bytes=pause_bytes,
            clock=stepped(),
        )

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close("the test ends")
        self.other.close()

    def received(self) -> tuple[bytes, list[int]]:
        """What the other end can read now, and the descriptors beside it."""
        data, found = b"", list[int]()
        while True:
            try:
                part, descriptors, _, _ = socket.recv_fds(self.other, 1 << 16, 16)
            except BlockingIOError:
                return data, found
            data, found = data + part, found + descriptors


async def test_a_slice_handles_a_few_of_many_frames() -> None:
    """Few frames are handled between two callbacks of the loop that belong to others."""
    handled: list[bytes] = []
    with Scene(handled.append) as scene:
        scene.other.setblocking(True)
        scene.other.sendall(frame(b"x") * FRAMES)
        most = seen = 0
        async with asyncio.timeout(LIMIT_S):
            while len(handled) < FRAMES:
                await asyncio.sleep(0)
                most, seen = max(most, len(handled) - seen), len(handled)
    assert 0 < most <= PER_SLICE + 1


async def test_frames_stay_in_order() -> None:
    handled: list[bytes] = []
    bodies = [b"%d" % number for number in range(3 * PER_SLICE)]
    with Scene(handled.append) as scene:
        scene.other.send(b"".join(map(frame, bodies)))
        await until(lambda: len(handled) == len(bodies))
    assert handled == bodies


async def test_a_connection_that_closes_within_a_slice() -> None:
    """A connection that closes within a slice handles nothing more."""
    handled: list[bytes] = []

    def handle(body: bytes) -> None:
        handled.append(body)
        if len(handled) == 3 * PER_SLICE:
            scene.connection.close("enough")

    with Scene(handle) as scene:
        scene.other.send(frame(b"x") * 100)
        await until(lambda: bool(scene.closed))
        for _ in range(20):
            await asyncio.sleep(0)
    assert len(handled) == 3 * PER_SLICE


@pytest.mark.parametrize("unread", [0, 1 << 20])
async def test_a_descriptor_waits_behind_unread_answers(unread: int) -> None:
    """The other side gets it in order, once it reads. The connection was once closed instead."""

    data, found = b"", list[int]()
    reading, writing = os.pipe()
    with Scene(lambda body: None) as scene:
        scene.connection.send(bytes(unread))
        scene.connection.send(b"with a descriptor", [writing])
        os.close(writing)
        scene.connection.send(b"the end")
        async with asyncio.timeout(LIMIT_S):
            while not data.endswith(b"the end"):
                part, descriptors = scene.received()
                data, found = data + part, found + descriptors
                await asyncio.sleep(0)
        assert not scene.closed
    os.write(found[0], b"it works")
    os.close(found[0])
    assert os.read(reading, 100) == b"it works"
    os.close(reading)
    data, found = data, found
    assert data == bytes(unread) + b"with a descriptor" + b"the end"
    assert len(found) == 1


async def test_a_side_that_reads_no_answer() -> None:
    """Bytes and descriptors that wait to be read are bounded by the pause."""
    answer, pause = 4096, 64 << 10
    handled: list[int] = []

    def handle(body: bytes) -> None:
        handled.append(1)
        scene.connection.send(bytes(answer))

    with Scene(handle, pause) as scene:
        scene.other.send(frame(b"x") * 1000)
        connection = scene.connection
        await until(lambda: connection._unsent_bytes > pause)
        for _ in range(200):
            await asyncio.sleep(0)
        assert connection._unsent_bytes <= pause + answer
        assert len(handled) < 1000
        async with asyncio.timeout(LIMIT_S):
            while len(handled) < 1000 or connection._unsent_bytes:
                scene.received()
                await asyncio.sleep(0)


async def test_unsent_descriptors_are_bounded() -> None:
    gc.collect()  # what other tests have left open is not closed in between
    open_before = len(os.listdir("/proc/self/fd"))

    null = os.open(os.devnull, os.O_RDONLY)
    handled: list[int] = []

    def handle(body: bytes) -> None:
        handled.append(1)
        scene.connection.send(b"here", [null])

    with Scene(handle, 1 << 20) as scene:
        scene.connection.send(bytes(1 << 20))
        scene.other.send(frame(b"x") * 100)
        await until(lambda: len(handled) == MAX_UNSENT_DESCRIPTORS)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(handled) == MAX_UNSENT_DESCRIPTORS
    os.close(null)
    assert len(os.listdir("/proc/self/fd")) == open_before


async def test_connections_of_a_tenant_share_a_slice() -> None:
    """A tenant with 20 connections full of frames handles as many frames as one with a single connection."""

    handled: list[str] = []
    red, blue = (LoopShare(asyncio.get_running_loop(), SLICE_S) for _ in range(2))
    with contextlib.ExitStack() as stack:

        def connect(share: LoopShare, name: str) -> None:
            one = stack.enter_context(Scene(lambda _: handled.append(name)))
            one.connection.share = share
            one.other.sendall(frame(b"x") * FRAMES)

        for _ in range(20):
            connect(red, "red")
        connect(blue, "blue")
        await until(lambda: handled.count("blue") == FRAMES)
        assert handled.count("red") < 1.2 * FRAMES
        await until(lambda: len(handled) == 21 * FRAMES)
