"""A fake of CUDA for machines without a GPU: the calls that page-lock host memory, and transfers that use the locked
pages.

A registration pins the physical pages that lie at an address when it is made. Until it ends, transfers to that address
go to these pages, whatever is mapped there meanwhile. Here the pinned pages are a second mapping of the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenlake_client.engines.vllm.cuda_threads import CudaThreads

READ_ONLY = 8
SUCCESS, INVALID, ALREADY, NOT_REGISTERED = 0, 1, 712, 713
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
    """The mapped file."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            span, rights, _, _, inode = line.split()[:5]
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return Mapped(first, last, "w" in rights, int(inode))
    return None


@dataclass(frozen=True)
class Pinned:
    """A registration."""

    size: int
    pages: int
    """A second mapping of the pinned pages."""
    inode: int


class FakeCuda:
    """Stands for `torch.cuda.cudart()`."""

    def __init__(self) -> None:
        self.pinned: dict[int, Pinned] = {}
        self.late: list[int] = []
        """Addresses whose registration ended after their memory was unmapped or replaced."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Pin the memory that is mapped at the address."""
        there = mapped_at(address)
        if there is None or there.last < address + size or not (there.writable or flags & READ_ONLY):
            return INVALID
        if any(start < address + size and address < start + pin.size for start, pin in self.pinned.items()):
            return ALREADY
        # A length of 0 makes a second mapping of shared memory.
        pages = _libc.mremap(address, 0, size, MREMAP_MAYMOVE)
        if pages == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mremap")
        self.pinned[address] = Pinned(size, pages, there.inode)
        return SUCCESS

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """End a registration."""
        pin = self.pinned.pop(address, None)
        if pin is None:
            return NOT_REGISTERED
        there = mapped_at(address)
        if there is None or there.inode != pin.inode:
            self.late.append(address)
        _libc.munmap(pin.pages, pin.size)
        return SUCCESS

    def reached(self, slot: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The memory that a transfer to or from `slot` uses."""
        address = slot.ctypes.data
        for start, pin in self.pinned.items():
            if start <= address < start + pin.size:
                memory = (ctypes.c_uint8 * slot.nbytes).from_address(pin.pages + address - start)
                return np.ctypeslib.as_array(memory)
        return slot


class Stream:
    """A stream on which all work is complete at once."""

    def __init__(self, device: object) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Does nothing: all work is complete."""


@contextlib.contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A `CudaCopy` or `CudaPages` made inside runs on the host, with the transfers of this module."""
    cuda = FakeCuda()
    locked = CudaThreads.locked
    with patch.context() as patched:
        patched.setattr(torch.cuda, "cudart", lambda: cuda)
        patched.setattr(torch.cuda, "Stream", Stream)
        for name in ("stream", "device"):
            patched.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
        patched.setattr(torch.cuda, "set_device", lambda *_: None)
        patched.setattr(CudaThreads, "locked", lambda self, array: cuda.reached(locked(self, array)))
        yield cuda
