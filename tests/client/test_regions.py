"""Mappings that an engine does not use any more."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import cast

import numpy as np
import pytest

from tokenlake.errors import Unreachable
from tokenlake.memory.region import RegionShape
from tokenlake_client.regions import IDLE_S, Mapping, Regions, Window


class FakeMemory:
    """Replaces the memory of a mapping."""


class FakeMapping:
    """Replaces a mapping, of which the test observes only the lifetime."""

    def __init__(self) -> None:
        self.memory = FakeMemory()


def test_an_idle_mapping_is_dropped() -> None:
    """Otherwise an engine would keep two mappings of each region that it ever used."""
    now = [0.0]
    opened: list[tuple[int, bool]] = []
    lives: dict[int, weakref.ref[Mapping]] = {}

    def open_region(region: int, write: bool) -> Mapping:
        opened.append((region, write))
        made = cast(Mapping, FakeMapping())
        lives[region] = weakref.ref(made)
        return made

    regions = Regions(open_region, lambda: now[0])
    regions.get(1)
    held = regions.get(2)
    now[0] = IDLE_S
    assert regions.get(1) is not None
    now[0] = IDLE_S + 1
    regions.get(3)
    assert lives[1]() is not None, "used a second ago"
    assert lives[2]() is held, "an array of it is alive"
    del held
    assert lives[2]() is None
    regions.get(2)
    assert opened == [(1, False), (2, False), (3, False), (2, False)]


def test_arrays_survive_the_end_of_their_region() -> None:
    """Their bytes are the same at any time, also for a thread that reads meanwhile."""
    shape = RegionShape(1 << 20, 10_000)
    memory = os.memfd_create("test")
    os.ftruncate(memory, shape.file_bytes)
    with mmap.mmap(memory, shape.file_bytes) as writer:
        writer[:] = bytes(range(256)) * (shape.file_bytes // 256)
    mapping = Mapping(os.dup(memory), shape.region_bytes, shape.slot_bytes, write=False)
    window = np.asarray(Window(mapping, object(), lambda: [3, 50]))
    arrays = [window[3], window[50]]
    expected = [array.tobytes() for array in arrays]
    stop = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not stop.is_set():
            wrong.extend(at for at, array in enumerate(arrays) if array.tobytes() != expected[at])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        mapping.memory.detach()
        os.ftruncate(memory, 0)
        os.close(memory)
        assert [array.tobytes() for array in arrays] == expected
    finally:
        stop.set()
        reader.join()
    assert not wrong
    assert not mapping.generations.any(), "a copy that was under way is a miss"
    with pytest.raises(Unreachable):
        Window(mapping, object(), lambda: [4])
