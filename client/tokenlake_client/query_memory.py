"""Memory that an engine shares with the query engine of its node: queries one way, results the other."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

__all__ = ["QueryMemory"]


class QueryMemory:
    """A sealed memfd, mapped here. `number` names it on one link; unmapped when the last array over it is gone."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("tokenlake-query", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            mapped = mmap.mmap(self.descriptor, nbytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(self.descriptor)
            raise
        # A forked child would see, and write, its parent's queries.
        mapped.madvise(mmap.MADV_DONTFORK)
        self._bytes: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)

    def close_descriptor(self) -> None:
        """The other side has it."""
        os.close(self.descriptor)
        self.descriptor = -1

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """A writable view."""
        return np.ndarray(shape, dtype, self._bytes.data, offset)
