"""The node's shared memory. Each region is a sealed memfd: no process can make it smaller while the daemon maps it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence

from tokenlake.errors import LimitReached
from tokenlake.store.region import GENERATION_BYTES, RegionShape
from tokenlake.where import HOST
from tokenlake.wire.slots import SlotRef

__all__ = ["Arena", "Region"]

log = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""The madvise code that allocates pages at once, since Linux 5.14; Python 3.11's mmap module has no name for it."""
POPULATE_CHUNK = 16 << 20
"""Bytes that one madvise call allocates. `Region.populate` reports its progress, and can be interrupted, between two
calls."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""No process can change the size of a memfd with these seals, or its seals."""
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
PAGE = 4096
_GENERATION = struct.Struct("<Q")
_HUGE_CURE = (
    "; set aside as many huge pages of 2 MiB as 'memory' takes, with `sysctl vm.nr_hugepages=N` as root "
    "(HugePages_Free in /proc/meminfo says how many are left), or set 'huge_pages' to false"
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Region:
    """This daemon's mapping of one region of the arena, which the arena owns. `view` is valid until `close`."""

    where = HOST
    """The kind of memory of the region (`tokenlake.where`): memory of the host."""

    def __init__(self, number: int, nbytes: int, huge_pages: bool) -> None:
        self.number = number
        self.nbytes = nbytes
        try:
            self.fd = _open_memfd(number, nbytes, huge_pages)
            try:
                self.map = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except BaseException:
                os.close(self.fd)
                raise
        except OSError as error:
            where, cure = ("setting 'huge_pages'", _HUGE_CURE) if huge_pages else ("memfd", "; lower 'memory'")
            raise LimitReached(
                f"the kernel gave no {nbytes >> 20} MiB of memory for a region ({where}): {error.strerror}{cure}"
            ) from error
        self.view = memoryview(self.map)

    def populate(self, report: Callable[[int], None]) -> None:
        """Make the kernel allocate every page. `report(nbytes)` is called with the bytes since the last report. To be
        called in a thread of its own: madvise is called through ctypes, which releases the GIL meanwhile;
        `mmap.madvise` would hold it."""
        anchor = ctypes.c_char.from_buffer(self.map)
        base = ctypes.addressof(anchor)
        try:
            for start in range(0, self.nbytes, POPULATE_CHUNK):
                size = min(POPULATE_CHUNK, self.nbytes - start)
                if _libc.madvise(base + start, size, MADV_POPULATE_WRITE):
                    code = ctypes.get_errno()
                    # Kernels before 5.14 do not know the advice: they answer EINVAL and allocate a page when it is
                    # first written.
                    if code != errno.EINVAL:
                        raise LimitReached(
                            f"the kernel did not provide memory for the arena: {os.strerror(code)}; lower 'memory'"
                        )
                report(size)
        finally:
            del anchor

    def reopen(self, *, write: bool) -> int:
        """Open the region's memory again and return the new file descriptor, for one process; the caller closes it."""
        if write:
            return os.dup(self.fd)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def free_pages(self, kept: Sequence[tuple[int, int]] = ()) -> None:
        """Give the memory of the region back to the kernel, but not the bytes from `start` to `stop` of each entry
        (start, stop) of `kept`, which ascend. Without this the memory would stay allocated for as long as any process
        maps the region or has a descriptor of it. Those that still map it read zeros there. Memory that
        the kernel does not take back is logged. Calls fallocate through ctypes, which releases the GIL."""
        start = 0
        for first, last in [*kept, (self.nbytes, self.nbytes)]:
            stop = first - first % PAGE
            how = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            if stop > start and _libc.fallocate(self.fd, how, start, stop - start):
                reason = os.strerror(ctypes.get_errno())
                log.error("%d bytes of region %d are still allocated: %s", stop - start, self.number, reason)
            start = max(start, last + -last % PAGE)

    def close(self) -> None:
        """Unmap the region in this process; other processes keep their mappings. Raises `BufferError` while a view of
        it exists, and may be called again then."""
        self.view.release()
        self.map.close()
        os.close(self.fd)


class Arena:
    """All memory regions of the node. `replace` runs in a thread; other methods are called on the control loop or at
    start."""

    def __init__(self, regions: int, region_bytes: int, huge_pages: bool = False) -> None:
        self.region_bytes = region_bytes
        self._huge_pages = huge_pages
        self._regions = {number: self._make(number) for number in range(regions)}

    def _make(self, number: int) -> Region:
        return Region(number, self.region_bytes, self._huge_pages)

    def populate(self, report: Callable[[int], None]) -> None:
        """Make the kernel allocate all pages of the arena, so that no later write waits for it. `report` is called with
        the number of bytes that were allocated since its last call."""
        for region in self._regions.values():
            region.populate(report)

    def region(self, number: int) -> Region:
        """The arena's region with that number. Raises KeyError where there is none."""
        return self._regions[number]

    def replace(self, number: int, fresh: int) -> None:
        """Replace region `number` by new memory under the number `fresh`: processes of the previous tenant may still
        map the old memory. The old memory is given back first, so that the arena does not exceed its size. May be
        called again after it raised; `region` and `slots` know the new region once all its pages are allocated."""
        previous = self._regions.get(number)
        if previous is not None:
            previous.free_pages()
            previous.close()
            del self._regions[number]
        region = self._make(fresh)
        try:
            region.populate(lambda _: None)
        except BaseException:
            region.close()
            raise
        self._regions[fresh] = region

    def slots(self, places: Sequence[SlotRef], slot_bytes: int) -> list[memoryview]:
        """Writable views of the memory of slots. The caller must have the slots pinned for as long as it uses the
        views."""
        shape = RegionShape(self.region_bytes, slot_bytes)
        header, stride = shape.header_bytes, shape.stride
        starts = [header + place.slot * stride for place in places]
        views = [self._regions[place.region].view for place in places]
        return [view[start : start + slot_bytes] for view, start in zip(views, starts, strict=True)]

    def stamp(self, places: Sequence[SlotRef]) -> None:
        """Write the generation of each slot, a number that changes when the slot is reused, into the table of its
        region. A client compares the number after it copied a slot, to detect that the slot was reused meanwhile."""
        for place in places:
            _GENERATION.pack_into(self._regions[place.region].map, place.slot * GENERATION_BYTES, place.generation)

    def free_pages(self, kept: Mapping[int, Sequence[tuple[SlotRef, int]]]) -> None:
        """Give the memory of all regions back to the kernel, but not that of the slots `kept`: by region, in order of
        slots, (slot, bytes of a slot). For the end of the daemon: engines may still read slots that they leased."""
        for number, region in self._regions.items():
            spans = []
            for place, slot_bytes in kept.get(number, ()):
                start = RegionShape(self.region_bytes, slot_bytes).offset(place.slot)
                spans.append((start, start + slot_bytes))
            region.free_pages(spans)

    def close(self) -> None:
        """Unmap everything."""
        for region in self._regions.values():
            region.close()


def _open_memfd(number: int, nbytes: int, huge_pages: bool) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
    fd = os.memfd_create(f"tokenlake-{number}", flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        # The kernel makes a memfd with mode 0777, with which a process of another user could open it through /proc.
        os.fchmod(fd, 0o400)
    except BaseException:
        os.close(fd)
        raise
    return fd
