"""The blocks of a segment, as the jobs of a rank name them. Imports no engine."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """The blocks of a job that belong to one segment."""

    segment: int
    """The index of the segment among the keys of the job, or in its lease."""
    group: int
    """The position of the blocks' cache group among the groups of the job."""
    skip: int
    """The number of blocks of the segment before the first one of the job."""
    blocks: tuple[int, ...]
    """The numbers of vLLM's blocks."""
