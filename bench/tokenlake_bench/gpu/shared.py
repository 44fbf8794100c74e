"""Memory of the device that two processes map (CUDA IPC), with checksums.

::

    this process    | allocate, fill |  handle -> |                                    | compare | close
    other process                                 | open, checksum, write all bytes, close |
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import xxhash

from tokenlake_bench.gpu.base import Rig, Row, device_named
from tokenlake_testing.device_bytes import bytes_of, random_bytes

LIMIT_S = 120.0


def shared(rig: Rig) -> Iterator[Row]:
    """One row: seconds in which the other process opens the memory."""
    device = device_named(rig.device)
    nbytes = 1 << 20 if rig.small else 64 << 20
    memory, stream = device.allocate(nbytes), device.stream()
    try:
        contents = random_bytes(nbytes, 1)
        stream.to_device(memory.tensor, contents)
        # The handle is no event: the other process may read as soon as it has it.
        stream.synchronize()
        command = [sys.executable, "-m", "tokenlake_bench.gpu.shared", rig.device, memory.handle().hex(), str(nbytes)]
        child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if child.returncode:
            raise RuntimeError(f"the process that opens the memory failed: {child.stderr.strip()[-2000:]}")
        digest, seconds = child.stdout.split()
        right = int(digest) == xxhash.xxh3_64_intdigest(contents.data)
        right &= bytes(bytes_of(stream, memory.tensor)) == bytes(255 - contents)
    finally:
        memory.close()
    yield Row(f"{nbytes >> 20} MiB in two processes", right, {"open_s": float(seconds)})


def _open(name: str, handle: str, size: str) -> None:
    device = device_named(name)
    started = time.perf_counter()
    memory = device.open(bytes.fromhex(handle), int(size))
    seconds = time.perf_counter() - started
    stream = device.stream()
    contents = bytes_of(stream, memory.tensor)
    stream.to_device(memory.tensor, 255 - contents)
    stream.synchronize()
    memory.close()
    print(xxhash.xxh3_64_intdigest(contents.data), seconds)


if __name__ == "__main__":
    _open(*sys.argv[1:])
