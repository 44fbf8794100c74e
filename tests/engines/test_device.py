"""The contract of a device's driver, for the device of tests and, where there is one, a GPU; and copies between slots
and blocks on a device that is late or fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray

from tests.engines.test_blocks import BLOCK, BLOCKS, DIM, HEADS, LAYERS, LAYOUT, SEGMENT, caches
from tokenlake.errors import Unreachable
from tokenlake.memory.region import RegionShape
from tokenlake.wire import Code
from tokenlake_client.engines.devices.base import Device, DeviceFailed
from tokenlake_client.engines.devices.cuda import CudaDevice
from tokenlake_client.engines.vllm.copies import DeviceCopy
from tokenlake_client.engines.vllm.counters import EngineCounters
from tokenlake_client.engines.vllm.known.blocks import BlockCache, block_views, stack_layers
from tokenlake_client.engines.vllm.known.ranks import RankShards, rank_shards
from tokenlake_client.engines.vllm.known.step_plan import LoadPlan, SavePlan, StepPlan
from tokenlake_client.engines.vllm.known.worker import WorkerSide
from tokenlake_client.engines.vllm.offloading.pages import PageCache, PageTable
from tokenlake_client.engines.vllm.parts import Part
from tokenlake_client.engines.vllm.settings import EngineSettings
from tokenlake_client.regions import Mapping
from tokenlake_testing.cpu_device import CpuDevice
from tokenlake_testing.device_bytes import bytes_of, filled, random_bytes

LIMIT_S = 20.0
REGION_BYTES = 1 << 20


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaDevice(request.param)


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


# -- the contract


def test_operations_of_a_stream_are_executed_in_their_order(device: Device) -> None:
    stream, contents = device.stream(), random_bytes(3 << 20, 0)
    first, second = (stream.empty((3 << 20,), torch.uint8) for _ in range(2))
    back = np.zeros(3 << 20, np.uint8)
    stream.to_device(first, contents)
    stream.run(lambda: second.copy_(first))
    stream.to_host(back, second)
    stream.synchronize()
    assert xxhash.xxh3_64_intdigest(back.data) == xxhash.xxh3_64_intdigest(contents.data)


def test_a_stream_waits_for_a_point_of_the_engine(device: Device) -> None:
    stream = device.stream()
    tensor = filled(stream, (1000,), torch.uint8, np.ones(1000, np.uint8))
    stream.wait(device.computed())
    assert bytes_of(stream, tensor).all()
    first = device.mark()
    last = device.mark()
    stream.wait(last)
    stream.synchronize()
    seconds = device.between(first, last)
    assert seconds is not None
    assert seconds >= 0


def test_memory_of_a_device_has_a_handle_at_its_owner_alone(device: Device) -> None:
    memory = device.allocate(4096)
    with pytest.raises(DeviceFailed):
        device.open(memory.handle(), 4096)
    memory.close()
    memory.close()
    with pytest.raises(DeviceFailed):
        memory.handle()


# -- the device of tests


def test_the_host_cannot_access_the_memory_of_the_device() -> None:
    device = CpuDevice()
    stream = device.stream()
    tensor = filled(stream, (4, 2), torch.uint8, np.arange(8, dtype=np.uint8))
    for access in (
        tensor.sum,
        tensor.numpy,
        tensor.tolist,
        lambda: tensor[1:].add_(1),
        lambda: torch.zeros(4, 2) + tensor,
    ):
        with pytest.raises(DeviceFailed):
            access()
    assert tensor.view(2, 4).permute(1, 0)[1:].shape == (3, 2)
    assert bytes(bytes_of(stream, tensor)) == bytes(range(8))
    stream.run(lambda: tensor.copy_(torch.zeros(4, 2, dtype=torch.uint8)))
    with pytest.raises(DeviceFailed, match="memory of the host"):
        stream.synchronize()


@pytest.mark.parametrize("operation", ["run", "to_device", "to_host"])
def test_a_failure_is_raised_later_and_ends_all_later_operations(operation: str) -> None:
    device = CpuDevice()
    stream, other = device.stream(), device.stream()
    tensor, target = stream.empty((8,), torch.uint8), np.zeros(8, np.uint8)
    device.fail(operation)
    stream.to_device(tensor, np.ones(8, np.uint8))
    stream.run(lambda: tensor.add_(1))
    stream.to_host(target, tensor)
    for each in (stream, stream, other):
        with pytest.raises(DeviceFailed, match=operation):
            each.synchronize()
    assert not target.any()
    with pytest.raises(DeviceFailed):
        other.run(lambda: None)


# -- copies on a device that is late or fails


def blocks_on(device: CpuDevice, value: float = 0.0) -> tuple[DeviceCopy, list[Any]]:
    tensors = caches(HEADS, "NHD", 1, together=True)
    for tensor in tensors:
        tensor.fill_(value)
    there = [device.tensor(tensor) for tensor in tensors]
    stacks = stack_layers(there, BLOCKS, block_views("FLASH_ATTN"))
    return DeviceCopy(BlockCache(LAYOUT, rank_shards(LAYOUT, 0, 1), stacks), device), tensors


def slot_of(value: float) -> NDArray[np.uint8]:
    elements = LAYERS * 2 * HEADS * SEGMENT * DIM
    return np.full(elements, value, np.float32).view(np.uint8)


def worker(copy: DeviceCopy, slots: list[NDArray[np.uint8]], stored: list[NDArray[np.uint8]]) -> WorkerSide:
    """A rank whose pool has the segments `slots` and adds those that it stores to `stored`."""
    lease = SimpleNamespace(
        hits=len(slots),
        incarnation=1,
        fetch=lambda start, stop, at_most_s=0.0: slots[start:stop],
        release=lambda: None,
    )

    def store_all(keys: Any, fill: Callable[[int, NDArray[np.uint8]], None], *_: Any, **__: Any) -> bytes:
        slot = np.zeros(LAYOUT.segment_bytes, np.uint8)
        fill(0, slot)
        stored.append(slot)
        return bytes([Code.COMMITTED] * len(keys))

    attaching = SimpleNamespace(attach=lambda *_, **__: lease)
    pool = SimpleNamespace(engine=attaching, store_all=store_all)
    members: Any = SimpleNamespace(get=lambda *_, **__: pool, close=lambda: None)
    settings, shards = EngineSettings(segment_tokens=SEGMENT), RankShards(0, 1, 1, True)
    return WorkerSide(members, copy, shards, settings, BLOCK, EngineCounters(), lambda what, error: None, print)


LOAD = StepPlan(1, 7, 1, loads=(LoadPlan("r", (9,), 1, 0, SEGMENT, (4, 1), local=True),))
SAVE = StepPlan(1, 7, 1, saves=(SavePlan(1, "r", 0, (b"k" * 32,), (4, 1)),))


def received(side: WorkerSide) -> set[str]:
    names: set[str] = set()
    deadline = threading.Event()
    for _ in range(int(LIMIT_S / 0.01)):
        names |= side.finished()[1]
        if names:
            break
        deadline.wait(0.01)
    return names


def test_a_load_into_blocks_follows_the_steps_that_use_them() -> None:
    """vLLM may give blocks away while the device still executes a step that writes them."""
    device, gate = CpuDevice(), threading.Event()
    copy, tensors = blocks_on(device)

    def step() -> None:
        gate.wait(LIMIT_S)
        for tensor in tensors:
            tensor[[4, 1]] = 9.0

    device.engine.run(step)
    side = worker(copy, [slot_of(2.0)], [])
    side.begin(LOAD)
    side.load()
    threading.Event().wait(0.05)
    gate.set()
    assert received(side) == {"r"}
    assert not side.errors()
    device.engine.synchronize()
    assert all((tensor[[4, 1]] == 2.0).all() for tensor in tensors)


@pytest.mark.parametrize("operation", ["run", "to_device", "queue run", "queue to_device"])
def test_the_blocks_of_a_load_that_fails_are_errors(operation: str) -> None:
    device = CpuDevice()
    copy, _ = blocks_on(device)
    side = worker(copy, [slot_of(2.0)], [])
    device.fail(operation)
    side.begin(LOAD)
    side.load()
    assert received(side) == {"r"}
    assert side.errors() == {4, 1}


def test_sleep_stores_what_waits_and_releases_the_page_locks() -> None:
    """And wake retakes them."""
    device, stored = CpuDevice(), list[NDArray[np.uint8]]()
    copy, _ = blocks_on(device, 3.0)
    shape, memory = RegionShape(REGION_BYTES, LAYOUT.segment_bytes), os.memfd_create("region")
    os.ftruncate(memory, shape.file_bytes)
    slots = Mapping(memory, REGION_BYTES, LAYOUT.segment_bytes, write=False).slots
    side = worker(copy, [slots[0]], stored)
    side.begin(LOAD)
    side.load()
    assert received(side) == {"r"}
    assert len(device.locks.pinned) == 1
    side.begin(SAVE)
    side.save()
    side.sleep(LIMIT_S)
    assert len(stored) == 1
    assert not device.locks.pinned
    side.wake()
    assert len(device.locks.pinned) == 1
    side.begin(LOAD)
    side.load()
    assert received(side) == {"r"}
    assert not side.errors()
    side.close(LIMIT_S)


def test_sleep_keeps_the_page_locks_of_a_load_that_has_not_ended() -> None:
    device = CpuDevice()
    copy, _ = blocks_on(device)
    side = worker(copy, [slot_of(2.0)], [])
    released: list[None] = []
    copy.release_locks = lambda: released.append(None)  # type: ignore[method-assign]
    device.held.clear()
    side.begin(LOAD)
    side._loads.submit((LOAD, LOAD.loads[0], lambda: None))
    with pytest.raises(Unreachable):
        side.sleep(0.0)
    assert not released
    device.held.set()
    assert received(side) == {"r"}
    side.sleep(LIMIT_S)
    assert released


def test_loads_fail_where_the_step_cannot_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    copy, _ = blocks_on(device)
    side = worker(copy, [slot_of(2.0)], [])

    def lost() -> None:
        raise DeviceFailed("lost")

    monkeypatch.setattr(device, "computed", lost)
    side.begin(LOAD)
    side.load()
    assert received(side) == {"r"}
    assert side.errors() == {4, 1}


@pytest.mark.parametrize("operation", ["run", "to_host", "queue run", "queue to_host"])
def test_a_segment_whose_copy_failed_is_not_stored(operation: str) -> None:
    device, stored = CpuDevice(), list[NDArray[np.uint8]]()
    copy, _ = blocks_on(device, 3.0)
    side = worker(copy, [], stored)
    device.fail(operation)
    side.begin(SAVE)
    side.save()
    assert side.flush(LIMIT_S)
    assert not stored
    if operation.startswith("queue"):
        side.begin(SAVE)
        side.save()
        assert side.flush(LIMIT_S)
        assert (stored[0].view(np.float32) == 3.0).all()


def test_a_queued_copy_that_fails() -> None:
    """The caller gives the slot and the blocks away then."""
    device = CpuDevice()
    pages = [[PageTable(device.tensor(torch.zeros(4, 16, dtype=torch.int8)), 16)]]
    copy = DeviceCopy(PageCache(pages, 2), device)
    slot = random_bytes(32, 0)
    device.held.clear()
    device.fail("queue run")

    def load() -> None:
        copy.from_slot(slot, Part(0, 0, 0, (3, 1)))
        copy.finish()

    loading, errors = in_thread(load)
    loading.join(0.2)
    assert loading.is_alive()
    device.held.set()
    loading.join(LIMIT_S)
    assert isinstance(errors[0], DeviceFailed)


def test_a_save_returns_when_its_copy_is_complete() -> None:
    device = CpuDevice()
    copy, _ = blocks_on(device, 5.0)
    slot = np.zeros(LAYOUT.segment_bytes, np.uint8)
    device.held.clear()
    saving, errors = in_thread(lambda: copy.to_slot(slot, Part(0, 0, 0, (4, 1))))
    saving.join(0.1)
    assert saving.is_alive()
    assert not slot.any()
    device.held.set()
    saving.join(LIMIT_S)
    assert not errors
    assert (slot.view(np.float32) == 5.0).all()
