"""The figures of a restart run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from rich.table import Table

from tokenlake_bench.report import format_duration, format_share
from tokenlake_bench.restart.load import Answered


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """One restart of one node, or of all nodes at once.

    `synced_segments`: those in the indexes of the nodes' disks when the daemons had ended; the bytes of a segment are
    synced before it enters the index. `recovered_share`: of these, the share that engines at the started nodes read
    again before anything was stored. `first_hit_s`: from the start of the processes to the first segment that an engine
    read which the node itself has, of the slowest node; None without any. The hit rates are hit tokens / prompt tokens
    of the requests (`RestartResult.requests`) before the restart and after it; `ideal_*` are those of a cache that
    forgets nothing, for the same requests. `down_s` and `ready_s`: seconds of the run at which the signal was sent, and
    at which all segments had been read. `wrong_bytes`: of all reads since the restart before this one.
    """

    signal: str
    nodes: list[str]
    synced_segments: int
    recovered_share: float
    first_hit_s: float | None
    hit_rate_before: float
    hit_rate_after: float
    ideal_before: float
    ideal_after: float
    wrong_bytes: int
    down_s: float
    ready_s: float


class RestartResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench restart`."""

    restarts: list[Restart]
    nodes: int
    requests: int
    seed: int
    failures: int
    """Calls of engines that ended without an answer; those of a daemon that was ended are among them."""
    wrong_bytes: int
    load_average: float
    """Of the last minute, at the begin."""


def hit_rate(answered: Iterable[Answered]) -> float:
    """Hit tokens / prompt tokens of full segments."""
    return _share(answered, lambda each: each.hits)


def ideal_rate(answered: Iterable[Answered]) -> float:
    """The hit rate of a cache that forgets nothing."""
    return _share(answered, lambda each: each.ideal)


def _share(answered: Iterable[Answered], part: Callable[[Answered], int]) -> float:
    chosen = list(answered)
    return sum(map(part, chosen)) / max(1, sum(each.asked for each in chosen))


def table(result: RestartResult) -> Table:
    """The table that the command prints: a row per restart."""
    title = f"{result.nodes} nodes, hits of {result.requests} requests before and after each restart"
    ideal = [rate for each in result.restarts for rate in (each.ideal_before, each.ideal_after)]
    caption = f"a cache that forgets nothing: hits {format_share(min(ideal))} to {format_share(max(ideal))}"
    made = Table(title=title, caption=caption)
    for name in ("", "synced", "recovered", "first hit", "before", "after", "wrong"):
        made.add_column(name, justify="right" if name else "left")
    for each in result.restarts:
        made.add_row(
            f"{each.signal} {each.nodes[0] if len(each.nodes) == 1 else 'all'}",
            f"{each.synced_segments:,}",
            format_share(each.recovered_share),
            "none" if each.first_hit_s is None else format_duration(each.first_hit_s),
            format_share(each.hit_rate_before),
            format_share(each.hit_rate_after),
            str(each.wrong_bytes),
        )
    return made
