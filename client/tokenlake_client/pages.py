"""Memory that is mapped into this process, from its mapping until it is unmapped.

An address does not identify memory: once a mapping is gone, the kernel gives its address to another. A registration of
a mapping's memory (pages locked for a GPU) therefore belongs to the `Pages` object, and ends before the memory is
unmapped::

    mmap | a copier registers it | the last array over it is gone | the registrations end | munmap
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

__all__ = ["Pages", "pages_of"]

log = logging.getLogger(__name__)

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Not named by Python 3.11."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Begin = Callable[[int, int], Callable[[], None] | None]
"""Called with (address, bytes); returns the call that ends what it began, or None where it began nothing."""


class Pages:
    """The base of every array over one mapping: `np.asarray(pages)` is uint8 [bytes]. Unmapped when the last of them is
    gone. A forked child has the object and not the memory."""

    def __init__(self, mapped: mmap.mmap, *, write: bool) -> None:
        """Takes `mapped` over."""
        # A forked child would keep the memory after its parent, which the daemon watches, is dead.
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
        """Fill the page tables now, not at the first read of each page; kernels before 5.14 do not know it. Through
        ctypes, which releases the GIL: an engine's other threads do not wait."""
        _libc.madvise(self.address, self.nbytes, MADV_POPULATE_WRITE if self.write else MADV_POPULATE_READ)

    def register(self, kind: str, begin: Begin) -> None:
        """Call `begin` for this memory, once for each `kind`, also where it began nothing. The function that `begin`
        returned is called before the memory is unmapped, in any thread; it must not refer to arrays over this memory.
        """
        with self._lock:
            if kind not in self._endings:
                self._endings[kind] = begin(self.address, self.nbytes)

    def __del__(self) -> None:
        if self._process != os.getpid():
            # The address is the child's to give to others: neither what the parent registered nor what lies there now
            # may be touched (test_a_forked_child_ends_no_registration).
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._mapped))
            return
        if sys.is_finalizing():
            # The libraries that would be called are being taken down; the kernel ends all of it with the process.
            return
        for end in self._endings.values():
            if end is not None:
                try:
                    end()
                except Exception as error:
                    log.warning("what was registered for a mapping could not be ended: %s", error)


def pages_of(array: NDArray[Any]) -> Pages | None:
    """The mapping that an array handed out by this package lies in; None for an array that lies elsewhere."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    found = base if isinstance(base, Pages) else getattr(base, "pages", None)
    return found if isinstance(found, Pages) else None
