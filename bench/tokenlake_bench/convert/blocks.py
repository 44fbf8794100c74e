"""Ids of the blocks of prompts: keyed hashes of all tokens up to a block's end, from which no text can be guessed."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import ConfigurationError

KEY_BYTES: Final = 32
_WORD: Final = (1 << 64) - 1
_ID_BITS: Final = np.uint64((1 << 53) - 1)
"""Bits of an id: tools that read JSON numbers as doubles keep them."""


class BlockIds:
    """Makes ids of blocks of `block_tokens` tokens. Equal ids mean equal tokens up to the block's end, of the same
    realm: prompts of different realms (models, adapters) share no id. Without the key nobody can compute the id of a
    text."""

    def __init__(self, key: bytes, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._key = key
        self._tails = itertools.count()

    def of_tokens(self, tokens: Sequence[int], realm: str = "") -> NDArray[np.uint64]:
        """The id of each started block of a prompt."""
        data = np.asarray(tokens, dtype="<u4").tobytes()
        width = 4 * self.block_tokens
        return self._chain(realm, (data[start : start + width] for start in range(0, len(data), width)))

    def of_blocks(self, blocks: Sequence[int], own_tokens: int, tokens: int) -> NDArray[np.uint64]:
        """The id of each started block of a prompt of `tokens` tokens that the log names by `blocks`, ids of its own
        blocks of `own_tokens` tokens: the full ones, or all started ones. A last block that the log does not name is
        unlike all others. `block_tokens` is a multiple of `own_tokens`."""
        data = np.array([block & _WORD for block in blocks], dtype="<u8").tobytes()
        width = 8 * (self.block_tokens // own_tokens)
        pieces = [data[start : start + width] for start in range(0, len(data), width)]
        if len(blocks) * own_tokens < tokens:
            if len(blocks) * own_tokens % self.block_tokens == 0:
                pieces.append(b"")
            pieces[-1] += self._tail()
        return self._chain("", pieces)

    def unlike(self, tokens: int) -> NDArray[np.uint64]:
        """The ids of a prompt of so many tokens that is unlike all others."""
        return self._chain("", (self._tail() for _ in range(-(-tokens // self.block_tokens))))

    def _tail(self) -> bytes:
        return b"tail" + next(self._tails).to_bytes(8, "little")

    def _chain(self, realm: str, pieces: Iterable[bytes]) -> NDArray[np.uint64]:
        def digests() -> Iterator[bytes]:
            before = hashlib.blake2b(realm.encode(), key=self._key, digest_size=KEY_BYTES).digest()
            for piece in pieces:
                before = hashlib.blake2b(before + piece, key=self._key, digest_size=KEY_BYTES).digest()
                yield before[:8]

        return np.frombuffer(b"".join(digests()), dtype="<u8").astype(np.uint64) & _ID_BITS


def key_from(path: Path | None) -> bytes:
    """The key of a conversion: a new random one, or, with a path, that of the file, which is made where it does not
    exist, readable by its owner alone. Raises ConfigurationError for a file that is no key."""
    if path is None:
        return secrets.token_bytes(KEY_BYTES)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as made:
            made.write(key := secrets.token_bytes(KEY_BYTES))
        return key
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigurationError("key_file", str(path), f"a file that can be made; {error.strerror}") from None
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ConfigurationError("key_file", str(path), f"a readable file; {error.strerror}") from None
    if len(key) != KEY_BYTES:
        raise ConfigurationError("key_file", str(path), f"a file of {KEY_BYTES} bytes, as this command makes it")
    return key
