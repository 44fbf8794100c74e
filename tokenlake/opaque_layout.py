"""Opaque layout: the layout of segments whose bytes only the engine that wrote them understands."""

from __future__ import annotations

from tokenlake.errors import LayoutRefused
from tokenlake.layout import (
    MAX_SEGMENT_BYTES,
    MAX_SHARDS,
    CanonicalFields,
    Layout,
    check_texts,
    fields_in,
)

MAX_ENGINE = 256
"""Bound on the characters of `OpaqueLayout.engine`."""
MAX_SEGMENT_TOKENS = 1 << 20


class OpaqueLayout(CanonicalFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity and the sizes of segments whose bytes only the engine understands. The pool stores, moves and checks
    them; it neither splits nor computes over them. Two engines share segments when all fields are equal, and never
    otherwise.

    A segment's slot holds `shards` contiguous parts of `shard_bytes` bytes each. Each rank of the engine fills one
    part, or one rank fills several.
    """

    model_id: str
    weights_digest: str
    """Hex digest of configuration and weights; changes when weights change in place."""
    engine: str
    """Name and version of the engine, for example "vllm 0.32.0"."""
    cache: str
    """Canonical text of all that gives the bytes their meaning: the dtype of the cache, block sizes, cache groups and
    their kinds, attention backends, parallel sizes, algorithm and seed of the engine's hash."""
    shards: int
    shard_bytes: int
    segment_tokens: int

    def check(self) -> None:
        """Raise `LayoutRefused` naming the first field that is not supported."""
        check_texts(self, "model_id", "weights_digest", "engine", "cache")
        if len(self.engine) > MAX_ENGINE:
            raise LayoutRefused(f"layout field 'engine' has {len(self.engine)} characters; expected 1 to {MAX_ENGINE}")
        limits = {"shards": MAX_SHARDS, "shard_bytes": MAX_SEGMENT_BYTES, "segment_tokens": MAX_SEGMENT_TOKENS}
        for field, limit in limits.items():
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise LayoutRefused(f"layout field '{field}' is {value}; expected 1 to {limit}")
        if self.segment_bytes > MAX_SEGMENT_BYTES:
            raise LayoutRefused(
                f"one segment of this layout takes {self.segment_bytes} bytes; at most {MAX_SEGMENT_BYTES}. "
                f"Lower 'shard_bytes' (now {self.shard_bytes})"
            )

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment: shards x bytes of a shard."""
        return self.shards * self.shard_bytes


AnyLayout = Layout | OpaqueLayout
_ONLY_OPAQUE = frozenset(OpaqueLayout.__struct_fields__).difference(Layout.__struct_fields__)


def decode_layout(encoded: bytes) -> AnyLayout:
    """The layout that `encoded` holds, checked; its fields tell the kind. Raises `LayoutRefused` as
    `Layout.decode`."""
    opaque = any(name in _ONLY_OPAQUE for name, _ in fields_in(encoded))
    return OpaqueLayout.decode(encoded) if opaque else Layout.decode(encoded)


def understood(layout: AnyLayout) -> Layout:
    """Returns `layout` where the pool understands the bytes of its segments. Raises `LayoutRefused` for an opaque
    layout: attention in place, and copies of single layers, need to know where keys and values lie."""
    if isinstance(layout, OpaqueLayout):
        raise LayoutRefused(
            f"the layout is opaque: only its 'engine' {layout.engine!r} understands the bytes of its segments, so that "
            "the pool can neither attend to them in place nor copy single layers"
        )
    return layout
