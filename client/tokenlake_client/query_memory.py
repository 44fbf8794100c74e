"""Memory that an engine shares with the query engine of its node: the engine writes queries into it, and the query
engine writes the results."""

from __future__ import annotations

import fcntl
import os

import numpy as np
from numpy.typing import NDArray

from tokenlake_client.mapped_memory import MappedMemory


class QueryMemory:
    """A memfd that is sealed against resizing and mapped into this process; it is unmapped when the last array over it
    is gone. `number` names it in messages on its `QueryLink`."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("tokenlake-query", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            # A `MappedMemory` is not inherited by forked children, which therefore cannot access the queries of their
            # parent.
            pages = MappedMemory(self.descriptor, nbytes, write=True)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._bytes: NDArray[np.uint8] = np.asarray(pages)

    def close_descriptor(self) -> None:
        """Close the descriptor of the memfd, after it was sent or could not be sent. The mapping stays."""
        os.close(self.descriptor)
        self.descriptor = -1

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """A writable array over the bytes from `offset` on. The memory stays mapped while the array lives."""
        return np.ndarray(shape, dtype, self._bytes.data, offset)
