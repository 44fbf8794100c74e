"""Shared memory that is mapped into this process, and its registrations (for example with CUDA, as locked pages).

An address does not identify memory: after a mapping is removed, the kernel may give its address to another one. A
registration therefore belongs to the `MappedMemory` object and ends before the memory is unmapped::

    mmap | a copier registers the memory | the last array over it is gone | the registrations end | munmap
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MappedMemory", "mapped_memory_of"]

log = logging.getLogger(__name__)

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Codes of madvise that allocate or map pages at once; Python 3.11's mmap module has no names for these two."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Begin = Callable[[int, int], Callable[[], None] | None]
"""Registers memory, given as (address, bytes). Returns the function that ends the registration; None where nothing was
registered."""


class MappedMemory:
    """The base of every array over one mapping: `np.asarray(memory)` is uint8 [bytes]. The memory is unmapped when the
    last of these arrays is gone. A forked child has this object but not the memory, and must not access the arrays."""

    def __init__(self, mapped: mmap.mmap, *, write: bool) -> None:
        """Takes over `mapped`."""
        # A forked child must not inherit the mapping: it could access the slots after the death of its parent, and the
        # daemon, which watches the parent alone, would reuse them.
        mapped.madvise(mmap.MADV_DONTFORK)
        view: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        self.address = view.ctypes.data
        self.nbytes = len(mapped)
        self.write = write
        self.__array_interface__ = view.__array_interface__
        self._mapped = mapped
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._endings: dict[str, Callable[[], None] | None] = {}

    def populate(self) -> None:
        """Fill the page tables now instead of at the first access to each page. Has no effect in kernels before 5.14.
        Releases the GIL, so that the engine's other threads run meanwhile."""
        _libc.madvise(self.address, self.nbytes, MADV_POPULATE_WRITE if self.write else MADV_POPULATE_READ)

    def register(self, kind: str, begin: Begin) -> None:
        """Call `begin` for this memory, unless it was called for the same `kind` before. The function that `begin`
        returned is called in any thread before the memory is unmapped, and must not refer to arrays over this memory.
        """
        with self._lock:
            if kind not in self._endings:
                self._endings[kind] = begin(self.address, self.nbytes)

    def __del__(self) -> None:
        if self._process != os.getpid():
            # In a forked child the kernel may have given the address of the parent's mapping to another mapping: the
            # child must neither end the parent's registrations nor unmap the address
            # (test_a_forked_child_ends_no_registration).
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._mapped))
            return
        if sys.is_finalizing():
            # The interpreter exits, and the libraries that made the registrations (for example CUDA) are being
            # unloaded: they must not be called. The kernel ends the registrations with the process.
            return
        for end in self._endings.values():
            if end is not None:
                try:
                    end()
                except Exception as error:
                    log.warning("a registration of mapped memory could not be ended: %s", error)


def mapped_memory_of(array: NDArray[Any]) -> MappedMemory | None:
    """The mapping in whose memory `array` lies; None for an array whose memory this package did not map."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    found = base if isinstance(base, MappedMemory) else getattr(base, "memory", None)
    return found if isinstance(found, MappedMemory) else None
