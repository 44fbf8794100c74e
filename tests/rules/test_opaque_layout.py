"""Opaque layout: refused values, the fingerprint's golden vector, sizes, and encodings of both kinds of layout."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.test_layout import LLAMA, encoded, layouts
from tokenlake.errors import LayoutRefused
from tokenlake.layout import MAX_LAYOUT_BYTES, MAX_SEGMENT_BYTES, CanonicalFields, Layout
from tokenlake.opaque_layout import OpaqueLayout, decode_layout, understood

LATENT = OpaqueLayout(
    model_id="tiny-mla",
    weights_digest="00" * 32,
    engine="vllm 0.32.0",
    cache="bfloat16; block 16; group 0: mla",
    shards=2,
    shard_bytes=18432,
    segment_tokens=256,
)
FINGERPRINT = "f4fa07bce202363f0055eda4f23419947353cf5d80e29a36e52a5bbe19a0a8c0"
"""blake2b-256 of LATENT's MessagePack, written byte by byte from the format's specification."""

OTHER_VALUES: dict[str, Any] = {
    "model_id": "tiny-mla-2",
    "weights_digest": "01" * 32,
    "engine": "vllm 0.33.0",
    "cache": "fp8; block 16; group 0: mla",
    "shards": 4,
    "shard_bytes": 9216,
    "segment_tokens": 128,
}
TEXTS = ("model_id", "weights_digest", "engine", "cache")
SIZES = ("shards", "shard_bytes", "segment_tokens")

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
opaque_layouts = st.builds(
    OpaqueLayout,
    model_id=text,
    weights_digest=st.text("0123456789abcdef", min_size=1, max_size=64),
    engine=text,
    cache=text,
    shards=st.integers(1, 8),
    shard_bytes=st.integers(1, 1 << 28),
    segment_tokens=st.integers(1, 1 << 20),
)


def changed(**fields: object) -> OpaqueLayout:
    return msgspec.structs.replace(LATENT, **fields)


def pairs_of(layout: CanonicalFields) -> list[tuple[str, object]]:
    return [(name, getattr(layout, name)) for name in layout.__struct_fields__]


def test_the_fingerprint_is_the_golden_vector() -> None:
    assert LATENT.fingerprint().hex() == FINGERPRINT


@pytest.mark.parametrize("field", OpaqueLayout.__struct_fields__)
def test_every_field_changes_the_fingerprint(field: str) -> None:
    assert changed(**{field: OTHER_VALUES[field]}).fingerprint() != LATENT.fingerprint()


@given(st.one_of(layouts, opaque_layouts))
def test_a_layout_of_either_kind_survives_encoding(layout: Layout | OpaqueLayout) -> None:
    decoded = decode_layout(layout.encode())
    assert decoded == layout
    assert type(decoded) is type(layout)
    assert decoded.fingerprint() == layout.fingerprint()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, "") for field in TEXTS],
        *[(field, "x" * 4097) for field in TEXTS],
        ("engine", "x" * 257),
        *[(field, 0) for field in SIZES],
        *[(field, -1) for field in SIZES],
        ("shards", 9),
        ("shard_bytes", MAX_SEGMENT_BYTES + 1),
        ("segment_tokens", (1 << 20) + 1),
    ],
)
def test_an_unsupported_field_is_refused_by_name(field: str, value: object) -> None:
    layout = changed(**{field: value})
    with pytest.raises(LayoutRefused, match=f"'{field}'"):
        layout.check()
    with pytest.raises(LayoutRefused, match=f"'{field}'"):
        decode_layout(layout.encode())


def test_a_segment_may_be_as_large_as_the_bound() -> None:
    layout = changed(shards=8, shard_bytes=MAX_SEGMENT_BYTES // 8)
    layout.check()
    assert layout.segment_bytes == MAX_SEGMENT_BYTES
    with pytest.raises(LayoutRefused, match=f"takes .* at most {MAX_SEGMENT_BYTES}.*'shard_bytes'"):
        changed(shards=8, shard_bytes=MAX_SEGMENT_BYTES // 8 + 1).check()


def test_the_largest_layout_is_within_the_bound_of_its_encoding() -> None:
    wide = chr(0x10FFFF) * 4096
    layout = changed(model_id=wide, weights_digest=wide, engine=wide[:256], cache=wide)
    layout.check()
    assert len(layout.encode()) <= MAX_LAYOUT_BYTES


@pytest.mark.parametrize("field", OpaqueLayout.__struct_fields__)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(LayoutRefused, match=field):
        decode_layout(encoded([pair for pair in pairs_of(LATENT) if pair[0] != field]))


@pytest.mark.parametrize("field", ["window", "layers"])
def test_an_unknown_field_is_refused_by_name(field: str) -> None:
    """Also one that only the other kind of layout has."""
    with pytest.raises(LayoutRefused, match=field):
        decode_layout(encoded([*pairs_of(LATENT), (field, 7)]))


def test_a_repeated_field_and_another_order_are_refused() -> None:
    for pairs in ([("shards", 2), *pairs_of(LATENT)], pairs_of(LATENT)[::-1]):
        with pytest.raises(LayoutRefused, match="fields"):
            decode_layout(encoded(pairs))


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(LayoutRefused):
        decode_layout(garbage)


def test_the_pool_understands_only_its_own_layouts() -> None:
    assert understood(LLAMA) is LLAMA
    with pytest.raises(LayoutRefused, match=r"opaque.*'engine' 'vllm 0.32.0'"):
        understood(LATENT)
