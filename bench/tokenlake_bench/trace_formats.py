"""Reads a trace file of any known format, as a workload of tokens or as prompts of segment ids."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenlake_bench.sessions import SessionTrace, read_sessions
from tokenlake_bench.trace_lines import ACCEPTED, TraceError, text_lines
from tokenlake_bench.traces import MooncakeTrace, read_mooncake


def read_trace(
    path: Path, *, limit: int | None = None, seed: int = 0, jitter_s: float = 0.0
) -> MooncakeTrace | SessionTrace:
    """The trace at `path`, read as coding-agent sessions if its first line has `requests`, as Mooncake's format if it
    has `hash_ids`. `jitter_s` applies to Mooncake's own files only, whose times are rounded and whose lines do not name
    a block size. Raises TraceError for any other file, and as `read_sessions` and `read_mooncake`."""
    number, first = next(text_lines(path), (0, b'{"hash_ids": []}'))
    try:
        fields = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = {}
    if "requests" in fields:
        return read_sessions(path, limit=limit, seed=seed)
    if "parent_chat_id" in fields:
        raise TraceError(path, "a Bailian log; 'tokenlake workload convert --from bailian' makes a trace of it", number)
    if "hash_ids" not in fields:
        raise TraceError(path, f"expected {ACCEPTED}", number)
    rounded_s = 0.0 if "block_size" in fields else jitter_s
    return read_mooncake(path, limit=limit, seed=seed, jitter_s=rounded_s)
