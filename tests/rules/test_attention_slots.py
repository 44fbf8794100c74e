"""Views of slots, the shape of attention, the bytes of queries."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.attention import AttentionShape, SlotMap, stored_dtype
from tokenlake.errors import LayoutRefused
from tokenlake.layout import Layout

LAYOUT = Layout(
    model_id="m",
    weights_digest="00",
    dtype="float16",
    layers=3,
    kv_heads=4,
    key_dim=6,
    value_dim=5,
    position="rope",
    segment_tokens=7,
)


def slot_of(slots: SlotMap) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, slots.nbytes, np.uint8)


@given(
    kv_heads=st.integers(1, 24) | st.sampled_from((65, 66, 128)),
    layers=st.integers(1, 3),
    tokens=st.integers(1, 5),
    key_dim=st.integers(1, 5),
    value_dim=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    data=st.data(),
)
def test_views_follow_the_storage_order(
    kv_heads: int, layers: int, tokens: int, key_dim: int, value_dim: int, dtype: str, data: st.DataObject
) -> None:
    """Compared with slicing [head group][layer][K, V][head][token][dim] step by step."""
    layout = msgspec.structs.replace(
        LAYOUT,
        kv_heads=kv_heads,
        layers=layers,
        segment_tokens=tokens,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
    )
    slots = SlotMap.of(layout)
    assert slots.nbytes == layout.segment_bytes
    slot = slot_of(slots)
    layer = data.draw(st.integers(0, layers - 1))
    keys, values = slots.views(slot, layer)
    assert keys.shape == (layout.shards, layout.heads_per_shard, tokens, key_dim)
    assert values.shape == (layout.shards, layout.heads_per_shard, tokens, value_dim)
    for group, shard in enumerate(np.split(slot, layout.shards)):
        of_layer = np.split(shard, layers)[layer].view(stored_dtype(dtype))
        split = layout.heads_per_shard * tokens * key_dim
        stored_keys = of_layer[:split].reshape(layout.heads_per_shard, tokens, key_dim)
        stored_values = of_layer[split:].reshape(layout.heads_per_shard, tokens, value_dim)
        assert keys[group].tobytes() == stored_keys.tobytes()
        assert values[group].tobytes() == stored_values.tobytes()
    assert np.shares_memory(keys, slot)
    assert np.shares_memory(values, slot)


def test_latent_values_are_columns_of_the_keys() -> None:
    slots = SlotMap(dtype="float32", layers=2, groups=1, heads=1, tokens=4, key_dim=576, value_dim=512, latent=True)
    slot = slot_of(slots)
    assert slots.nbytes == 2 * 4 * 576 * 4
    keys, values = slots.views(slot, 1)
    assert keys.tobytes() == slot[slots.nbytes // 2 :].tobytes()
    assert values.tobytes() == np.ascontiguousarray(keys[..., :512]).tobytes()
    assert np.shares_memory(keys, values)


def test_places_end_within_the_slot() -> None:
    slots = SlotMap.of(LAYOUT)
    keys, values = slots.places(2)
    assert (keys.end, values.end) == (slots.nbytes // 2 - 4 // 4 * 7 * 5, slots.nbytes // 2)


def test_views_keep_the_slot_alive_and_its_flags() -> None:
    slots = SlotMap.of(LAYOUT)
    slot = slot_of(slots)
    slot.flags.writeable = False
    keys, _ = slots.views(slot, 0)
    expected = keys.tobytes()
    del slot
    assert keys.tobytes() == expected
    with pytest.raises(ValueError, match="read-only"):
        keys[0, 0, 0, 0] = 1


@pytest.mark.parametrize("layer", [3, -1])
def test_layers_out_of_range_are_refused(layer: int) -> None:
    slots = SlotMap.of(LAYOUT)
    with pytest.raises(LayoutRefused, match="layer"):
        slots.views(slot_of(slots), layer)


def test_a_slot_of_another_size_is_refused() -> None:
    slots = SlotMap.of(LAYOUT)
    slot = slot_of(slots)
    slots.views(np.append(slot, np.uint8(0)), 0)
    wrongs: list[Any] = [slot[:-1], slot[::2], slot.view(np.uint16), slot.reshape(2, -1)]
    for wrong in wrongs:
        with pytest.raises(LayoutRefused, match=f"expected {slots.nbytes} contiguous uint8"):
            slots.views(wrong, 0)


def test_the_shape_follows_the_layout() -> None:
    shape = AttentionShape.of(LAYOUT, q_heads=12)
    assert (shape.kv_heads, shape.key_dim, shape.value_dim, shape.group) == (4, 6, 5, 3)
    assert shape.scale == pytest.approx(6**-0.5)
    assert AttentionShape.of(LAYOUT, 4, scale=0.5).scale == 0.5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"q_heads": 6}, "q_heads"),
        ({"q_heads": 0}, "q_heads"),
        ({"key_dim": 0}, "key_dim"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": 0.0}, "scale"),
        ({"latent": True, "value_dim": 7}, "value_dim"),
    ],
)
def test_an_invalid_shape_is_refused_by_field(fields: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {"q_heads": 8, "kv_heads": 4, "key_dim": 6, "value_dim": 6, "scale": 1.0}
    AttentionShape(**good)
    with pytest.raises(LayoutRefused, match=f"'{named}'"):
        AttentionShape(**{**good, **fields})


def test_bytes_of_a_query() -> None:
    """Computed by hand: 32 heads of 128 in bfloat16, both ways; MLA with 128 heads, 576 out and 512 back in float32."""
    llama = AttentionShape(q_heads=32, kv_heads=8, key_dim=128, value_dim=128, scale=1.0)
    assert llama.query_bytes(2, 2) == 32 * (256 + 256 + 4) == 16_512
    assert llama.query_bytes(2, 4) == 24_704
    deepseek = AttentionShape(q_heads=128, kv_heads=1, key_dim=576, value_dim=512, scale=1.0, latent=True)
    assert deepseek.query_bytes(2, 4) == 128 * (1152 + 2048 + 4)


def test_a_latent_layout_has_latent_slots_and_shape() -> None:
    layout = msgspec.structs.replace(LAYOUT, attention="latent", kv_heads=1, key_dim=6, value_dim=5)
    slots = SlotMap.of(layout)
    assert slots.latent
    assert slots.nbytes == layout.segment_bytes
    assert AttentionShape.of(layout, 8).latent
