"""Each kernel against the reference over the concatenated tokens. Every byte that a kernel must not read is NaN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from tokenlake.attention import AttentionShape, Partial, Stored, as_float32, attend, from_float32, stored_dtype
from tokenlake.attention.slots import SlotMap
from tokenlake.errors import ConfigurationError, LayoutRefused
from tokenlake.layout import Layout, static_quantisation
from tokenlake_query.kernels import Kernel, kernel_for

torch_cpu = pytest.importorskip("tokenlake_query.kernels.torch_cpu")

LAYER, LAYERS, TOKENS = 1, 3, 5
SPACING = 64
"""Slots begin at multiples of this, as in an arena."""
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

GROUPED = Layout(
    model_id="m",
    weights_digest="00",
    dtype="float32",
    layers=LAYERS,
    kv_heads=8,
    key_dim=16,
    value_dim=16,
    position="rope",
    segment_tokens=TOKENS,
)


def changed(**fields: object) -> Layout:
    return msgspec.structs.replace(GROUPED, **fields)


ARRANGEMENTS = {
    "grouped-query": (GROUPED, 32),
    "multi-head, two heads in a group": (changed(kv_heads=128), 128),
    "multi-query": (changed(kv_heads=1), 8),
    "narrow values": (changed(value_dim=7), 16),
    "wide values": (changed(value_dim=24), 8),
    "odd columns": (changed(key_dim=19, value_dim=19, kv_heads=2), 4),
    "latent": (changed(kv_heads=1, key_dim=72, value_dim=64, attention="latent"), 12),
}
PLACES = {
    "neighbours": [1, 2, 3, 4],
    "neighbours, last first": [4, 3, 2, 1],
    "scattered": [9, 0, 4, 1, 6, 3, 12],
    "one": [2],
}


@dataclass
class Cached:
    """Segments in slots of one memory. All bytes but the keys and values of `LAYER` are NaN."""

    layout: Layout
    places: list[int]
    scale: float = 1.0
    slots: list[NDArray[np.uint8]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(len(self.places))
        slots = SlotMap.of(self.layout)
        stride = -(-slots.nbytes // SPACING) * SPACING
        nans = np.full(((max(self.places) + 2) * stride + SPACING) // 4, 0xFFFFFFFF, np.uint32).view(np.uint8)
        base = -nans.__array_interface__["data"][0] % SPACING
        keys: list[NDArray[np.float32]] = []
        values: list[NDArray[np.float32]] = []
        for place in self.places:
            slot = nans[base + place * stride :][: slots.nbytes]
            for view, kept in zip(slots.views(slot, LAYER), (keys, values), strict=True):
                if not (self.layout.latent and kept is values):
                    drawn = rng.standard_normal(view.shape).astype(np.float32) * self.scale
                    view[...] = from_float32(drawn, self.layout.dtype)
                kept.append(as_float32(view, self.layout.dtype).reshape(self.layout.kv_heads, slots.tokens, -1).copy())
            slot.flags.writeable = False
            self.slots.append(slot)
        self.keys, self.values = np.concatenate(keys, 1), np.concatenate(values, 1)

    def check(self, kernel: Kernel, queries: Stored) -> None:
        before = [slot.tobytes() for slot in self.slots]
        found = kernel.attend(queries, self.slots, LAYER)
        query = as_float32(queries, self.layout.dtype).swapaxes(0, 1)
        expected = attend(query, self.keys, self.values, kernel.shape.scale)
        assert found.out.dtype == found.lse.dtype == np.float32
        assert found.out.shape == (len(queries), kernel.shape.q_heads, self.layout.value_dim)
        tolerance = TOLERANCE[self.layout.dtype]
        np.testing.assert_allclose(found.out.swapaxes(0, 1), expected.out, rtol=0, atol=tolerance)
        # Without queries both arrays are empty, which `assert_allclose` accepts.
        np.testing.assert_allclose(found.lse.swapaxes(0, 1), expected.lse, rtol=tolerance, atol=tolerance)
        assert [slot.tobytes() for slot in self.slots] == before


def draw_queries(layout: Layout, count: int, heads: int, scale: float = 1.0) -> Stored:
    drawn = np.random.default_rng(count).standard_normal((count, heads, layout.key_dim)) * scale
    return from_float32(drawn.astype(np.float32), layout.dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_arrangement_of_heads(arrangement: str, dtype: str) -> None:
    layout, heads = ARRANGEMENTS[arrangement]
    layout = msgspec.structs.replace(layout, dtype=dtype)
    kernel = torch_cpu.TorchKernel(layout, AttentionShape.of(layout, heads))
    for places in PLACES.values():
        cached = Cached(layout, places)
        for count in (1, 3):
            cached.check(kernel, draw_queries(layout, count, heads))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("arrangement", ["grouped-query", "latent", "multi-head, two heads in a group"])
@pytest.mark.parametrize("scratch", [1, 1 << 20])
def test_many_queries_over_gathered_segments(
    monkeypatch: pytest.MonkeyPatch, arrangement: str, places: str, scratch: int
) -> None:
    """A scratch buffer of one segment, and of all segments."""
    monkeypatch.setattr(torch_cpu, "SCRATCH_BYTES", scratch)
    layout, heads = ARRANGEMENTS[arrangement]
    kernel = torch_cpu.TorchKernel(layout, AttentionShape.of(layout, heads))
    cached = Cached(layout, PLACES[places])
    # Smaller numbers of queries come between large ones: the rest of the scratch buffer must not be read.
    for count in (600, 515, 2, 600):
        cached.check(kernel, draw_queries(layout, count, heads))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("parts", [1, 3 * 4 * 8 * 4 * 16 * 4])
def test_parts_are_bounded(monkeypatch: pytest.MonkeyPatch, places: str, parts: int) -> None:
    """With these values of `PARTS_BYTES` the kernel takes one segment at a time, or three."""
    monkeypatch.setattr(torch_cpu, "PARTS_BYTES", parts)
    kernel = torch_cpu.TorchKernel(GROUPED, AttentionShape.of(GROUPED, 32))
    Cached(GROUPED, PLACES[places]).check(kernel, draw_queries(GROUPED, 4, 32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_logits(dtype: str) -> None:
    """One token has all the weight where logits differ much; nothing overflows."""
    layout = changed(dtype=dtype)
    kernel = torch_cpu.TorchKernel(layout, AttentionShape.of(layout, 8))
    for scale in (1e3, 1e9):
        cached = Cached(layout, PLACES["scattered"], scale=scale)
        found = kernel.attend(draw_queries(layout, 2, 8, scale), cached.slots, LAYER)
        assert np.isfinite(found.out).all()
        assert np.isfinite(found.lse).all()
        expected = attend(
            as_float32(draw_queries(layout, 2, 8, scale), dtype).swapaxes(0, 1),
            cached.keys,
            cached.values,
            kernel.shape.scale,
        )
        np.testing.assert_allclose(found.out.swapaxes(0, 1), expected.out, rtol=TOLERANCE[dtype], atol=1e-3 * scale)
        np.testing.assert_allclose(found.lse.swapaxes(0, 1), expected.lse, rtol=TOLERANCE[dtype])


def test_queries_of_any_strides_are_not_changed() -> None:
    kernel = torch_cpu.TorchKernel(GROUPED, AttentionShape.of(GROUPED, 32))
    cached = Cached(GROUPED, PLACES["scattered"])
    straight = draw_queries(GROUPED, 3, 32)
    straight.flags.writeable = False
    before = straight.tobytes()
    for queries in (straight, np.asfortranarray(straight), np.repeat(straight, 2, axis=0)[::2]):
        cached.check(kernel, queries)
    assert straight.tobytes() == before


def test_no_segments_and_no_queries() -> None:
    """torch's kernel would kill the process for empty inputs."""
    kernel = torch_cpu.TorchKernel(GROUPED, AttentionShape.of(GROUPED, 32))
    nothing = kernel.attend(draw_queries(GROUPED, 2, 32), [], LAYER)
    assert not nothing.out.any()
    assert np.isneginf(nothing.lse).all()
    found = kernel.attend(draw_queries(GROUPED, 0, 32), Cached(GROUPED, [0]).slots, LAYER)
    assert (found.out.shape, found.lse.shape) == ((0, 32, 16), (0, 32))


def test_results_do_not_share_memory() -> None:
    kernel = torch_cpu.TorchKernel(GROUPED, AttentionShape.of(GROUPED, 32))
    cached = Cached(GROUPED, [0])
    queries = draw_queries(GROUPED, 2, 32)
    first: Partial = kernel.attend(queries, cached.slots, LAYER)
    kept = first.out.copy(), first.lse.copy()
    kernel.attend(queries * 2, cached.slots, LAYER)
    np.testing.assert_array_equal(first.out, kept[0])
    np.testing.assert_array_equal(first.lse, kept[1])


def test_arguments_that_do_not_fit_the_layout() -> None:
    kernel = torch_cpu.TorchKernel(GROUPED, AttentionShape.of(GROUPED, 32))
    slots = Cached(GROUPED, [0, 1]).slots
    queries = draw_queries(GROUPED, 2, 32)
    wrongs: list[Any] = [queries[:, 1:], queries[..., 1:], queries[0], queries.astype(np.float16)]
    for wrong in wrongs:
        with pytest.raises(LayoutRefused, match=r"expected float32 of \(any, 32, 16\)"):
            kernel.attend(wrong, slots, LAYER)
    for layer in (-1, LAYERS):
        with pytest.raises(LayoutRefused, match="expected 0 to 2"):
            kernel.attend(queries, slots, layer)
    with pytest.raises(LayoutRefused, match="expected 15360 contiguous uint8"):
        kernel.attend(queries, [slots[0], slots[1][:-1]], LAYER)
    with pytest.raises(LayoutRefused, match="'kv_heads' is 4; the layout has 8"):
        torch_cpu.TorchKernel(GROUPED, AttentionShape.of(changed(kv_heads=4), 8))


def test_a_quantised_cache_is_refused_by_name() -> None:
    quantised = changed(dtype="float8_e4m3fn", quantisation=static_quantisation("float32"))
    quantised.check()
    with pytest.raises(LayoutRefused, match="float8_e4m3fn.*supported: float32, bfloat16, float16"):
        torch_cpu.TorchKernel(quantised, AttentionShape.of(quantised, 32))


def test_unknown_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape.of(GROUPED, 32)
    with pytest.raises(ConfigurationError, match="setting 'device' is 'tpu'; expected one of cpu, cuda"):
        kernel_for(GROUPED, shape, "tpu")
    monkeypatch.setattr("tokenlake_query.kernels.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="'cuda:1'.*pip install triton"):
        kernel_for(GROUPED, shape, "cuda:1")


def test_stored_types_match_torch() -> None:
    assert {name: stored_dtype(name).itemsize for name in torch_cpu._DTYPES} == {
        name: dtype.itemsize for name, dtype in torch_cpu._DTYPES.items()
    }
