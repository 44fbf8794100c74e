"""A random generator without state: 64-bit words that are a function of a key and a counter, for single words and for
arrays.

The finaliser and the increment are those of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WORD: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15

_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A copy of `words` in which each word is mixed as by splitmix64; same shape. At least one dimension, because numpy
    warns when a scalar wraps."""
    mixed = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def key_of(*parts: int) -> int:
    """A 64-bit key computed from these numbers in this order; each number counts modulo 2**64."""
    key = 0
    for part in parts:
        word = (key + part + GOLDEN) & WORD
        word = ((word ^ (word >> 30)) * _FIRST) & WORD
        word = ((word ^ (word >> 27)) * _SECOND) & WORD
        key = word ^ (word >> 31)
    return key
