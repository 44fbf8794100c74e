"""Reads a trace file of any known format, as a workload of tokens or as prompts of segment ids."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenlake_bench.sessions import SessionTrace, read_sessions
from tokenlake_bench.trace_lines import text_lines
from tokenlake_bench.traces import MooncakeTrace, read_mooncake


def read_trace(
    path: Path, *, limit: int | None = None, seed: int = 0, jitter_s: float = 0.0
) -> MooncakeTrace | SessionTrace:
    """The trace at `path`, read as coding-agent sessions if its first line has `requests`, else as Mooncake's format.
    `jitter_s` applies to the latter only, whose times may be rounded. Raises as `read_sessions` and `read_mooncake`."""
    _, first = next(text_lines(path), (0, b""))
    try:
        sessions = "requests" in msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        sessions = False
    if sessions:
        return read_sessions(path, limit=limit, seed=seed)
    return read_mooncake(path, limit=limit, seed=seed, jitter_s=jitter_s)
