"""Names of objects, and keys of their bytes: both follow from the tenant's secret alone, so that the daemons of every
cluster with this tenant find and read its objects, and a name or an object tells nobody else of which prompt it is.

::

    keys of a tenant = BLAKE2b-256(key: its secret, message: b"names", b"bytes"; person: b"tokenlake cold")
    name of a segment = BLAKE2b-256(key: that for names, message: segment key)
    key of one object = BLAKE2b-256(key: that for bytes, message: 32 random bytes in the object)

A file name has the first 8 bytes of a name, the object itself all 32. Two segments of a fleet with the same 8 bytes
would be misses for each other: 3 in a million that a tier of 10 million objects has such a pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from tokenlake.keys import KEY_BYTES

NAME_BYTES = 32
SHORT_BYTES = 8
"""Bytes of a name that the index and paths have."""
OBJECTS = "objects"
FOLDERS = 256
Shorts = NDArray[np.uint64]
"""The first bytes of names, as numbers: big-endian, so that those of one folder are neighbours in order."""
_PERSON = b"tokenlake cold"


class ColdTenant:
    """What follows from the secret of one tenant."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 1 to 64 bytes."""

        def derived(what: bytes) -> bytes:
            return hashlib.blake2b(what, digest_size=32, key=secret, person=_PERSON).digest()

        self._names = hashlib.blake2b(digest_size=NAME_BYTES, key=derived(b"names"), person=_PERSON)
        self._bytes = derived(b"bytes")
        self.tag = int.from_bytes(derived(b"tag")[:8], "little") >> 1
        """Says which objects are of the same tenant, and not which tenant that is."""

    def name(self, key: bytes) -> bytes:
        """The name of the object of a segment."""
        hashed = self._names.copy()
        hashed.update(key)
        return hashed.digest()

    def shorts(self, keys: bytes) -> Shorts:
        """The short names of packed segment keys."""
        names = (self.name(keys[at : at + KEY_BYTES])[:SHORT_BYTES] for at in range(0, len(keys), KEY_BYTES))
        return np.frombuffer(b"".join(names), ">u8").astype(np.uint64)

    def cipher(self, salt: bytes) -> AESGCM:
        """The cipher of one object."""
        return AESGCM(hashlib.blake2b(salt, digest_size=32, key=self._bytes, person=_PERSON).digest())


def short_of(name: bytes) -> int:
    """The short form of a name."""
    return int.from_bytes(name[:SHORT_BYTES], "big")


def path_of(short: int) -> str:
    """The path of the object with a name."""
    text = f"{short:016x}"
    return f"{OBJECTS}/{text[:2]}/{text[2:]}"


def paths_of(shorts: Iterable[int] | Shorts) -> list[str]:
    """The paths of objects."""
    return [path_of(int(short)) for short in shorts]


def short_in(folder: int, name: str) -> int | None:
    """The short name of a file in one of the `FOLDERS`; None for a file that is no object of the tier."""
    if len(name) != 14 or name.strip("0123456789abcdef"):
        return None
    return folder << 56 | int(name, 16)


def by_secret(secrets: Sequence[tuple[str, bytes]]) -> dict[str, ColdTenant]:
    """The tenants of a daemon, by name."""
    return {name: ColdTenant(secret) for name, secret in secrets}
