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
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import Unreachable
from tokenlake_client.process_lock import ProcessLock

log = logging.getLogger(__name__)

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Codes of madvise that allocate or map pages at once; Python 3.11's mmap module has no names for these two."""

_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.mremap.restype = ctypes.c_void_p
MAP_NORESERVE = 0x4000
MREMAP_MAYMOVE, MREMAP_FIXED = 0x1, 0x2
PAGE = 4096

Spans = Callable[[], Iterable[tuple[int, int]]]
"""Returns the bytes of a mapping that arrays cover, as (start, stop)."""
Begin = Callable[[int, int], Callable[[], None] | None]
"""Registers memory, given as (address, bytes). Returns the function that ends the registration; None if no memory was
registered."""


class MappedMemory:
    """The base of every array over one mapping: `np.asarray(memory)` is uint8 [bytes]. The memory is unmapped when the
    last of these arrays is gone. A forked child has this object but not the memory, and must not access the arrays."""

    def __init__(self, descriptor: int, nbytes: int, *, write: bool, lock: ProcessLock | None = None) -> None:
        """Maps the first `nbytes` of the file. The caller continues to own `descriptor`. `lock` is held until the
        memory is unmapped. Raises `OSError`, and `ValueError` for a file that is shorter: an access beyond its end
        would end this process."""
        if not 0 < nbytes <= os.fstat(descriptor).st_size:
            raise ValueError(f"{nbytes} bytes of a file of {os.fstat(descriptor).st_size} bytes")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        # Not `mmap.mmap`, which keeps a descriptor of its own. A forked child inherits descriptors, and the memory of a
        # region stays allocated while any process has one (test_a_forked_child_keeps_no_memory).
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        # A forked child must not inherit the mapping: it could access the slots after the death of its parent, and the
        # daemon, which watches the parent alone, would reuse them.
        _libc.madvise(address, nbytes, mmap.MADV_DONTFORK)
        self.address: int = address
        self.nbytes = nbytes
        self.write = write
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, not write)}
        self._held = lock
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._endings: dict[str, Callable[[], None] | None] = {}
        self._covered: dict[int, Spans] = {}
        self._detached = False

    def cover(self, number: int, spans: Spans) -> None:
        """Record under `number` that arrays cover `spans`, until `uncover`. Raises `Unreachable` after `detach`."""
        with self._lock:
            if self._detached:
                raise Unreachable("the daemon ended")
            self._covered[number] = spans

    def uncover(self, number: int) -> None:
        """Undo `cover`. For finalisers: takes no lock."""
        self._covered.pop(number, None)

    def detach(self) -> None:
        """Replace the mapping, at its address, by private memory: a copy of the bytes that arrays cover, and zeros. The
        memory of a daemon that has ended is then not kept by these arrays. Other threads may read the arrays meanwhile.
        Has no effect on writable memory, which its writer still fills, and on registered memory, which a device may
        read."""
        with self._lock:
            registered = any(end is not None for end in self._endings.values())
            if self._detached or self.write or registered or self._process != os.getpid():
                return
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            own = _libc.mmap(None, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if own == _FAILED:
                return
            for spans in self._covered.copy().values():
                for first, last in spans():
                    start, stop = first - first % PAGE, min(self.nbytes, last + -last % PAGE)
                    ctypes.memmove(own + start, self.address + start, stop - start)
            _libc.mprotect(own, self.nbytes, mmap.PROT_READ)
            _libc.madvise(own, self.nbytes, mmap.MADV_DONTFORK)
            # The kernel exchanges the mappings at once for all threads.
            moved = _libc.mremap(own, self.nbytes, self.nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, self.address)
            if moved != self.address:
                _libc.munmap(own, self.nbytes)
                return
            self._detached, self._held = True, None

    def populate(self) -> None:
        """Fill the page tables now instead of at the first access to each page. Has no effect in kernels before 5.14.
        Releases the GIL, so that the engine's other threads run meanwhile."""
        _libc.madvise(self.address, self.nbytes, MADV_POPULATE_WRITE if self.write else MADV_POPULATE_READ)

    def register(self, kind: str, begin: Begin) -> None:
        """Call `begin` for this memory, unless it was called for the same `kind` before. The function that `begin`
        returned is called in any thread before the memory is unmapped, and must not refer to arrays over this memory.
        Has no effect after `detach`.
        """
        with self._lock:
            if kind not in self._endings and not self._detached:
                self._endings[kind] = begin(self.address, self.nbytes)

    def unregister(self, kind: str) -> None:
        """End the registration of this `kind`, if there is one, which nothing uses any more. Raises its errors."""
        with self._lock:
            end = self._endings.pop(kind, None)
            if end is not None and self._process == os.getpid():
                end()

    def __del__(self) -> None:
        if getattr(self, "_process", 0) != os.getpid():
            # In a forked child the kernel may have given the address of the parent's mapping to another mapping: the
            # child must neither end the parent's registrations nor unmap the address
            # (test_a_forked_child_ends_no_registration).
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
        _libc.munmap(self.address, self.nbytes)


def mapped_memory_of(array: NDArray[Any]) -> MappedMemory | None:
    """The mapping in whose memory `array` lies; None for an array whose memory this package did not map."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    found = base if isinstance(base, MappedMemory) else getattr(base, "memory", None)
    return found if isinstance(found, MappedMemory) else None
