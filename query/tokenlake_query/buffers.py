"""Memory that an engine shares with this process: queries in, outputs and sums out."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from tokenlake.attention import Stored
from tokenlake.errors import LimitReached, ProtocolRefused

__all__ = ["ALIGNMENT", "SharedBuffer"]

ALIGNMENT = 64
MAX_BYTES = 16 << 30


class SharedBuffer:
    """Unmapped when the last array over it is gone."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Takes `descriptor` over. Raises ProtocolRefused for one that could shrink: a touch beyond its end would end
        this process."""
        try:
            if nbytes > MAX_BYTES:
                raise LimitReached(f"a buffer of {nbytes} bytes; at most {MAX_BYTES}")
            try:
                sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            except OSError:
                sealed = 0
            size = os.fstat(descriptor).st_size
            if not sealed or size < nbytes:
                raise ProtocolRefused(
                    f"a buffer of {size} bytes, {'sealed' if sealed else 'not sealed'} against shrinking; "
                    f"expected a memfd of {nbytes} bytes that is"
                )
            self._map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.nbytes = nbytes

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Stored:
        """Part of it. Raises ProtocolRefused where it does not fit."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset % ALIGNMENT or offset + nbytes > self.nbytes:
            raise ProtocolRefused(
                f"{nbytes} bytes at {offset} of a buffer of {self.nbytes}; expected a multiple of {ALIGNMENT} that fits"
            )
        return np.frombuffer(self._map, dtype, nbytes // dtype.itemsize, offset).reshape(shape)
