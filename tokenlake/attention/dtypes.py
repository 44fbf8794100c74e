"""Element types of caches and queries in numpy. numpy has no bfloat16: such elements are held as uint16, bit for
bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import LayoutRefused

Stored = NDArray[Any]
"""An array of float32, of float16, or of uint16 that holds the bits of bfloat16."""

_STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type of arrays of the layout's `dtype`. Raises LayoutRefused for an unknown name."""
    try:
        return _STORED[dtype]
    except KeyError:
        raise LayoutRefused(f"dtype is {dtype!r}; supported: {', '.join(_STORED)}") from None


def as_float32(array: Stored, dtype: str) -> NDArray[np.float32]:
    """The exact values of `array`. A new array, except for float32: then `array` itself. Raises LayoutRefused when the
    type of the array is not that of `dtype`."""
    expected = stored_dtype(dtype)
    if array.dtype != expected:
        raise LayoutRefused(f"an array of {dtype} has numpy's type {array.dtype}; expected {expected}")
    if dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def from_float32(values: NDArray[np.float32], dtype: str) -> Stored:
    """`values` in `dtype`, rounded to nearest, ties to even; values beyond its range become infinite. A new array,
    except for float32: then `values` itself."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(stored_dtype(dtype), copy=False)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # NaN is mapped explicitly: cutting off the lower half of its bits could give infinity, rounding it another sign.
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
