"""Checks of the arguments of public calls, before anything is sent: the daemon ends the connection of a client whose
messages have values out of their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake.wire.fields import MAX_SECONDS
from tokenlake.wire.slots import join_keys

LONGEST_POLL_S = 86400.0
"""The system call poll takes at most 24.8 days. Callers wait in a loop until their deadline."""


def seconds(name: str, value: float) -> float:
    """`value`, if it is a number of seconds. Raises `ValueError`, which names the argument, if not."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"argument {name!r} is {value!r}; expected 0 to {MAX_SECONDS:.0f} seconds")
    return value


def index(name: str, value: int) -> int:
    """`value`, if it is a count or the index of a segment. Raises `ValueError`, which names the argument, if not."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 1 << 32:
        raise ValueError(f"argument {name!r} is {value!r}; expected a whole number from 0 to 2**32 - 1")
    return value


def check_keys(keys: Sequence[SegmentKey]) -> None:
    """Raise `ValueError` if one of the segment keys `keys` has another length than a key."""
    if not set(map(len, keys)) <= {KEY_BYTES}:
        at = next(at for at, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise ValueError(f"element {at} of argument 'keys' has {len(keys[at])} bytes; expected {KEY_BYTES}")


def packed(keys: Sequence[SegmentKey]) -> bytes:
    """The segment keys `keys` as messages carry them. Raises `ValueError` for a key of another length."""
    check_keys(keys)
    return join_keys(keys)


def poll_ms(wait_s: float) -> int:
    """The argument of `poll` that stands for `wait_s` seconds, rounded up: a caller that waits for less than a
    millisecond would otherwise spin."""
    return math.ceil(min(wait_s, LONGEST_POLL_S) * 1e3)
