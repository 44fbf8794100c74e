"""Encryption of segments on disk: the keys of the setting `disk_keys`, and the ciphers that follow from them.

Each write of a segment has an AES-256-GCM key of its own, made from a key of the setting, the tenant's name and 32
random bytes in the header of the place::

    key of one write = BLAKE2b-256(key: one of `disk_keys`, message: salt, tenant)

So no nonce is used twice with a key, whatever was lost in a crash, and a copy of one tenant's segment cannot be read as
another's. The first key of the setting is for new segments; the others are for segments that were written before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NO_KEY = 0
"""The number of no key: the segment is not encrypted."""
SALT_BYTES = 32
TAG_BYTES = 16


class DiskKeys:
    """The keys of a daemon, by number. The number of a key is the same on every node and after every restart, and does
    not help to find the key."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        """`keys`: 16 to 64 bytes each, that for new segments first; none: nothing is encrypted."""
        self._keys = {_number(key): key for key in keys}
        self.current = next(iter(self._keys), NO_KEY)
        """Number of the key for new segments; `NO_KEY`: they are not encrypted."""
        self.readable = list(self._keys) or [NO_KEY]
        """The numbers of the keys of segments that can be read."""

    def cipher(self, number: int, tenant: str, salt: bytes) -> AESGCM:
        """The cipher of one write. Raises KeyError for a number that is not in this object."""
        return AESGCM(
            hashlib.blake2b(
                salt + tenant.encode(), digest_size=32, key=self._keys[number], person=b"tokenlake disk"
            ).digest()
        )

    def __repr__(self) -> str:
        return f"DiskKeys({', '.join(f'{number:08x}' for number in self._keys)})"


def nonce(part: int) -> bytes:
    """The nonce of one part of a write: 0 for the header, then the chunks from 1 on."""
    return part.to_bytes(12, "little")


def _number(key: bytes) -> int:
    digest = hashlib.blake2b(key=key, digest_size=4, person=b"tokenlake key id").digest()
    return int.from_bytes(digest, "little") or 1
