"""`python -m tokenlake_testing.slow_cold`: a daemon whose cold tier begins each read and write later, by the seconds in
the variable `SLOW_COLD_S`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from tokenlake.command import end_at_sigterm


def slow_down(seconds: float) -> None:
    """Let each read and write of an object of a directory begin so many seconds later."""
    from tokenlake_server.cold.base import Reader
    from tokenlake_server.cold.directory import DirectoryObjects

    read, write = DirectoryObjects.read, DirectoryObjects.write

    def read_late(self: DirectoryObjects, path: str) -> Reader:
        time.sleep(seconds)
        return read(self, path)

    def write_late(self: DirectoryObjects, path: str, parts: Iterator[memoryview], nbytes: int) -> None:
        time.sleep(seconds)
        write(self, path, parts, nbytes)

    DirectoryObjects.read = read_late  # type: ignore[method-assign, assignment]
    DirectoryObjects.write = write_late  # type: ignore[method-assign]


if __name__ == "__main__":
    end_at_sigterm()
    slow_down(float(os.environ["SLOW_COLD_S"]))
    from tokenlake_server.cli import serve

    serve(prog_name="tokenlake serve")
