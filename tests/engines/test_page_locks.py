"""Page locks of the arena for a device: a lock belongs to one mapping and ends before the mapping does."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.robustness.live import LAYOUT, LIMIT_S, Prompt, daemons, match, outcomes, wait_until
from tokenlake.memory.region import RegionShape
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_client.engines.vllm.copies import DeviceCopy
from tokenlake_client.engines.vllm.known.blocks import BlockCache, block_views, stack_layers
from tokenlake_client.engines.vllm.known.ranks import rank_shards
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.regions import Mapping, Window
from tokenlake_testing.cpu_device import CpuDevice
from tokenlake_testing.pinned_memory import mapped_at

REGION_BYTES = 1 << 20
SHAPE = RegionShape(REGION_BYTES, LAYOUT.segment_bytes)
BLOCKS = 4


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    gc.collect()
    assert not device.locks.late, "a lock outlived its memory"


def stacks(device: CpuDevice, value: float) -> Any:
    """A cache of four blocks, one segment each, filled with `value`."""
    shape = (BLOCKS, LAYOUT.kv_heads, LAYOUT.segment_tokens, 2 * LAYOUT.key_dim)
    tensors = [device.tensor(torch.full(shape, value)) for _ in range(LAYOUT.layers)]
    return stack_layers(tensors, BLOCKS, block_views("FLASH_ATTN"))


def copier(device: CpuDevice, value: float = 0.0) -> DeviceCopy:
    return DeviceCopy(BlockCache(LAYOUT, rank_shards(LAYOUT, 0, 1), stacks(device, value)), device)


def region() -> int:
    """A descriptor of new memory."""
    memory = os.memfd_create("region")
    os.ftruncate(memory, SHAPE.file_bytes)
    return memory


def mapping(memory: int, *, write: bool = True) -> Mapping:
    return Mapping(os.dup(memory), REGION_BYTES, LAYOUT.segment_bytes, write=write)


def stored(memory: int, slot: int) -> NDArray[np.float32]:
    """The bytes of one slot, as the daemon sees them."""
    start = SHAPE.header_bytes + slot * SHAPE.stride
    return np.frombuffer(os.pread(memory, LAYOUT.segment_bytes, start), dtype=np.float32)


def test_a_new_mapping_at_an_old_address_is_registered(device: CpuDevice) -> None:
    """Before, copies after a restart of the daemon went to the memory of the dead daemon."""
    old, new = region(), region()
    copy = copier(device, 1.0)
    here = mapping(old)
    address = here.slots.ctypes.data
    copy.to_slot(here.slots[1], Part(0, 0, 0, (0,)))
    assert (stored(old, 1) == 1.0).all()
    del here
    here = mapping(new)
    assert here.slots.ctypes.data == address, "the kernel gives the address again"
    copy.to_slot(here.slots[1], Part(0, 0, 0, (0,)))
    assert (here.slots[1].view(np.float32) == 1.0).all()
    assert (stored(new, 1) == 1.0).all()
    assert not device.locks.late
    os.close(old)
    os.close(new)


def test_a_registration_ends_before_its_memory(device: CpuDevice) -> None:
    memory = region()
    here = mapping(memory, write=False)
    address = mapped_at(here.slots.ctypes.data)
    window = np.asarray(Window(here, object(), lambda: [0]))
    copy = copier(device)
    copy.from_slot(window[2], Part(0, 0, 0, (0,)))
    copy.finish()
    view = window[2][100:200].reshape(10, 10)
    del window, here
    assert len(device.locks.pinned) == 1, "a view keeps the mapping"
    assert mapped_at(view.ctypes.data) == address
    del view
    assert not device.locks.pinned
    assert not device.locks.late
    assert address is not None
    assert mapped_at(address.first) != address
    os.close(memory)


def test_two_copies_share_a_registration(device: CpuDevice) -> None:
    memory = region()
    here = mapping(memory)
    one, two = copier(device, 1.0), copier(device, 2.0)
    one.to_slot(here.slots[0], Part(0, 0, 0, (0,)))
    two.to_slot(here.slots[3], Part(0, 0, 0, (0,)))
    assert len(device.locks.pinned) == 1
    del one, two
    gc.collect()
    assert len(device.locks.pinned) == 1
    del here
    assert not device.locks.pinned
    os.close(memory)


def test_released_locks_are_retaken(device: CpuDevice) -> None:
    """Also by a copy; those of memory that is gone are not."""
    one, two = region(), region()
    here, gone = mapping(one), mapping(two)
    copy = copier(device, 1.0)
    for slots in (here.slots, gone.slots):
        copy.to_slot(slots[0], Part(0, 0, 0, (0,)))
    assert len(device.locks.pinned) == 2
    copy.release_locks()
    copy.release_locks()
    assert not device.locks.pinned
    del slots, gone
    copy.take_locks()
    copy.take_locks()
    assert len(device.locks.pinned) == 1
    copy.release_locks()
    copy.to_slot(here.slots[1], Part(0, 0, 0, (0,)))
    assert len(device.locks.pinned) == 1
    assert (stored(one, 1) == 1.0).all()
    os.close(one)
    os.close(two)


def test_memory_of_a_daemon_that_ended_is_not_locked_again(device: CpuDevice) -> None:
    """A lock would allocate all of it."""
    memory = region()
    here = mapping(memory, write=False)
    copy = copier(device)
    copy.from_slot(here.slots[0], Part(0, 0, 0, (0,)))
    copy.finish()
    copy.release_locks()
    here.memory.detach()
    copy.take_locks()
    copy.from_slot(here.slots[0], Part(0, 0, 0, (0,)))
    copy.finish()
    assert not device.locks.pinned
    os.close(memory)


def test_foreign_memory_is_not_registered(device: CpuDevice) -> None:
    slot = np.zeros(LAYOUT.segment_bytes, np.uint8)
    copier(device, 1.0).to_slot(slot, Part(0, 0, 0, (0,)))
    assert (slot.view(np.float32) == 1.0).all()
    assert not device.locks.pinned


def test_a_forked_child_ends_no_registration(device: CpuDevice) -> None:
    """The arena is not mapped in a child; other memory of the child may have its address."""
    memory = region()
    here = mapping(memory)
    copier(device).to_slot(here.slots[0], Part(0, 0, 0, (0,)))
    span = mapped_at(here.slots.ctypes.data)
    assert span is not None
    child = os.fork()
    if not child:
        failed = 1
        try:
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            # MAP_PRIVATE | MAP_FIXED_NOREPLACE | MAP_ANONYMOUS
            own = libc.mmap(span.first, span.last - span.first, 3, 0x100022, -1, 0)
            del here
            gc.collect()
            failed = 2 * (mapped_at(span.first) is None) + 4 * (not device.locks.pinned) + 8 * (own != span.first)
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(memory)


LEFT_BEHIND = """
from tests.engines.test_page_locks import Part, copier, mapping, region
from tokenlake_testing.cpu_device import CpuDevice
device = CpuDevice()
memory = region()
here = mapping(memory)
copier(device, 1.0).to_slot(here.slots[0], Part(0, 0, 0, (0,)))
cycle = [here]
cycle.append(cycle)
assert len(device.locks.pinned) == 1
"""


def test_a_process_with_registrations_ends_quietly() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def connected(pool: Pool) -> bool:
    return pool.connected


def another_life(pool: Pool, before: int) -> bool:
    return pool.connected and pool.engine.incarnation != before


@pytest.mark.live
def test_stores_are_right_after_a_restart_of_the_daemon(device: CpuDevice) -> None:
    prompts = [Prompt(seed, 3) for seed in range(3)]
    copy = copier(device, 7.0)

    def fill(index: int, slot: NDArray[np.uint8]) -> None:
        copy.to_slot(slot, Part(0, 0, 0, (index,)))

    with daemons() as cluster, cluster.connect(0, LAYOUT) as pool:
        held: list[Sequence[NDArray[np.uint8]]] = []
        for life, prompt in enumerate(prompts):
            if life:
                before = pool.engine.incarnation
                cluster.nodes[0].kill()
                cluster.nodes[0].start()
                cluster.wait_ready()
                wait_until(partial(another_life, pool, before), "connected again")
                # The remaining arrays of the previous daemon are dropped, and their addresses are reused.
                gc.collect()
            assert outcomes(pool.store_all(pool.prefix(prompt.tokens).keys, fill, patience=LIMIT_S)) == {Code.COMMITTED}
            with match(pool, prompt) as lease:
                arrays = lease.fetch(deadline_s=LIMIT_S)
            assert len(arrays) == 3
            assert all((array.view(np.float32) == 7.0).all() for array in arrays), f"life {life} of the daemon"
            copy.from_slot(arrays[0], Part(0, 0, 0, (0,)))
            copy.finish()
            # The arrays of the first daemon outlive it.
            held = [arrays] if life == 1 else []
            del arrays
        del held
    del pool
    gc.collect()
    assert not device.locks.pinned


@pytest.mark.live
@pytest.mark.parametrize("how", ["in order", "killed"])
def test_kept_memory_stays_locked_over_a_restart(device: CpuDevice, how: str) -> None:
    """The pages are the same: they are neither mapped nor locked anew, and copies go on while no daemon runs."""
    copy = copier(device, 7.0)

    def fill(index: int, slot: NDArray[np.uint8]) -> None:
        copy.to_slot(slot, Part(0, 0, 0, (index,)))

    def store_and_read(pool: Pool, prompt: Prompt) -> None:
        assert outcomes(pool.store_all(pool.prefix(prompt.tokens).keys, fill, patience=LIMIT_S)) == {Code.COMMITTED}
        with match(pool, prompt) as lease:
            arrays = lease.fetch(deadline_s=LIMIT_S)
            assert [(array.view(np.float32) == 7.0).all() for array in arrays] == [True] * 3
            copy.from_slot(arrays[0], Part(0, 0, 0, (0,)))
            copy.finish()
            del arrays

    with daemons(keep_s="600") as cluster, cluster.connect(0, LAYOUT) as pool:
        node = cluster.nodes[0]
        store_and_read(pool, Prompt(0, 3))
        with match(pool, Prompt(0, 3)) as lease:
            held = lease.fetch(deadline_s=LIMIT_S)
            locked = dict(device.locks.pinned)
            assert locked
            if how == "killed":
                node.kill()
            else:
                assert node.stop() == 0
            copy.from_slot(held[1], Part(0, 0, 0, (1,)))
            copy.finish()
            node.start()
            cluster.wait_ready()
            wait_until(partial(connected, pool), "connected again")
            store_and_read(pool, Prompt(1, 3))
            assert locked.items() <= device.locks.pinned.items()
            copy.from_slot(held[2], Part(0, 0, 0, (2,)))
            copy.finish()
            del held
    del pool, lease
    gc.collect()
    assert not device.locks.pinned
