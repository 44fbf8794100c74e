"""Segment keys: a hash chain over the prompt prefix.

::

    root   = blake2b-256(key = tenant secret, MessagePack [fingerprint, adapter id, salt])
    key[i] = blake2b-256(key[i-1] | token ids of segment i, uint32 little-endian | length-prefixed extras)

So a key depends on the tenant, the layout, the adapter, the salt and every token up to the segment's end. A salt is a
text, that of an engine, or the pair of an engine's and a request's: as an array in the MessagePack it is no text, so
that a request cannot choose a salt that is the one of an engine, or of another pair.

The tail of a prompt, the tokens behind its last full segment, has a key of its own kind. It is stored for the engine
that decodes the prompt, and no other request looks it up::

    tail   = blake2b-256(person = "tail", key[last] | number of tokens | token ids of the tail | extras)

The keys of segments with an opaque layout are independent of each other. The engine's own key, a 32-byte hash, stands
for the tokens::

    key = blake2b-256(key = tenant secret, MessagePack [fingerprint, adapter id, salt, group, engine key])
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenlake.identity import Fingerprint, SegmentKey

KEY_BYTES = 32
MAX_SECRET_BYTES = 64
"""Longest key that blake2b takes."""

TokenIds = Sequence[int] | NDArray[np.integer]

Salt = str | None | tuple[str | None, str]
"""The salt of an engine, or (that of the engine, that of the request)."""


def root_key(secret: bytes, fingerprint: Fingerprint, adapter: str | None = None, salt: Salt = None) -> SegmentKey:
    """The parent of the first segment's key. `secret`: 1 to 64 bytes, the tenant's own."""
    body = msgspec.msgpack.encode([bytes(fingerprint), adapter, salt])
    return SegmentKey(hashlib.blake2b(body, digest_size=KEY_BYTES, key=secret).digest())


def opaque_keys(
    secret: bytes,
    fingerprint: Fingerprint,
    engine_keys: Iterable[tuple[int, bytes]],
    adapter: str | None = None,
    salt: Salt = None,
) -> list[SegmentKey]:
    """The keys of segments with an opaque layout. `engine_keys`: (group, engine key) of each: the number of the
    engine's cache group, 0 to 2**32 - 1, and the engine's hash of the segment's tokens and of everything before them,
    32 bytes. Raises `ValueError` for another length: a shorter hash does not tell prompts apart reliably. `secret`: as
    of `root_key`. The state of the hash before the engine key is computed once for each group."""
    begun: dict[int, hashlib.blake2b] = {}
    keys = []
    for group, engine_key in engine_keys:
        if len(engine_key) != KEY_BYTES:
            raise ValueError(
                f"engine key has {len(engine_key)} bytes; expected {KEY_BYTES}: the engine must hash with SHA-256"
            )
        state = begun.get(group)
        if state is None:
            if not 0 <= group < 1 << 32:
                raise ValueError(f"cache group is {group}; expected 0 to {(1 << 32) - 1}")
            # The MessagePack of the whole array ends with the engine key, whose bytes are all that is left to add.
            body = msgspec.msgpack.encode([bytes(fingerprint), adapter, salt, group, bytes(KEY_BYTES)])
            state = begun[group] = hashlib.blake2b(body[:-KEY_BYTES], digest_size=KEY_BYTES, key=secret)
        state = state.copy()
        state.update(engine_key)
        keys.append(SegmentKey(state.digest()))
    return keys


def probe(secret: bytes, fingerprint: Fingerprint) -> bytes:
    """The key of a fixed prefix. Client and daemon compare it when they connect, so that a difference in
    hashing (byte order, library, version) is found before the first lookup."""
    chain = Prefix(root_key(secret, fingerprint, "probe", "probe"), 4)
    chain.extend([0, 1, 258, 0xFFFFFFFF])
    return chain.keys[0]


class Prefix:
    """The keys of one growing prompt. `extend` hashes only new tokens, and keeps those that do not fill a segment yet.

    Not safe for concurrent `extend`. `keys` is mutated in place and only ever grows.
    """

    __slots__ = ("_extras", "_tail", "keys", "root", "segment_tokens")

    def __init__(
        self, root: SegmentKey, segment_tokens: int, extras: Mapping[int, Iterable[bytes]] | None = None
    ) -> None:
        """`extras`: per segment index, digests of content that the tokens do not determine (an image, for example)."""
        self.root = root
        self.segment_tokens = segment_tokens
        self.keys: list[SegmentKey] = []
        self._extras = {
            index: b"".join(len(digest).to_bytes(4, "little") + digest for digest in digests)
            for index, digests in (extras or {}).items()
        }
        self._tail = bytearray()

    @property
    def tokens(self) -> int:
        """Number of tokens appended so far, including those that do not fill a segment yet."""
        return len(self.keys) * self.segment_tokens + len(self._tail) // 4

    def extend(self, tokens: TokenIds) -> None:
        """Append token ids (0 to 2**32 - 1; anything else raises OverflowError, ValueError or TypeError)."""
        self._tail += encode_tokens(tokens)
        size = self.segment_tokens * 4
        whole = len(self._tail) // size
        parent = self.keys[-1] if self.keys else self.root
        tail = memoryview(self._tail)
        for index in range(whole):
            digest = hashlib.blake2b(parent, digest_size=KEY_BYTES)
            digest.update(tail[index * size : (index + 1) * size])
            digest.update(self._extras.get(len(self.keys), b""))
            parent = SegmentKey(digest.digest())
            self.keys.append(parent)
        tail.release()
        del self._tail[: whole * size]

    def tail_key(self, index: int, tokens: TokenIds) -> SegmentKey:
        """The key of the tail of a prompt: `tokens`, fewer than a segment has, behind the first `index` segments of
        this chain. Raises the errors of `extend`."""
        packed = encode_tokens(tokens)
        count = len(packed) // 4
        if not 0 < count < self.segment_tokens:
            raise ValueError(f"a tail has 1 to {self.segment_tokens - 1} tokens, and got {count}")
        parent = self.keys[index - 1] if index else self.root
        digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"tail")
        digest.update(count.to_bytes(4, "little"))
        digest.update(packed)
        digest.update(self._extras.get(index, b""))
        return SegmentKey(digest.digest())


def encode_tokens(tokens: TokenIds) -> bytes:
    """The token ids as packed bytes, four per id (uint32, little-endian). Raises the errors of `Prefix.extend`."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise TypeError(f"token ids must be one row of integers, not {tokens.ndim} dimensions of {tokens.dtype}")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > 0xFFFFFFFF):
            raise ValueError("token ids must lie between 0 and 2**32 - 1")
        return tokens.astype("<u4", copy=False).tobytes()
    if isinstance(tokens, bytes | bytearray):
        raise TypeError("token ids must be integers; array('I') would take bytes for whole words")
    # array('I') converts a list of ints two to three times faster than numpy does.
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise type(error)(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
