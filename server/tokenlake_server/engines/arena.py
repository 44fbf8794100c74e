"""The node's shared memory. Each region is a memfd, sealed before a process of an engine gets it: none can make it
smaller while the daemon maps it.

::

    make: [ header room | memory for slots ]   all but the room is allocated
    cut:  [ header | slot 0 | ... | slot n-1 | given back ]
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tokenlake.errors import LimitReached
from tokenlake.memory.region import GENERATION_BYTES, PAGE, RegionShape, header_room, stride_of
from tokenlake.where import HOST
from tokenlake.wire.slots import SlotRef

log = logging.getLogger(__name__)

MADV_POPULATE_WRITE = 23
"""The madvise code that allocates pages at once, since Linux 5.14; Python 3.11's mmap module has no name for it."""
POPULATE_CHUNK = 16 << 20
"""Bytes that one madvise call allocates; `Arena.stop` ends `Arena.make` between two calls."""
HUGE_PAGE = 2 << 20
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""No process can change the size of a memfd with these seals, or its seals."""
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
_GENERATION = struct.Struct("<Q")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Region:
    """This daemon's mapping of one region of the arena, which the arena owns. `view` is valid until `close`."""

    where = HOST
    """The kind of memory of the region (`tokenlake.where`): memory of the host."""

    def __init__(self, number: int, nbytes: int, huge_pages: bool) -> None:
        """`nbytes`: those for slots; the file also has room for the header."""
        self.number = number
        self.nbytes = nbytes
        self._page = HUGE_PAGE if huge_pages else PAGE
        self.file_bytes = _up(header_room(nbytes) + nbytes, self._page)
        try:
            self.fd = _open_memfd(number, self.file_bytes, huge_pages)
            try:
                self.map = mmap.mmap(self.fd, self.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except BaseException:
                os.close(self.fd)
                raise
        except OSError as error:
            raise LimitReached(
                f"the kernel gave no {nbytes >> 20} MiB of memory for a region: {error.strerror}{_cure(error)}"
            ) from error
        self._advise(huge_pages)
        self.view = memoryview(self.map)

    @classmethod
    def adopt(cls, number: int, descriptor: int, nbytes: int, slot_bytes: int, *, huge_pages: bool) -> Region:
        """The region of a daemon that has ended, whose memory is there. `slot_bytes`: 0 if it was not cut. Owns
        `descriptor` unless it raises. Raises `ValueError` for a file that is not such a region."""
        region = cls.__new__(cls)
        region.number, region.nbytes, region.fd = number, nbytes, descriptor
        region._page = HUGE_PAGE if huge_pages else PAGE
        region.file_bytes = os.fstat(descriptor).st_size
        header = RegionShape(nbytes, slot_bytes).header_bytes if slot_bytes else header_room(nbytes)
        region._kept = header + nbytes
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS
        if region.file_bytes < region._kept or sealed != (SEALS if slot_bytes else 0):
            raise ValueError(f"a file of {region.file_bytes} bytes with the seals {sealed}")
        region.map = mmap.mmap(descriptor, region.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        region._advise(huge_pages)
        region.view = memoryview(region.map)
        return region

    def _advise(self, huge_pages: bool) -> None:
        if self.nbytes >= HUGE_PAGE and not huge_pages:
            # Where the system gives huge pages to shared memory on request (shmem_enabled is `advise`). Not for the
            # room of the header, of which a huge page would take more than it needs.
            with contextlib.suppress(OSError):
                self.map.madvise(mmap.MADV_HUGEPAGE, 0, self.nbytes // HUGE_PAGE * HUGE_PAGE)

    def populate(self, start: int = 0, stop: int | None = None, ended: Callable[[], bool] = lambda: False) -> None:
        """Make the kernel allocate the pages from `start` to `stop` (None: as many bytes as the slots have). Returns
        early once `ended` is true. To be called in a thread of its own: madvise is called through ctypes, which
        releases the GIL meanwhile; `mmap.madvise` would hold it. Raises `LimitReached`."""
        stop = self.nbytes if stop is None else stop
        anchor = ctypes.c_char.from_buffer(self.map)
        base = ctypes.addressof(anchor)
        try:
            for first in range(start, stop, POPULATE_CHUNK):
                if ended():
                    return
                if _libc.madvise(base + first, min(POPULATE_CHUNK, stop - first), MADV_POPULATE_WRITE):
                    code = ctypes.get_errno()
                    # Kernels before 5.14 do not know the advice: they answer EINVAL and allocate a page when it is
                    # first written.
                    if code != errno.EINVAL:
                        raise LimitReached(
                            f"the kernel did not provide memory for the arena: {os.strerror(code)}; lower 'memory'"
                        )
        finally:
            del anchor

    def cut(self, nbytes: int, slot_bytes: int) -> None:
        """Give the region slots of `slot_bytes`, which take `nbytes`, and seal it. `trim` gives the rest back."""
        header = RegionShape(nbytes, slot_bytes).header_bytes
        # The header takes the place of as many bytes of slots, which are allocated behind them: mostly one page.
        if nbytes + header > self.nbytes:
            self.populate(self.nbytes, nbytes + header)
        self.nbytes = nbytes
        self._kept = header + nbytes
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)

    def trim(self) -> None:
        """Give the memory behind the slots of a region that was cut back to the kernel. Blocks for a moment."""
        self.free_pages([(0, self._kept)])

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
        for first, last in [*kept, (self.file_bytes, self.file_bytes)]:
            stop = first - first % self._page
            how = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            if stop > start and _libc.fallocate(self.fd, how, start, stop - start):
                reason = os.strerror(ctypes.get_errno())
                log.error("%d bytes of region %d are still allocated: %s", stop - start, self.number, reason)
            start = max(start, _up(last, self._page))

    def close(self) -> None:
        """Unmap the region in this process; other processes keep their mappings. Raises `BufferError` while a view of
        it exists, and may be called again then."""
        self.view.release()
        self.map.close()
        os.close(self.fd)


class Arena:
    """All memory regions of the node. `make`, `trim`, `free` and `end` run in threads; other methods are called on the
    control loop or while it does not run."""

    def __init__(self, huge_pages: bool = False) -> None:
        self._huge_pages = huge_pages
        self._regions: dict[int, Region] = {}
        self._stopped = False

    def make(self, number: int, nbytes: int) -> None:
        """Make region `number` with `nbytes` for slots, and allocate all its pages. Returns without it after `stop`.
        Raises `LimitReached`, and may be called again then."""
        region = Region(number, nbytes, self._huge_pages)
        try:
            region.populate(ended=lambda: self._stopped)
        except BaseException:
            region.close()
            raise
        if self._stopped:
            region.close()
        else:
            self._regions[number] = region

    def adopt(self, number: int, descriptor: int, nbytes: int, slot_bytes: int) -> None:
        """Take over the region of a daemon that has ended, as `Region.adopt`. Raises `ValueError` and `OSError`."""
        region = Region.adopt(number, descriptor, nbytes, slot_bytes, huge_pages=self._huge_pages)
        if slot_bytes:
            # The daemon before may have ended between the cut and this.
            region.trim()
        self._regions[number] = region

    def forget(self, number: int) -> None:
        """Let go of a region that was adopted; processes that map it keep its memory."""
        self._regions.pop(number).close()

    def generations(self, number: int, slot_bytes: int) -> NDArray[np.uint64]:
        """The generation of each slot of a region, shape [slots]: a copy of its header."""
        region = self._regions[number]
        slots = RegionShape(region.nbytes, slot_bytes).slots
        return np.frombuffer(region.view, np.uint64, slots).copy()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the arena's regions."""
        return list(self._regions)

    def region(self, number: int) -> Region:
        """The arena's region with that number. Raises KeyError where there is none."""
        return self._regions[number]

    def free(self, number: int) -> None:
        """Give the memory of a region back to the kernel: processes of its tenant may still map it."""
        self._regions[number].free_pages()

    def end(self, number: int) -> None:
        """Unmap a region whose memory was given back. Raises `BufferError` while a thread has a view of it, for example
        one in a call of the cold tier that does not return; may be called again then."""
        self._regions[number].close()
        del self._regions[number]

    def slots(self, places: Sequence[SlotRef], slot_bytes: int) -> list[memoryview]:
        """Writable views of the memory of slots. The caller must have the slots pinned for as long as it uses the
        views."""
        stride = stride_of(slot_bytes)
        regions = {number: self._regions[number] for number in {place.region for place in places}}
        headers = {number: RegionShape(each.nbytes, slot_bytes).header_bytes for number, each in regions.items()}
        starts = [headers[place.region] + place.slot * stride for place in places]
        views = [regions[place.region].view for place in places]
        return [view[start : start + slot_bytes] for view, start in zip(views, starts, strict=True)]

    def stamp(self, places: Sequence[SlotRef]) -> None:
        """Write the generation of each slot, a number that changes when the slot is reused, into the table of its
        region. A client compares the number after it copied a slot, to detect that the slot was reused meanwhile."""
        for place in places:
            _GENERATION.pack_into(self._regions[place.region].map, place.slot * GENERATION_BYTES, place.generation)

    def free_pages(self, kept: Mapping[int, Sequence[tuple[SlotRef, int]]], left: Collection[int] = ()) -> None:
        """Give the memory of all regions back to the kernel, but not that of the regions `left`, and of the slots
        `kept`: by region, in order of slots, (slot, bytes of a slot). For the end of the daemon: engines may still read
        slots that they leased."""
        for number, region in self._regions.items():
            if number in left:
                continue
            spans = []
            for place, slot_bytes in kept.get(number, ()):
                start = RegionShape(region.nbytes, slot_bytes).offset(place.slot)
                spans.append((start, start + slot_bytes))
            region.free_pages(spans)

    def stop(self) -> None:
        """Let `make`, which is called in threads, return early without a region."""
        self._stopped = True

    def close(self) -> None:
        """Unmap everything."""
        for region in self._regions.values():
            region.close()


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _cure(error: OSError) -> str:
    """The cure of a region that could not be made, to be appended to the message."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "; raise the limit of descriptors (LimitNOFILE of systemd, `ulimit -n`): each region takes two"
    return "; lower 'memory'"


def _open_memfd(number: int, nbytes: int, huge_pages: bool) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
    fd = os.memfd_create(f"tokenlake-{number}", flags)
    try:
        os.ftruncate(fd, nbytes)
        # The kernel makes a memfd with mode 0777, with which a process of another user could open it through /proc.
        os.fchmod(fd, 0o400)
    except BaseException:
        os.close(fd)
        raise
    return fd
