"""Which tokens of a request can be loaded and which are full segments: arithmetic only.

::

    0      local hit            hits * segment      total
    |------|---------------------|------------------|
    | vLLM | loaded from the pool| computed         |
           ^ a multiple of the block size, in the middle of a segment perhaps
"""

from __future__ import annotations

__all__ = ["loadable_until", "wanted_segments"]


def loadable_until(hits: int, total: int, segment: int, block: int) -> int:
    """Where a load ends that has the first `hits` segments of a request of `total` tokens: whole blocks, and at
    least one token is left to compute, because its logits are needed."""
    return max(0, min(hits * segment, (total - 1) // block * block))


def wanted_segments(total: int, segment: int, block: int) -> int:
    """How many segments, from the first on, a load could use at most."""
    return -(-loadable_until(total // segment, total, segment, block) // segment)
