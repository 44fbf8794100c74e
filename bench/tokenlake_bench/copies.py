"""Counts how many nodes of a cluster have a copy of each segment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenlake.identity import SegmentKey
from tokenlake.wire import Code
from tokenlake_bench.live_client import MATCH_S
from tokenlake_client import Pool

BATCH = 1024
"""Number of keys per match when the copies of segments are counted."""


def copies_per_segment(pools: Sequence[Pool], keys: Iterable[SegmentKey], haste: float = 1.0) -> float:
    """Mean number of copies of those of `keys` (distinct, in any order) that some node holds; 0 if there are none.

    `pools`: one client per node. Call it when no transfer between nodes is under way. The segments that it finds count
    as accessed. `haste`: seconds of the nodes' clocks per real second.
    """
    distinct = list(keys)
    copies: Counter[SegmentKey] = Counter()
    for pool in pools:
        for start in range(0, len(distinct), BATCH):
            batch = distinct[start : start + BATCH]
            with pool.match(batch, deadline_s=MATCH_S * haste) as lease:
                found = [key for key, code in zip(batch, lease.codes, strict=True) if code == Code.LOCAL]
            copies.update(found)
    return copies.total() / len(copies) if copies else 0.0
