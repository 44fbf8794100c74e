"""Computes the statistics of a trace that papers usually publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from tokenlake_bench.traces import BLOCK_TOKENS
from tokenlake_bench.workloads.base import TraceLine


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a trace. Lengths are in tokens, shares from 0 to 1. Blocks that are not full count as blocks, but
    are never found in a cache."""

    requests: int
    duration_s: float
    input_mean: float
    input_p50: float
    input_p99: float
    output_mean: float
    ideal_token_hit: float
    """Share of the prompts' tokens whose longest prefix a cache that never evicts would find."""
    blocks: int
    used_once: float
    """Share of the blocks that occur in one request only."""
    top_permille: float
    """Share of the accesses that go to the most used 0.1 % of the blocks."""
    top_percent: float
    """Share of the accesses that go to the most used 1 % of the blocks."""
    hottest: float
    """Share of the requests that contain the most used block."""


def statistics_of(lines: Sequence[TraceLine]) -> TraceStatistics:
    """Compute the statistics of a trace from its lines, at least one, in order of time."""
    inputs = np.array([line.input_length for line in lines])
    uses = Counter(block for line in lines for block in line.hash_ids)
    counts = np.sort(np.fromiter(uses.values(), dtype=np.int64))[::-1]
    accesses = int(counts.sum())
    return TraceStatistics(
        requests=len(lines),
        duration_s=(lines[-1].timestamp - lines[0].timestamp) / 1000,
        input_mean=float(inputs.mean()),
        input_p50=float(np.percentile(inputs, 50)),
        input_p99=float(np.percentile(inputs, 99)),
        output_mean=sum(line.output_length for line in lines) / len(lines),
        ideal_token_hit=_found(lines) * BLOCK_TOKENS / int(inputs.sum()),
        blocks=len(counts),
        used_once=float((counts == 1).mean()),
        top_permille=float(counts[: max(1, len(counts) // 1000)].sum()) / accesses,
        top_percent=float(counts[: max(1, len(counts) // 100)].sum()) / accesses,
        hottest=int(counts[0]) / len(lines),
    )


def _found(lines: Sequence[TraceLine]) -> int:
    """Number of full blocks that a cache that never evicts would find as longest prefixes, summed over the prompts."""
    seen: set[int] = set()
    found = 0
    for line in lines:
        full = line.hash_ids[: line.input_length // BLOCK_TOKENS]
        found += next((depth for depth, block in enumerate(full) if block not in seen), len(full))
        seen.update(full)
    return found
