"""Requests in order of their arrival, from logs that are nearly in order, with bounded memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Final

from tokenlake_bench.convert.base import Log, Logged

WINDOW: Final = 10_000
"""Requests that wait for earlier ones, and for their answers, before they are written."""
WINDOW_IDS: Final = 8 << 20
"""Block ids of these requests together."""


def in_order(log: Log, requests: Iterable[Logged], window: int = WINDOW, ids: int = WINDOW_IDS) -> Iterator[Logged]:
    """The requests of a log by `at_s`. At most `window` of them with at most `ids` block ids wait at a time; one that
    comes later than that is a wrong line."""
    waiting: list[tuple[float, int, Logged]] = []
    held = 0
    last = float("-inf")

    def first() -> Logged:
        nonlocal held, last
        last, _, logged = heapq.heappop(waiting)
        held -= len(logged.block_ids)
        return logged

    for number, logged in enumerate(requests):
        if logged.at_s < last:
            log.report.wrong(log.path, logged.line, f"time: more than {window:,} requests behind; sort the log by time")
            continue
        heapq.heappush(waiting, (logged.at_s, number, logged))
        held += len(logged.block_ids)
        while len(waiting) > window or (held > ids and len(waiting) > 1):
            yield first()
    while waiting:
        yield first()
