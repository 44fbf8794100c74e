"""Layout: refused values, the fingerprint's golden vector, shards and sizes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import LayoutRefused
from tokenlake.layout import (
    COMPUTED_DTYPES,
    DTYPE_BYTES,
    MAX_SEGMENT_BYTES,
    QUANTISED_DTYPES,
    Layout,
    static_quantisation,
)

LLAMA = Layout(
    model_id="tiny-llama",
    weights_digest="00" * 32,
    dtype="bfloat16",
    layers=2,
    kv_heads=4,
    key_dim=64,
    value_dim=64,
    position="rope base=10000",
)
FINGERPRINT = "56828b2d63618c2c659d8cfb43fea829b9edb8f17ff5e6f235d727a29bf5b76a"
"""blake2b-256 of LLAMA's MessagePack, written byte by byte from the format's specification."""

OTHER_VALUES: dict[str, Any] = {
    "model_id": "tiny-llama-2",
    "weights_digest": "01" * 32,
    "dtype": "float16",
    "layers": 3,
    "kv_heads": 8,
    "key_dim": 32,
    "value_dim": 32,
    "position": "rope base=500000",
    "attention": "sliding",
    "quantisation": "fp8",
    "storage": "token-major",
    "segment_tokens": 128,
}

sizes = st.integers(1, 64)
layouts = st.builds(
    Layout,
    model_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
    weights_digest=st.text("0123456789abcdef", min_size=1, max_size=64),
    dtype=st.sampled_from(COMPUTED_DTYPES),
    layers=sizes,
    kv_heads=sizes,
    key_dim=sizes,
    value_dim=sizes,
    position=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40),
    segment_tokens=st.integers(1, 256),
)


def changed(**fields: object) -> Layout:
    return msgspec.structs.replace(LLAMA, **fields)


def encoded(pairs: list[tuple[str, object]], version: object = 1) -> bytes:
    return msgspec.msgpack.encode([version, pairs])


def pairs_of(layout: Layout) -> list[tuple[str, object]]:
    return [(name, getattr(layout, name)) for name in layout.__struct_fields__]


def test_the_fingerprint_is_the_golden_vector() -> None:
    assert LLAMA.fingerprint().hex() == FINGERPRINT


@pytest.mark.parametrize("field", Layout.__struct_fields__)
def test_every_field_changes_the_fingerprint(field: str) -> None:
    assert changed(**{field: OTHER_VALUES[field]}).fingerprint() != LLAMA.fingerprint()


quantised = st.builds(
    msgspec.structs.replace,
    layouts,
    dtype=st.sampled_from(QUANTISED_DTYPES),
    quantisation=st.sampled_from([static_quantisation(dtype) for dtype in COMPUTED_DTYPES]),
)


@given(layouts | quantised)
def test_a_layout_survives_encoding(layout: Layout) -> None:
    decoded = Layout.decode(layout.encode())
    assert decoded == layout
    assert decoded.fingerprint() == layout.fingerprint()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("attention", "mla"),
        ("quantisation", "fp8"),
        ("storage", "token-major"),
        *[(field, 0) for field in ("layers", "kv_heads", "key_dim", "value_dim", "segment_tokens")],
        *[(field, (1 << 20) + 1) for field in ("layers", "kv_heads", "key_dim", "value_dim", "segment_tokens")],
        ("layers", -1),
        *[(field, "") for field in ("model_id", "weights_digest", "position")],
        *[(field, "x" * 4097) for field in ("model_id", "weights_digest", "position")],
    ],
)
def test_an_unsupported_field_is_refused_by_name(field: str, value: object) -> None:
    layout = changed(**{field: value})
    with pytest.raises(LayoutRefused, match=f"'{field}'"):
        layout.check()
    with pytest.raises(LayoutRefused, match=f"'{field}'"):
        Layout.decode(layout.encode())


def test_a_quantised_dtype_names_its_quantisation() -> None:
    """An element of a quantised cache has one byte, and its scales and its precision before rounding are named."""
    scaled = changed(dtype="float8_e4m3fn", quantisation=static_quantisation("float32"))
    scaled.check()
    assert scaled.segment_bytes * DTYPE_BYTES["bfloat16"] == LLAMA.segment_bytes
    others = [changed(dtype=dtype, quantisation=static_quantisation("bfloat16")) for dtype in QUANTISED_DTYPES]
    assert len({one.fingerprint() for one in (scaled, *others, LLAMA)}) == 4
    for wrong in (changed(dtype="float8_e5m2"), changed(quantisation=static_quantisation("bfloat16"))):
        with pytest.raises(LayoutRefused, match="'quantisation'"):
            wrong.check()


def test_a_segment_may_be_as_large_as_the_bound() -> None:
    # Bytes of a segment: 4 layers x 4 heads x tokens x 128 elements x 2 bytes.
    most = MAX_SEGMENT_BYTES // (4 * 4 * 128 * 2)
    changed(layers=4, segment_tokens=most).check()
    with pytest.raises(LayoutRefused, match=f"takes .* at most {MAX_SEGMENT_BYTES}.*'segment_tokens'"):
        changed(layers=4, segment_tokens=most + 1).check()


@pytest.mark.parametrize("field", Layout.__struct_fields__)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(LayoutRefused, match=field):
        Layout.decode(encoded([pair for pair in pairs_of(LLAMA) if pair[0] != field]))


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(LayoutRefused, match="window"):
        Layout.decode(encoded([*pairs_of(LLAMA), ("window", 4096)]))


def test_a_field_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(LayoutRefused, match="layers"):
        Layout.decode(changed(layers="two").encode())


def test_a_repeated_field_and_another_order_are_refused() -> None:
    for pairs in ([("layers", 4), *pairs_of(LLAMA)], pairs_of(LLAMA)[::-1]):
        with pytest.raises(LayoutRefused, match="fields"):
            Layout.decode(encoded(pairs))


@pytest.mark.parametrize("version", [0, 2])
def test_another_schema_version_is_refused_by_name(version: int) -> None:
    with pytest.raises(LayoutRefused, match=f"version is {version}"):
        Layout.decode(encoded(pairs_of(LLAMA), version))


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="cannot be read"):
        Layout.decode(LLAMA.encode().replace(b"tiny-llama", b"tiny-llam\xff"))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(LayoutRefused):
        Layout.decode(garbage)


@given(st.data())
def test_a_damaged_encoding_is_refused_or_another_layout(data: st.DataObject) -> None:
    damaged = bytearray(LLAMA.encode())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        layout = Layout.decode(bytes(damaged))
    except LayoutRefused:
        return
    assert layout.fingerprint() != LLAMA.fingerprint()


@pytest.mark.parametrize(
    ("kv_heads", "shards", "heads"),
    [(1, 1, 1), (2, 2, 1), (3, 1, 3), (6, 2, 3), (8, 8, 1), (12, 4, 3), (16, 8, 2), (64, 8, 8)],
)
def test_kv_heads_are_cut_in_equal_shards(kv_heads: int, shards: int, heads: int) -> None:
    layout = changed(kv_heads=kv_heads)
    assert (layout.shards, layout.heads_per_shard) == (shards, heads)
    assert layout.shard_bytes * shards == layout.segment_bytes == 2 * kv_heads * 256 * 128 * 2


def test_latent_rows_hold_the_value_within_the_key() -> None:
    latent = changed(attention="latent", kv_heads=1, key_dim=576, value_dim=512, dtype="bfloat16", layers=2)
    latent.check()
    assert latent.shards == 1
    assert latent.segment_bytes == 2 * latent.segment_tokens * 576 * 2


@pytest.mark.parametrize("fields", [{"kv_heads": 2}, {"value_dim": 577}])
def test_inconsistent_latent_rows_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(LayoutRefused, match="latent"):
        changed(**{"attention": "latent", "kv_heads": 1, "key_dim": 576, "value_dim": 512, **fields}).check()
