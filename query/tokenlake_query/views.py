"""A view of an engine: which segments its queries attend to, here and at other query engines.

A segment that another query engine does not answer for any more is brought here, and the view has it here from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from tokenlake.errors import TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake_client import Pool
from tokenlake_query.asking import Asker
from tokenlake_query.segments import Segments, bring_here
from tokenlake_query.work import Attention

__all__ = ["Holding", "Share", "View"]


class Share(NamedTuple):
    """The part of a view that another query engine answers for."""

    asker: Asker
    """The connection that it was opened over."""
    view: int
    """Its number there."""
    keys: Sequence[SegmentKey]


class Holding(NamedTuple):
    """Where the segments of a view are, each once."""

    segments: Segments
    """Here."""
    shares: tuple[Share, ...]


class View:
    """Of one engine."""

    def __init__(self, pool: Pool, attention: Attention, segments: Segments, shares: Sequence[Share]) -> None:
        self.pool = pool
        self.attention = attention
        self.holding = Holding(segments, tuple(shares))
        """Replaced as a whole: whoever reads it once counts no segment twice, and none not at all."""
        self.lost = False
        """Some of it is nowhere any more: every query of it is LOST."""
        self._bringing = threading.Lock()
        self._brought: dict[Share, Segments] = {}

    def bring(self, share: Share, until: float) -> Segments | None:
        """The segments of `share`, here: of the view from now on. None where they cannot be had until then (monotonic
        time). Waits; several may call for one share, which is brought once."""
        if not self._bringing.acquire(timeout=max(0.0, until - time.monotonic())):
            return None
        try:
            if share not in self._brought:
                left = until - time.monotonic()
                if self.lost or left <= 0:
                    return None
                segments = bring_here(self.pool, share.keys, left)
                if len(segments) < len(share.keys):
                    # It may have been the time that was too short.
                    self.lost = time.monotonic() < until
                    return None
                self._brought[share] = segments
                others = tuple(other for other in self.holding.shares if other is not share)
                self.holding = Holding(self.holding.segments + segments, others)
                # Whoever wakes up need not compute what it still owes, nor keep it leased.
                share.asker.close_view(share.view)
            return self._brought[share]
        except TokenLakeError:
            return None
        finally:
            self._bringing.release()

    def close(self) -> None:
        """Tell the other query engines. The segments here are given back when nobody computes over them any more."""
        for share in self.holding.shares:
            share.asker.close_view(share.view)
