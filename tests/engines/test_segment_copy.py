"""Copies between slots and the caches of transformers models on a device: bytes, order, failures."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engines.faulty_pool import FaultyPool
from tests.engines.models import SEGMENT, family, padded, prompt
from tests.engines.test_device import LIMIT_S, in_thread
from tests.engines.test_generate import greedy
from tests.engines.test_slots import SHAPES, random_cache, shaped
from tokenlake.layout import Layout
from tokenlake.planner import Rates
from tokenlake_client.engines.common.reports import Counters
from tokenlake_client.engines.common.request import UNNAMED
from tokenlake_client.engines.common.slots import LayerPair, stacked
from tokenlake_client.engines.devices.base import DeviceFailed
from tokenlake_client.engines.transformers import EngineOptions, TokenLakeEngine, layout_of
from tokenlake_client.engines.transformers.cache import SHARED_LAYERS, CacheShape, allocate
from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.measurements import Measurements
from tokenlake_client.engines.transformers.prefill import PartialLoad, load
from tokenlake_client.engines.transformers.segment_copy import LayerRun, SegmentCopier, SegmentCopy
from tokenlake_client.engines.transformers.writer import Writer, task_of
from tokenlake_testing.cpu_copier import CpuCopier
from tokenlake_testing.cpu_device import CpuDevice

SHAPE = shaped((3, 4, 8, 12, 4), "float32")
SEGMENTS = 4


def cache_of(shape: Layout, tokens: int, value: float = 0.0) -> list[LayerPair]:
    """As the engine allocates it for one prompt."""
    cpu = torch.device("cpu")
    sizes = CacheShape(shape.kv_heads, shape.key_dim, shape.value_dim, torch.float32, (cpu,) * shape.layers)
    return [(keys[0].fill_(value), values[0].fill_(value)) for keys, values in allocate(sizes, 1, tokens)]


def slots_of(shape: Layout, count: int) -> list[NDArray[np.uint8]]:
    """Segments whose bytes all differ from those of the others; the elements of segment i are i + 1."""
    return [np.full(shape.segment_bytes // 4, index + 1, np.float32).view(np.uint8) for index in range(count)]


def same(one: list[LayerPair], other: list[LayerPair]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(itertools.chain(*one), itertools.chain(*other), strict=True))


# -- bytes


@pytest.mark.parametrize("numbers", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_device_has_the_bytes_of_a_copy_in_host_memory(numbers: tuple[int, int, int, int, int], dtype: str) -> None:
    shape = shaped(numbers, dtype)
    size, cache = shape.segment_tokens, random_cache(shape, 3 * shape.segment_tokens + 1)
    device = CpuDevice()
    targets = [[(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in cache] for _ in range(2)]
    for copier, target in zip((SegmentCopier(), CpuCopier(device)), targets, strict=True):
        slots = [np.zeros(shape.segment_bytes, np.uint8) for _ in range(3)]
        for index, slot in enumerate(slots):
            SegmentCopier().bind(shape, cache).write(slot, 1 + index * size)
            there = np.zeros_like(slot)
            copier.bind(shape, cache).write(there, 1 + index * size)
            assert np.array_equal(slot, there)
            slot.flags.writeable = False
        copier.bind(shape, target).read(slots, 1)
    assert same(*targets)


@pytest.mark.parametrize("places", ["aab", "aba", "a-b", "--a"])
def test_layers_of_several_devices_and_of_the_host(places: str) -> None:
    devices = {"a": CpuDevice(), "b": CpuDevice("cuda:1"), "-": None}
    cache, back = cache_of(SHAPE, 12), cache_of(SHAPE, 12)
    for tensor in itertools.chain(*cache):
        tensor.copy_(torch.randn(tensor.shape))
    expected, slot = np.zeros(SHAPE.segment_bytes, np.uint8), np.zeros(SHAPE.segment_bytes, np.uint8)
    SegmentCopier().bind(SHAPE, cache).write(expected, 4)
    placed(cache, devices, places).write(slot, 4)
    assert np.array_equal(slot, expected)
    placed(back, devices, places).read([slot], 4)
    for tensor, copied in zip(itertools.chain(*cache), itertools.chain(*back), strict=True):
        assert torch.equal(tensor[:, 4:8], copied[:, 4:8])
        assert not copied[:, :4].any()
        assert not copied[:, 8:].any()


def placed(cache: list[LayerPair], devices: dict[str, Any], places: str) -> SegmentCopy:
    """`places`: for each layer, the name of its device in `devices`."""
    runs, layers = [], []
    for layer, ((keys, values), place) in enumerate(zip(cache, places, strict=True)):
        device = devices[place]
        runs.append(LayerRun(SHAPE, slice(layer, layer + 1), device))
        layers.append((keys, values) if device is None else (device.tensor(keys), device.tensor(values)))
    return SegmentCopy(runs, layers, SHAPE.segment_tokens)


@pytest.mark.parametrize("layers", [0, 2])
def test_a_cache_of_another_number_of_layers(layers: int) -> None:
    cache = cache_of(SHAPE, 4)[:layers]
    if layers:
        with pytest.raises(ValueError, match="2 layers"):
            SegmentCopier().bind(SHAPE, cache)
    else:
        SegmentCopier().bind(SHAPE, cache).computed()()


def test_consecutive_layers_of_an_engine_are_one_stack() -> None:
    assert [len(stacked([pair[side] for pair in cache_of(SHAPE, 8)])) for side in (0, 1)] == [1, 1]
    apart = random_cache(SHAPE, 8)
    assert len(stacked([keys for keys, _ in apart])) == SHAPE.layers


def test_layers_in_one_allocation_have_gradients_of_their_own() -> None:
    """Autograd compares the versions of tensors: those of views of one tensor change together."""
    one, other = cache_of(SHAPE, 8)[:2]
    weight = torch.ones(1, requires_grad=True)
    product = weight * one[0]
    other[0].add_(1)
    product.sum().backward()


# -- order


def test_a_load_follows_what_the_engine_does_with_the_memory() -> None:
    """torch gives memory to a new cache whose last operations the device has yet to execute."""
    device, gate = CpuDevice(), threading.Event()
    cache = cache_of(SHAPE, SEGMENTS * SHAPE.segment_tokens)

    def earlier() -> None:
        gate.wait(LIMIT_S)
        for tensor in itertools.chain(*cache):
            tensor.fill_(9.0)

    device.engine.run(earlier)
    copy = CpuCopier(device).bind(SHAPE, cache)
    reading, errors = in_thread(lambda: copy.read(slots_of(SHAPE, SEGMENTS), 0))
    reading.join(0.05)
    assert reading.is_alive()
    gate.set()
    reading.join(LIMIT_S)
    device.engine.synchronize()
    assert not errors
    for tensor in itertools.chain(*cache):
        expected = torch.arange(1.0, SEGMENTS + 1).repeat_interleave(SHAPE.segment_tokens)
        assert torch.equal(tensor, expected[None, :, None].expand_as(tensor))


def test_a_save_follows_the_computation_and_not_what_comes_later() -> None:
    device, gate, later = CpuDevice(), threading.Event(), threading.Event()
    cache, pool = cache_of(SHAPE, SHAPE.segment_tokens), FaultyPool(SHAPE)

    def compute() -> None:
        gate.wait(LIMIT_S)
        for tensor in itertools.chain(*cache):
            tensor.fill_(3.0)

    device.engine.run(compute)
    keys = pool.prefix(range(SHAPE.segment_tokens)).keys
    writer = writer_of()
    writer.submit(task_of(pool, SHAPE, keys, 0, CpuCopier(device).bind(SHAPE, cache)))

    def compute_more() -> None:
        later.wait(LIMIT_S)

    device.engine.run(compute_more)
    assert not writer.flush(0.05)
    assert not pool.segments
    gate.set()
    assert writer.flush(LIMIT_S)
    later.set()
    assert (pool.segments[keys[0]].view(np.float32) == 3.0).all()
    writer.close()


def writer_of() -> Writer:
    def report(what: str, error: BaseException) -> None:
        raise AssertionError(what) from error

    return Writer(Counters(Counts), report, print, tasks=4, patience=0.0)


# -- failures


def filled_pool() -> tuple[FaultyPool, Any]:
    pool = FaultyPool(SHAPE)
    keys = pool.prefix(range(SEGMENTS * SHAPE.segment_tokens)).keys
    pool.store_all(keys, slots_of(SHAPE, SEGMENTS))
    return pool, keys


def loading(device: CpuDevice, pool: FaultyPool, keys: Any, window: int) -> Callable[[], int]:
    cache = CpuCopier(device).bind(SHAPE, cache_of(SHAPE, SEGMENTS * SHAPE.segment_tokens))
    return lambda: load(pool, keys, cache, window, Measurements(Rates()), UNNAMED, SEGMENTS)


def test_segments_are_leased_until_their_copies_have_ended() -> None:
    device = CpuDevice()
    pool, keys = filled_pool()
    device.held.clear()
    thread, errors = in_thread(loading(device, pool, keys, 2))
    thread.join(0.05)
    assert thread.is_alive()
    assert pool.leased == SEGMENTS
    device.held.set()
    thread.join(LIMIT_S)
    assert not errors
    assert not pool.leased


@pytest.mark.parametrize("operation", ["queue run", "queue to_device"])
def test_a_copy_that_fails_releases_nothing_early(operation: str) -> None:
    """The first copies are under way when the third fails."""
    device = CpuDevice()
    pool, keys = filled_pool()
    device.held.clear()
    device.fail(operation, after=2)
    thread, errors = in_thread(loading(device, pool, keys, SEGMENTS))
    thread.join(0.05)
    assert thread.is_alive()
    assert pool.leased == SEGMENTS
    device.held.set()
    thread.join(LIMIT_S)
    assert isinstance(errors[0], PartialLoad)
    assert errors[0].tokens == 0
    assert not pool.leased


@pytest.mark.parametrize("operation", ["run", "to_device"])
def test_tokens_of_a_failed_window_are_not_loaded(operation: str) -> None:
    device = CpuDevice()
    pool, keys = filled_pool()
    device.fail(operation, after=3)
    with pytest.raises(PartialLoad) as failed:
        loading(device, pool, keys, 2)()
    assert failed.value.tokens == 2 * SHAPE.segment_tokens
    assert isinstance(failed.value.__cause__, DeviceFailed)
    assert not pool.leased


@pytest.mark.parametrize("operation", ["run", "to_host", "queue run", "queue to_host"])
def test_a_segment_whose_save_failed_is_not_stored(operation: str) -> None:
    device, slot = CpuDevice(), np.zeros(SHAPE.segment_bytes, np.uint8)
    copy = CpuCopier(device).bind(SHAPE, cache_of(SHAPE, SHAPE.segment_tokens, 3.0))
    device.fail(operation)
    with pytest.raises(DeviceFailed):
        copy.write(slot, 0)
    assert not slot.any()


# -- an engine


@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa", "llama-mqa"])
def test_an_engine_on_a_device_gives_the_models_tokens(name: str) -> None:
    model = family(name)
    pool = FaultyPool(layout_of(model, segment_tokens=SEGMENT))
    ids, mask = padded([prompt(5 * SEGMENT + 3), prompt(7, 1)])
    expected = greedy(model.generate, ids, mask)
    options = EngineOptions(window=2, prefill_chunk=24)
    with TokenLakeEngine(model, pool, options, CpuCopier(CpuDevice())) as engine:
        assert greedy(engine.generate, ids, mask) == expected
        assert engine.flush(LIMIT_S)
        assert greedy(engine.generate, ids, mask) == expected
        assert engine.counts.tokens_hit == 5 * SEGMENT
        assert engine.counts.failures == 0


def test_few_layers_share_an_allocation() -> None:
    """An answer that outgrows its cache needs the memory of one more cache and of few layers, not of two caches."""
    count = 2 * SHARED_LAYERS + 1
    pairs = allocate(CacheShape(2, 4, 4, torch.float32, (torch.device("cpu"),) * count), 1, 8)
    places = [keys.untyped_storage().data_ptr() for keys, _ in pairs]
    assert len(set(places)) == 3
    assert [stack.shape[0] for stack in stacked([keys[0] for keys, _ in pairs])] == [SHARED_LAYERS, SHARED_LAYERS, 1]
