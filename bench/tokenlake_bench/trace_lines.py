"""Reads the lines of a trace file, plain (`.jsonl`) or compressed (`.jsonl.gz`, `.jsonl.zst`)."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, cast

import msgspec
import zstandard

from tokenlake.errors import TokenLakeError

T = TypeVar("T")

ACCEPTED: Final = (
    "a trace in Mooncake's format or of coding-agent sessions, in a file named .jsonl, .jsonl.gz or .jsonl.zst; "
    "'tokenlake workload convert' makes one from a log (docs/traces.md)"
)
"""The trace files that commands read, for error messages."""


class TraceError(TokenLakeError):
    """Raised when a trace cannot be read; the message names the file, the line and the problem."""

    def __init__(self, path: Path, problem: str, line: int | None = None) -> None:
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {problem}")


def opened(file: BinaryIO, suffix: str) -> BinaryIO:
    """The uncompressed content of a file whose name has this suffix: `.gz`, `.zst`, or any other for a plain file. One
    chunk is in memory at a time. Reading raises OSError, EOFError, zlib.error or ZstdError for content that is broken;
    `broken` names these."""
    if suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return cast(BinaryIO, io.BufferedReader(reader))
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if suffix == ".gz" else file


def broken(path: Path, error: Exception) -> TraceError:
    """The error of a file that cannot be read, from that of the library."""
    if isinstance(error, zstandard.ZstdError):
        return TraceError(path, f"expected zstd data; {error}")
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return TraceError(path, f"expected gzip data; {error}")
    return TraceError(path, f"expected a readable file; {getattr(error, 'strerror', None) or error}")


UNREADABLE: Final = (OSError, EOFError, zlib.error, zstandard.ZstdError)
"""What reading a file raises that cannot be read."""


def text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not empty. One chunk and one line are in memory at a time. Raises
    TraceError."""
    if path.suffix not in (".jsonl", ".gz", ".zst"):
        raise TraceError(path, f"expected {ACCEPTED}")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(opened(file, path.suffix), 1):
                if line.strip():
                    yield number, line
    except UNREADABLE as error:
        raise broken(path, error) from None


def decoded(decoder: msgspec.json.Decoder[T], path: Path) -> Iterator[tuple[int, T]]:
    """(number, decoded line) of the lines of a file. Raises TraceError."""
    for number, text in text_lines(path):
        try:
            yield number, decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(path, str(error), number) from None
