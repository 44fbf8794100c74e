"""Memory that an engine shares with the query engine of its node: the engine writes queries, the query engine
results."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from tokenlake_client.mapped_memory import MappedMemory

__all__ = ["QueryMemory"]


class QueryMemory:
    """A memfd sealed against resizing, mapped here and unmapped when the last array over it is gone. `number` names it
    on its `QueryLink`."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("tokenlake-query", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            # A forked child, which does not have them, sees and writes none of its parent's queries.
            pages = MappedMemory(mmap.mmap(self.descriptor, nbytes, mmap.MAP_SHARED), write=True)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._bytes: NDArray[np.uint8] = np.asarray(pages)

    def close_descriptor(self) -> None:
        """Call once the descriptor was sent, or could not be sent."""
        os.close(self.descriptor)
        self.descriptor = -1

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """A writable view; the memory stays mapped as long as the view."""
        return np.ndarray(shape, dtype, self._bytes.data, offset)
