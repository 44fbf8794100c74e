"""The objects of one engine that its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenlake_client.engines.common.reports import Counters
from tokenlake_client.engines.transformers.counters import Counts
from tokenlake_client.engines.transformers.measurements import Measurements
from tokenlake_client.engines.transformers.options import EngineOptions
from tokenlake_client.engines.transformers.segment_copy import SegmentCopier
from tokenlake_client.engines.transformers.writer import Writer

Report = Callable[[str, BaseException], None]
"""A function of (operation that failed, its error). Never raises."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Made by `TokenLakeEngine`."""

    model: Any
    options: EngineOptions
    counters: Counters[Counts]
    measurements: Measurements
    copier: SegmentCopier
    writer: Writer
    failed: Report
    """Called with errors of the query engine."""
    pool_failed: Report
    """Called with errors of the pool."""
