"""The keys in the tables of a directory of the disk tier, for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path

from tokenlake.disk.places import RECORD_BYTES
from tokenlake.identity import SegmentKey
from tokenlake_server.disk.files import DirectoryFiles
from tokenlake_server.disk.table import BLOCK_BYTES, scan


def keys_on_disk(directory: Path) -> list[SegmentKey]:
    """The keys of the segments with a sound record; a daemon may use the directory meanwhile."""
    files = DirectoryFiles(directory, lock=False)
    found: list[SegmentKey] = []
    try:
        for name in files.names():
            if name.startswith("table-"):
                table = files.open(name)
                stored = scan(table, max(0, table.size() - BLOCK_BYTES) // RECORD_BYTES).stored
                found += [SegmentKey(record["key"].tobytes()) for record in stored]
                table.close()
    finally:
        files.close()
    return found
