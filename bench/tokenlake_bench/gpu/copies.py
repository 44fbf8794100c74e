"""Copies between the host's memory and the device's, both ways, with checksums.

The host's memory is that of a region of the arena: mapped read-only for copies to the device, as loads map it, and
writable for copies from it, as saves do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from tokenlake_bench.gpu.base import Rig, Row, device_named
from tokenlake_client.engines.devices.base import Device
from tokenlake_client.mapped_memory import MappedMemory
from tokenlake_testing.device_bytes import random_bytes

TURNS = 10


def copies(rig: Rig) -> Iterator[Row]:
    """A row for each size, with page-locked and with pageable memory: GB/s of a copy in each direction, and whether the
    device could lock the memory."""
    device = device_named(rig.device)
    for nbytes in (1 << 16, 1 << 20) if rig.small else (1 << 20, 32 << 20, 256 << 20):
        for locked in (True, False):
            yield _row(device, nbytes, locked=locked)


def _row(device: Device, nbytes: int, *, locked: bool) -> Row:
    descriptor = os.memfd_create("copies")
    os.ftruncate(descriptor, 2 * nbytes)
    contents = random_bytes(nbytes, nbytes)
    os.pwrite(descriptor, contents.tobytes(), 0)
    reads = MappedMemory(descriptor, 2 * nbytes, write=False)
    writes = MappedMemory(descriptor, 2 * nbytes, write=True)
    os.close(descriptor)
    ends = [device.lock(each.address, each.nbytes, write=each.write) if locked else None for each in (reads, writes)]
    try:
        source: NDArray[np.uint8] = np.asarray(reads)[:nbytes]
        target: NDArray[np.uint8] = np.asarray(writes)[nbytes:]
        stream = device.stream()
        buffer = stream.empty((nbytes,), torch.uint8)
        seconds: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for direction, (begin, into, out_of) in enumerate(
                ((stream.to_device, buffer, source), (stream.to_host, target, buffer))
            ):
                started = time.perf_counter()
                begin(into, out_of)
                stream.synchronize()
                seconds[direction].append(time.perf_counter() - started)
        right = xxhash.xxh3_64_intdigest(target.data) == xxhash.xxh3_64_intdigest(contents.data)
    finally:
        for end in ends:
            if end is not None:
                end()
    return Row(
        f"{nbytes >> 10} KiB, {'page-locked' if locked else 'pageable'}",
        right,
        {
            "to_device_gb_s": nbytes / min(seconds[0]) / 1e9,
            "to_host_gb_s": nbytes / min(seconds[1]) / 1e9,
            "read_only_lock": float(ends[0] is not None),
            "lock": float(ends[1] is not None),
        },
    )
