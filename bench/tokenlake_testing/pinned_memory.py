"""Page locks as a GPU's driver makes them, for devices of tests.

A lock pins the physical pages that lie at an address when it is made. Until it ends, transfers to that address go to
these pages, whatever is mapped there meanwhile. Here the pinned pages are a second mapping of the same memory.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MREMAP_MAYMOVE = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True)
class Mapped:
    """A line of the kernel's list of this process's mappings."""

    first: int
    last: int
    writable: bool
    inode: int


def mapped_at(address: int) -> Mapped | None:
    """The mapping of this process at an address; None where there is none."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            span, rights, _, _, inode = line.split()[:5]
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return Mapped(first, last, "w" in rights, int(inode))
    return None


@dataclass(frozen=True)
class _Pinned:
    size: int
    pages: int
    """The address of a second mapping of the pinned pages."""
    inode: int


class PinnedMemory:
    """All locks of a device. Several threads may use it."""

    def __init__(self) -> None:
        self.pinned: dict[int, _Pinned] = {}
        self.late: list[int] = []
        """Addresses whose lock ended after their memory was unmapped or replaced."""
        self._lock = threading.Lock()

    def pin(self, address: int, size: int, *, write: bool) -> bool:
        """Lock the memory that is mapped at the address. False for memory that the driver refuses: not mapped, mapped
        read-only while `write` asks for writable memory, or locked already."""
        there = mapped_at(address)
        if there is None or there.last < address + size or (write and not there.writable):
            return False
        with self._lock:
            if any(start < address + size and address < start + pin.size for start, pin in self.pinned.items()):
                return False
            # A length of 0 makes a second mapping of shared memory.
            pages = _libc.mremap(address, 0, size, MREMAP_MAYMOVE)
            if pages == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mremap")
            self.pinned[address] = _Pinned(size, pages, there.inode)
        return True

    def unpin(self, address: int) -> None:
        """End a lock."""
        with self._lock:
            pin = self.pinned.pop(address)
            there = mapped_at(address)
            if there is None or there.inode != pin.inode:
                self.late.append(address)
            _libc.munmap(pin.pages, pin.size)

    def reached(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The memory that a transfer to or from `array`, contiguous memory of the host, uses."""
        address = array.ctypes.data
        with self._lock:
            for start, pin in self.pinned.items():
                if start <= address < start + pin.size:
                    memory = (ctypes.c_uint8 * array.nbytes).from_address(pin.pages + address - start)
                    return np.ctypeslib.as_array(memory)
        return array
