"""The memory regions: what the kernel takes back."""

from __future__ import annotations

import fcntl
import logging
import os

import pytest

from tokenlake.memory.region import PAGE, RegionShape
from tokenlake.wire.slots import SlotRef
from tokenlake_server.engines.arena import Arena, Region


def test_freed_pages_read_as_zeros() -> None:
    region = Region(0, 4 * PAGE, huge_pages=False)
    region.view[:] = b"\1" * len(region.view)
    region.free_pages([(PAGE, 2 * PAGE)])
    assert [region.view[number * PAGE] for number in range(4)] == [0, 1, 0, 0]
    region.close()


def allocated(region: Region) -> int:
    """Bytes that the kernel has allocated for the region."""
    return os.fstat(region.fd).st_blocks * 512


@pytest.mark.parametrize("slot_bytes", [64, 10_000, 3 << 20, 5 << 20, 8 << 20])
def test_a_region_has_memory_for_its_slots_alone(slot_bytes: int) -> None:
    """All of it is allocated before an engine writes, and the rest of the region is given back."""
    arena = Arena()
    arena.make(3, 8 << 20)
    shape = RegionShape(RegionShape(8 << 20, slot_bytes).fitted(), slot_bytes)
    region = arena.region(3)
    region.cut(shape.region_bytes, slot_bytes)
    region.trim()
    assert allocated(region) == shape.file_bytes
    last = SlotRef(3, shape.slots - 1, 7)
    (view,) = arena.slots([last], slot_bytes)
    view[:] = b"\2" * slot_bytes
    arena.stamp([last])
    assert allocated(region) == shape.file_bytes
    view.release()
    arena.end(3)
    with pytest.raises(KeyError):
        arena.region(3)
    arena.close()


def test_an_arena_that_stops_makes_no_region() -> None:
    arena = Arena()
    arena.stop()
    arena.make(0, 8 << 20)
    with pytest.raises(KeyError):
        arena.region(0)


def test_memory_that_is_not_taken_back_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The kernel frees no page of a memfd that is sealed against writes."""
    region = Region(7, PAGE, huge_pages=False)
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.dup2(fd, region.fd, inheritable=False)
    os.close(fd)
    with caplog.at_level(logging.ERROR):
        region.free_pages()
    assert f"{2 * PAGE} bytes of region 7 are still allocated: Operation not permitted" in caplog.text
    region.close()
