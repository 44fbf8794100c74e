"""Layout: everything that gives the bytes of a segment their meaning."""

from __future__ import annotations

import hashlib
import math
from typing import TypeVar

import msgspec

from tokenlake.errors import LayoutRefused
from tokenlake.identity import Fingerprint

L = TypeVar("L", bound="CanonicalFields")

SCHEMA_VERSION = 1
"""First item of the fingerprint; grows when a field is added or changes its meaning."""

MAX_SHARDS = 64
"""Maximum number of shards of a segment. Each KV head is one; more than 64 heads are cut into gcd(kv_heads, 64) groups.
So engines of all tensor-parallel sizes share segments without a setting for it."""

MAX_SEGMENT_BYTES = 1 << 31
"""Bound on one slot; a layout beyond it is refused before any memory is reserved."""

MAX_LAYOUT_BYTES = 64 << 10
"""Bound on an encoded layout; more than one that `Layout.check` accepts can have."""

MAX_TEXT = 4096
"""Bound on the characters of a text in a layout."""

COMPUTED_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which engines compute. A cache in one of them is not quantised."""
QUANTISED_DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""The dtypes of quantised caches. The pool stores their segments, and computes no attention over them."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
ATTENTION_KINDS = ("full", "latent")
"""Causal attention over the whole prefix. `full`: multi-head or grouped-query. `latent`: over latent rows (MLA), which
are one KV head whose value is the first `value_dim` columns of its key."""
STORAGE_ORDER = "group-layer-kv-head-token-dim"


class CanonicalFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The canonical encoding and the fingerprint of a layout."""

    def check(self) -> None:
        """Raise `LayoutRefused` naming the first field that is not supported."""
        raise NotImplementedError

    def fingerprint(self) -> Fingerprint:
        """blake2b-256 of the canonical MessagePack of the layout, schema version first."""
        return Fingerprint(hashlib.blake2b(self.encode(), digest_size=32).digest())

    def encode(self) -> bytes:
        """Canonical MessagePack: [schema version, [field, value] pairs in declared order]."""
        pairs = [[name, getattr(self, name)] for name in self.__struct_fields__]
        return msgspec.msgpack.encode([SCHEMA_VERSION, pairs])

    @classmethod
    def decode(cls: type[L], encoded: bytes) -> L:
        """Inverse of `encode`; the result is checked. Raises `LayoutRefused`: unknown or missing fields, fields
        in another order, another schema version, a value that `check` refuses, or more than `MAX_LAYOUT_BYTES`."""
        pairs = fields_in(encoded)
        try:
            layout = msgspec.convert(dict(pairs), cls)
        except msgspec.MsgspecError as error:
            raise LayoutRefused(f"layout cannot be read: {error}") from error
        # A missing field is refused: its default would be a guess at the meaning of the segments' bytes.
        sent = [name for name, _ in pairs]
        if sent != list(cls.__struct_fields__):
            raise LayoutRefused(f"layout has the fields {', '.join(sent)}; expected {', '.join(cls.__struct_fields__)}")
        layout.check()
        return layout


def fields_in(encoded: bytes) -> list[tuple[str, str | int]]:
    """The (field, value) pairs of an encoded layout, not checked. Raises `LayoutRefused`: bytes that are no encoded
    layout, another schema version, or more than `MAX_LAYOUT_BYTES`."""
    if len(encoded) > MAX_LAYOUT_BYTES:
        raise LayoutRefused(f"layout has {len(encoded)} bytes; at most {MAX_LAYOUT_BYTES}")
    try:
        version, pairs = msgspec.msgpack.decode(encoded, type=tuple[int, list[tuple[str, str | int]]])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LayoutRefused(f"layout cannot be read: {error}") from error
    if version != SCHEMA_VERSION:
        raise LayoutRefused(f"layout schema version is {version}; this side knows {SCHEMA_VERSION}")
    return pairs


def check_texts(layout: CanonicalFields, *fields: str) -> None:
    """Raise `LayoutRefused` for the first of these `fields` that is empty or has more than `MAX_TEXT` characters."""
    for field in fields:
        size = len(getattr(layout, field))
        if not 1 <= size <= MAX_TEXT:
            raise LayoutRefused(f"layout field '{field}' has {size} characters; expected 1 to {MAX_TEXT}")


def static_quantisation(computed: str) -> str:
    """The layout's `quantisation` for a cache of `QUANTISED_DTYPES`: each element is a key or a value that was computed
    in the dtype `computed`, divided by a constant scale, and rounded to the cache's dtype. The scales belong to the
    weights, and are 1 where the weights have none."""
    return f"static scales, computed in {computed}"


class Layout(CanonicalFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that gives the bytes of a segment their meaning. Two engines share segments when all fields are equal,
    and never otherwise.

    A segment's slot holds, in this order::

        [head group][layer][K, V][head in group][token][head dim]

    One head group is one shard; shards are contiguous and equal in size. Where attention is latent there is no V.
    """

    model_id: str
    weights_digest: str
    """Hex digest of configuration and weights; changes when weights change in place."""
    dtype: str
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    position: str
    """Canonical text of the position encoding (kind, base, scaling)."""
    attention: str = "full"
    quantisation: str = "none"
    """`none`, or the `static_quantisation` of a cache whose dtype is one of `QUANTISED_DTYPES`."""
    storage: str = STORAGE_ORDER
    segment_tokens: int = 256

    def check(self) -> None:
        """Raise `LayoutRefused` naming the first field that is not supported."""
        if self.dtype not in DTYPE_BYTES:
            raise LayoutRefused(f"layout field 'dtype' is {self.dtype!r}; supported: {', '.join(DTYPE_BYTES)}")
        if self.attention not in ATTENTION_KINDS:
            raise LayoutRefused(
                f"layout field 'attention' is {self.attention!r}; supported: {', '.join(ATTENTION_KINDS)}"
            )
        quantisations = (
            [static_quantisation(computed) for computed in COMPUTED_DTYPES]
            if self.dtype in QUANTISED_DTYPES
            else ["none"]
        )
        if self.quantisation not in quantisations:
            raise LayoutRefused(
                f"layout field 'quantisation' is {self.quantisation!r}; supported with dtype {self.dtype!r}: "
                f"{'; '.join(quantisations)}"
            )
        if self.storage != STORAGE_ORDER:
            raise LayoutRefused(f"layout field 'storage' is {self.storage!r}; supported: {STORAGE_ORDER}")
        for field in ("layers", "kv_heads", "key_dim", "value_dim", "segment_tokens"):
            value = getattr(self, field)
            if not 1 <= value <= 1 << 20:
                raise LayoutRefused(f"layout field '{field}' is {value}; expected 1 to {1 << 20}")
        if self.latent and (self.kv_heads != 1 or self.value_dim > self.key_dim):
            raise LayoutRefused(
                f"layout field 'attention' is 'latent' with {self.kv_heads} KV heads, 'key_dim' {self.key_dim} and "
                f"'value_dim' {self.value_dim}; expected one head, whose value is a part of its key"
            )
        check_texts(self, "model_id", "weights_digest", "position")
        if self.segment_bytes > MAX_SEGMENT_BYTES:
            raise LayoutRefused(
                f"one segment of this layout takes {self.segment_bytes} bytes; at most {MAX_SEGMENT_BYTES}. "
                f"Lower 'segment_tokens' (now {self.segment_tokens})"
            )

    @property
    def shards(self) -> int:
        """Number of head groups: one for each KV head, gcd(kv_heads, 64) where there are more than 64."""
        return self.kv_heads if self.kv_heads <= MAX_SHARDS else math.gcd(self.kv_heads, MAX_SHARDS)

    @property
    def heads_per_shard(self) -> int:
        """KV heads in one head group."""
        return self.kv_heads // self.shards

    @property
    def shard_bytes(self) -> int:
        """Bytes of one head group of one segment."""
        return self.segment_bytes // self.shards

    @property
    def latent(self) -> bool:
        """Are values stored as columns of the keys?"""
        return self.attention == "latent"

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment: layers x heads x tokens x (key dim + value dim, if stored) x element size."""
        row = self.key_dim if self.latent else self.key_dim + self.value_dim
        elements = self.layers * self.kv_heads * self.segment_tokens * row
        return elements * DTYPE_BYTES[self.dtype]
