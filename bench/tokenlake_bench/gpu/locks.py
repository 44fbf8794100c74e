"""Page-locking the arena's memory for a device: seconds per GiB, for memory that has pages and is mapped as engines map
it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from tokenlake_bench.gpu.base import NotRun, Rig, Row, device_named
from tokenlake_client.mapped_memory import MappedMemory

GIB = 1 << 30


def locks(rig: Rig) -> Iterator[Row]:
    """A row for each size, mapped read-only as for loads and writable as for saves: seconds per GiB of a lock and of
    its end."""
    device = device_named(rig.device)
    for nbytes in (1 << 22,) if rig.small else (GIB, 8 * GIB):
        for write in (False, True):
            descriptor = os.memfd_create("locks")
            os.posix_fallocate(descriptor, 0, nbytes)
            memory = MappedMemory(descriptor, nbytes, write=write)
            os.close(descriptor)
            began = time.perf_counter()
            end = device.lock(memory.address, memory.nbytes, write=write)
            locked = time.perf_counter()
            if end is None:
                raise NotRun("the device cannot lock this memory")
            end()
            ended = time.perf_counter()
            figures = {"lock_s_per_gib": locked - began, "end_s_per_gib": ended - locked}
            name = f"{nbytes >> 20} MiB, {'writable' if write else 'read-only'}"
            yield Row(name, True, {each: seconds * GIB / nbytes for each, seconds in figures.items()})
