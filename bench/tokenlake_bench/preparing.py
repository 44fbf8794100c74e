"""`python -m tokenlake_bench.preparing`: seconds per GiB in which a daemon prepares its memory, by threads, beside
first touches of a process's own memory by as many threads."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tokenlake_server.engines.arena import Arena

REGION_BYTES = 256 << 20


def main() -> None:
    """Print one row for each number of threads, the least of the rounds, which take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    threads = [count for count in (1, 2, 4, 8) if count <= len(os.sched_getaffinity(0))]
    ways: dict[str, Callable[[int, int], float]] = {"arena": _arena, "first touches": _touches}
    seconds: dict[tuple[str, int], list[float]] = {(name, count): [] for count in threads for name in ways}
    for _ in range(given.rounds):
        for (name, count), each in seconds.items():
            each.append(ways[name](given.gib << 30, count))
    print("threads  arena, s/GiB  first touches, s/GiB  ratio")
    for count in threads:
        arena, touches = (min(seconds[name, count]) / given.gib for name in ways)
        print(f"{count:7}  {arena:12.2f}  {touches:20.2f}  {arena / touches:5.2f}")


def _arena(nbytes: int, threads: int) -> float:
    arena = Arena()
    numbers = range(nbytes // REGION_BYTES)
    try:
        return _timed(threads, [partial(arena.make, number, REGION_BYTES) for number in numbers])
    finally:
        arena.free_pages({})
        arena.close()


def _touches(nbytes: int, threads: int) -> float:
    """ctypes releases the GIL during memset."""
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(anchor)
        starts = range(base, base + nbytes, REGION_BYTES)
        libc = ctypes.CDLL(None)
        libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        try:
            return _timed(threads, [partial(libc.memset, start, 1, REGION_BYTES) for start in starts])
        finally:
            del anchor


def _timed(threads: int, works: Sequence[Callable[[], object]]) -> float:
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        for done in [pool.submit(work) for work in works]:
            done.result()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
