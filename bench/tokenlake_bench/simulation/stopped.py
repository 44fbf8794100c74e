"""A simulated cluster that is stopped, and another one that starts in its place with the cold tier alone.

::

    requests   0 ............ stop_at ............ end
    first      |--------------| saves its memory
    second                    |--------------------|  the cold tier of the first; no memory, no disk, no history
    going on   |-----------------------------------|  no stop, for comparison
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from rich.table import Table

from tokenlake.core import events
from tokenlake_bench.report import format_share, table
from tokenlake_bench.routing.outcome import Answered
from tokenlake_bench.simulation.arrivals import Arrival
from tokenlake_bench.simulation.cold import ColdContent
from tokenlake_bench.simulation.pooled import PooledRun

NEXT = 200
"""The requests behind the stop that are counted first."""
SAVE_S = 10.0
"""Seconds for which the nodes save memory before they end, the default of `disk_save_s`."""
Maker = Callable[[ColdContent | None], PooledRun]
"""Makes a run from the content of the cold tier; None: an empty one."""


class StopFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates behind a stop: of the next `NEXT` requests, and of all. `going_on`: no stop; `with_cold`: the new
    cluster has the cold tier of the old one; `empty`: it has an empty one. `saved_bytes`: written to the cold tier
    because of the stop."""

    requests: int
    next_going_on: float
    next_with_cold: float
    next_empty: float
    all_going_on: float
    all_with_cold: float
    all_empty: float
    saved_bytes: int


def run_stopped(make: Maker, arrivals: Sequence[Arrival], stop_at_s: float) -> StopFigures:
    """Simulate the stop at second `stop_at_s` of the workload. There must be requests before it and behind it."""
    count = next((index for index, each in enumerate(arrivals) if each.at_s >= stop_at_s), len(arrivals))
    first = make(None)
    first.run(arrivals[:count])
    content = first.simulation.cluster.cold
    assert content is not None
    before = content.written_bytes
    _save(first)
    saved_bytes = content.written_bytes - before
    later = [_behind(arrival, count, stop_at_s) for arrival in arrivals[count:]]
    going_on, second, empty = make(None), make(content), make(None)
    going_on.run(arrivals)
    second.run(later)
    empty.run(later)
    rest = [each for each in going_on.answers if each.at_s >= stop_at_s]
    return StopFigures(
        requests=len(later),
        next_going_on=_rate(rest, NEXT),
        next_with_cold=_rate(second.answers, NEXT),
        next_empty=_rate(empty.answers, NEXT),
        all_going_on=_rate(rest),
        all_with_cold=_rate(second.answers),
        all_empty=_rate(empty.answers),
        saved_bytes=saved_bytes,
    )


def _save(run: PooledRun) -> None:
    """Let the rules of all nodes save their memory, as a daemon that is about to end does."""
    cluster = run.simulation.cluster
    for node in cluster.nodes:
        node.deliver(events.SaveRequested(SAVE_S))
    until = cluster.clock.now + 2 * SAVE_S
    while cluster.clock.now < until and not all(node.saved for node in cluster.nodes):
        cluster.clock.run_until(cluster.clock.now + 0.1)


def _behind(arrival: Arrival, count: int, stop_at_s: float) -> Arrival:
    """A request behind the stop, in a workload that begins with it."""
    moved = arrival._replace(at_s=arrival.at_s - stop_at_s)
    if arrival.follows is None:
        return moved
    return moved._replace(follows=arrival.follows - count) if arrival.follows >= count else moved.arrived(moved.at_s)


def _rate(answers: Sequence[Answered], most: int | None = None) -> float:
    chosen = sorted(answers, key=lambda each: each.at_s)[:most]
    return sum(each.hit_tokens for each in chosen) / max(1, sum(each.prompt_tokens for each in chosen))


def stop_table(figures: StopFigures) -> Table:
    """The figures as a table for a terminal."""
    return table(
        f"All nodes stop, and others start: {figures.requests:,} requests behind",
        ("hits", f"next {NEXT}", "all"),
        [
            ("no stop", format_share(figures.next_going_on), format_share(figures.all_going_on)),
            ("with the cold tier", format_share(figures.next_with_cold), format_share(figures.all_with_cold)),
            ("with an empty one", format_share(figures.next_empty), format_share(figures.all_empty)),
        ],
    )
