"""Writes a trace to a file in Mooncake's format, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from tokenlake.errors import ConfigurationError
from tokenlake_bench.workloads.base import TraceLine


def check_target(path: Path) -> None:
    """Check the path before a trace is generated. Raises ConfigurationError for a file name that `read_mooncake` would
    not read, or for a directory that does not exist."""
    if not path.name.endswith((".jsonl", ".jsonl.zst")):
        raise ConfigurationError("out", str(path), "a file name ending in .jsonl or .jsonl.zst")
    if not path.parent.is_dir():
        raise ConfigurationError("out", str(path), "a file in a directory that exists")


def write_lines(lines: Iterable[TraceLine], path: Path) -> None:
    """Write the lines of a trace to the file, or replace it. Raises ConfigurationError where it cannot be written."""
    check_target(path)
    data = msgspec.json.Encoder().encode_lines(lines)
    if path.suffix == ".zst":
        import zstandard

        data = zstandard.compress(data)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigurationError("out", str(path), f"a file that can be written; {error.strerror}") from error
