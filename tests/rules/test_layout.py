"""Layouts of both kinds: refused values, the fingerprints' golden vectors, encodings, shards and sizes."""

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
    MAX_LAYOUT_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_SHARDS,
    QUANTISED_DTYPES,
    Layout,
    static_quantisation,
)
from tokenlake.opaque_layout import OpaqueLayout, decode_layout, understood

EitherLayout = Layout | OpaqueLayout
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
LATENT = OpaqueLayout(
    model_id="tiny-mla",
    weights_digest="00" * 32,
    engine="vllm 0.32.0",
    cache="bfloat16; block 16; group 0: mla",
    shards=2,
    shard_bytes=18432,
    segment_tokens=256,
)
each_kind = pytest.mark.parametrize("layout", [LLAMA, LATENT], ids=["understood", "opaque"])
each_field = pytest.mark.parametrize(
    ("layout", "field"),
    [(layout, field) for layout in (LLAMA, LATENT) for field in layout.__struct_fields__],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
OTHER_VALUES: dict[str, Any] = {
    "model_id": "tiny-2",
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
    "engine": "vllm 0.33.0",
    "cache": "fp8; block 16; group 0: mla",
    "shards": 4,
    "shard_bytes": 9216,
}

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
digests = st.text("0123456789abcdef", min_size=1, max_size=64)
sizes = st.integers(1, 64)
computed = st.builds(
    Layout,
    model_id=text,
    weights_digest=digests,
    dtype=st.sampled_from(COMPUTED_DTYPES),
    layers=sizes,
    kv_heads=sizes,
    key_dim=sizes,
    value_dim=sizes,
    position=text,
    segment_tokens=st.integers(1, 256),
)
quantised = st.builds(
    msgspec.structs.replace,
    computed,
    dtype=st.sampled_from(QUANTISED_DTYPES),
    quantisation=st.sampled_from([static_quantisation(dtype) for dtype in COMPUTED_DTYPES]),
)
opaque = st.builds(
    OpaqueLayout,
    model_id=text,
    weights_digest=digests,
    engine=text,
    cache=text,
    shards=st.integers(1, MAX_SHARDS),
    shard_bytes=st.integers(1, 1 << 28),
    segment_tokens=st.integers(1, 1 << 20),
)


def changed(**fields: object) -> Layout:
    return msgspec.structs.replace(LLAMA, **fields)


def encoded(pairs: list[tuple[str, object]], version: object = 1) -> bytes:
    return msgspec.msgpack.encode([version, pairs])


def pairs_of(layout: EitherLayout) -> list[tuple[str, object]]:
    return [(name, getattr(layout, name)) for name in layout.__struct_fields__]


def refused(layout: EitherLayout, named: str) -> None:
    """Check that the layout is refused by this name, made here or received."""
    for made in (layout.check, lambda: decode_layout(layout.encode()), lambda: type(layout).decode(layout.encode())):
        with pytest.raises(LayoutRefused, match=named):
            made()


@pytest.mark.parametrize(
    ("layout", "fingerprint"),
    [
        (LLAMA, "56828b2d63618c2c659d8cfb43fea829b9edb8f17ff5e6f235d727a29bf5b76a"),
        (LATENT, "f4fa07bce202363f0055eda4f23419947353cf5d80e29a36e52a5bbe19a0a8c0"),
    ],
    ids=["understood", "opaque"],
)
def test_the_fingerprint_is_the_golden_vector(layout: EitherLayout, fingerprint: str) -> None:
    """blake2b-256 of the layout's MessagePack, written byte by byte from the format's specification."""
    assert layout.fingerprint().hex() == fingerprint


@each_field
def test_every_field_changes_the_fingerprint(layout: EitherLayout, field: str) -> None:
    other = msgspec.structs.replace(layout, **{field: OTHER_VALUES[field]})
    assert other.fingerprint() != layout.fingerprint()


@given(computed | quantised | opaque)
def test_a_layout_survives_encoding(layout: EitherLayout) -> None:
    for decoded in (decode_layout(layout.encode()), type(layout).decode(layout.encode())):
        assert decoded == layout
        assert type(decoded) is type(layout)
        assert decoded.fingerprint() == layout.fingerprint()


@pytest.mark.parametrize(
    ("layout", "field", "value"),
    [
        (LLAMA, "dtype", "int8"),
        (LLAMA, "attention", "mla"),
        (LLAMA, "quantisation", "fp8"),
        (LLAMA, "storage", "token-major"),
        *[
            (LLAMA, field, value)
            for field in ("layers", "kv_heads", "key_dim", "value_dim", "segment_tokens")
            for value in (-1, 0, (1 << 20) + 1)
        ],
        *[(LLAMA, field, value) for field in ("model_id", "weights_digest", "position") for value in ("", "x" * 4097)],
        *[
            (LATENT, field, value)
            for field in ("model_id", "weights_digest", "engine", "cache")
            for value in ("", "x" * 4097)
        ],
        (LATENT, "engine", "x" * 257),
        *[(LATENT, field, value) for field in ("shards", "shard_bytes", "segment_tokens") for value in (-1, 0)],
        (LATENT, "shards", MAX_SHARDS + 1),
        (LATENT, "shard_bytes", MAX_SEGMENT_BYTES + 1),
        (LATENT, "segment_tokens", (1 << 20) + 1),
    ],
    ids=str,
)
def test_an_unsupported_field_is_refused_by_name(layout: EitherLayout, field: str, value: object) -> None:
    refused(msgspec.structs.replace(layout, **{field: value}), f"'{field}'")


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
    # Bytes of a segment of LLAMA: 4 layers x 4 heads x tokens x 128 elements x 2 bytes.
    most = MAX_SEGMENT_BYTES // (4 * 4 * 128 * 2)
    for layout, field, value in (
        (changed(layers=4), "segment_tokens", most),
        (msgspec.structs.replace(LATENT, shards=64), "shard_bytes", MAX_SEGMENT_BYTES // 64),
    ):
        largest = msgspec.structs.replace(layout, **{field: value})
        largest.check()
        assert largest.segment_bytes == MAX_SEGMENT_BYTES
        with pytest.raises(LayoutRefused, match=f"takes .* at most {MAX_SEGMENT_BYTES}.*'{field}'"):
            msgspec.structs.replace(layout, **{field: value + 1}).check()


def test_the_largest_layout_is_within_the_bound_of_its_encoding() -> None:
    wide = chr(0x10FFFF) * 4096
    fields = {"model_id": wide, "weights_digest": wide, "engine": wide[:256], "cache": wide}
    layout = msgspec.structs.replace(LATENT, **fields)
    layout.check()
    assert len(layout.encode()) <= MAX_LAYOUT_BYTES


@each_field
def test_a_missing_field_is_refused_by_name(layout: EitherLayout, field: str) -> None:
    with pytest.raises(LayoutRefused, match=field):
        type(layout).decode(encoded([pair for pair in pairs_of(layout) if pair[0] != field]))


@each_kind
def test_other_fields_are_refused_by_name(layout: EitherLayout) -> None:
    """Unknown ones, those of the other kind of layout, one of another type, a repeated one, and another order."""
    pairs, other = pairs_of(layout), "engine" if layout is LLAMA else "layers"
    for wrong, named in (
        ([*pairs, ("window", 4096)], "window"),
        ([*pairs, (other, 7)], other),
        ([(name, "two" if name == "segment_tokens" else value) for name, value in pairs], "segment_tokens"),
        ([pairs[-1], *pairs], "fields"),
        (pairs[::-1], "fields"),
    ):
        with pytest.raises(LayoutRefused, match=named):
            type(layout).decode(encoded(wrong))
    for version in (0, 2):
        with pytest.raises(LayoutRefused, match=f"version is {version}"):
            type(layout).decode(encoded(pairs, version))
    with pytest.raises(LayoutRefused, match="cannot be read"):
        type(layout).decode(layout.encode().replace(b"tiny-", b"tiny\xff"))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(LayoutRefused):
        decode_layout(garbage)


@pytest.mark.parametrize(
    ("kv_heads", "shards", "heads"),
    [(1, 1, 1), (3, 3, 1), (8, 8, 1), (32, 32, 1), (40, 40, 1), (64, 64, 1), (96, 32, 3), (71, 1, 71), (128, 64, 2)],
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
    for fields in ({"kv_heads": 2}, {"value_dim": 577}):
        with pytest.raises(LayoutRefused, match="latent"):
            msgspec.structs.replace(latent, **fields).check()


def test_the_pool_understands_only_its_own_layouts() -> None:
    assert understood(LLAMA) is LLAMA
    with pytest.raises(LayoutRefused, match=r"opaque.*'engine' 'vllm 0.32.0'"):
        understood(LATENT)
