"""The figures of an arrangement, their table and the JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from rich.table import Table

from tokenlake_bench.report import Quantiles, format_duration, format_ratio, format_share
from tokenlake_bench.router.engines import Counts
from tokenlake_bench.router.load import Served


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """The time that the plug-in adds to requests: its histogram `tokenlake_router_seconds`."""

    choices: dict[str, int]
    """Requests by outcome."""
    mean_ms: float
    p99_below_ms: float | None
    """Upper bound of the bucket that has the 99th percentile. None: it is above all bounds."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One arrangement. Shares are of the prompt tokens, as vLLM counts them."""

    arrangement: str
    requests: int
    prompt_tokens: int
    hit_share: float
    own_cache_share: float
    pool_share: float
    ttft: Quantiles
    """Milliseconds to the first text, streamed, at the client of the router."""
    ttft_mean_ms: float
    engine_ttft_mean_ms: float
    """Milliseconds from the arrival of a request at the engine to its first token, as vLLM counts them."""
    engine_cpu_ms: float
    router_cpu_ms: float
    """Processor time of the engines and of the router, per request."""
    elapsed_s: float
    balance: float
    """Largest number of computed prompt tokens of an instance over the mean."""
    computed_tokens: tuple[int, ...]
    """By instance."""
    added: Added | None
    """None without the plug-in."""
    errors: int
    first_error: str | None
    load_average: float
    """Of the machine over a minute, at the end."""


class RouterResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `bench router`."""

    instances: int
    memory_mib: int
    """Memory for caches of each instance, its share of the pool included."""
    at_once: int
    deadline_ms: float
    """The plug-in's setting of this name."""
    sessions: dict[str, int]
    best_share: float
    """Hit share of one cache without a limit."""
    rows: list[Row]


def row_of(
    name: str,
    served: Served,
    counts: Sequence[Counts],
    router_cpu_s: float,
    added: Added | None,
    load_average: float,
) -> Row:
    """The figures of an arrangement. `counts` of each instance, `router_cpu_s` (processor time of the router): in the
    run."""
    requests = len(served.ttft_s) + len(served.errors)
    tokens = [each.tokens for each in counts]
    total = sum(sum(each.values()) for each in tokens)
    own, pool = (sum(each[source] for each in tokens) for source in ("own cache", "pool"))
    computed = [each["computed"] for each in tokens]
    mean = sum(computed) / len(computed)
    times = np.asarray(served.ttft_s or [float("nan")]) * 1e3
    return Row(
        arrangement=name,
        requests=requests,
        prompt_tokens=int(total),
        hit_share=(own + pool) / total if total else 0.0,
        own_cache_share=own / total if total else 0.0,
        pool_share=pool / total if total else 0.0,
        ttft=Quantiles(float(np.percentile(times, 50)), float(np.percentile(times, 99))),
        ttft_mean_ms=float(times.mean()),
        engine_ttft_mean_ms=1e3 * sum(each.first_token_s for each in counts) / max(1, len(served.ttft_s)),
        engine_cpu_ms=1e3 * sum(each.cpu_s for each in counts) / max(1, requests),
        router_cpu_ms=1e3 * router_cpu_s / max(1, requests),
        elapsed_s=served.elapsed_s,
        balance=max(computed) / mean if mean else 1.0,
        computed_tokens=tuple(int(each) for each in computed),
        added=added,
        errors=len(served.errors),
        first_error=served.errors[0] if served.errors else None,
        load_average=load_average,
    )


def added_of(before: Mapping[str, float], after: Mapping[str, float]) -> Added:
    """The plug-in's histogram between two readings of the router's metrics page."""
    choices: dict[str, int] = {}
    buckets: dict[float, float] = {}
    seconds = 0.0
    for series, value in after.items():
        name, _, labels = series.partition("{")
        grown = value - before.get(series, 0.0)
        if name == "tokenlake_router_seconds_sum":
            seconds += grown
        elif name == "tokenlake_router_seconds_count" and grown:
            outcome = _label(labels, "outcome")
            choices[outcome] = choices.get(outcome, 0) + int(grown)
        elif name == "tokenlake_router_seconds_bucket":
            bound = float(_label(labels, "le"))
            buckets[bound] = buckets.get(bound, 0.0) + grown
    count = sum(choices.values())
    bounds = [bound for bound, below in sorted(buckets.items()) if count and below >= 0.99 * count]
    finite = bounds[0] if bounds and bounds[0] != float("inf") else None
    return Added(
        choices=choices,
        mean_ms=1e3 * seconds / count if count else 0.0,
        p99_below_ms=None if finite is None else 1e3 * finite,
    )


def _label(labels: str, name: str) -> str:
    return labels.partition(f'{name}="')[2].partition('"')[0]


def table(result: RouterResult) -> Table:
    """The result as a table for a terminal, with a column for each arrangement."""
    title = f"{result.instances} instances of {result.memory_mib} MiB, {result.at_once} sessions at a time"
    found = Table(title=title, title_justify="left")
    found.add_column()
    for row in result.rows:
        found.add_column(row.arrangement, justify="right")
    lines: dict[str, Callable[[Row], str]] = {
        "requests": lambda row: f"{row.requests:,}",
        "hits, of all prompt tokens": lambda row: format_share(row.hit_share),
        "of the engine's own cache": lambda row: format_share(row.own_cache_share),
        "of the pool": lambda row: format_share(row.pool_share),
        "TTFT, median": lambda row: format_duration(row.ttft.p50_ms / 1e3),
        "TTFT, p99": lambda row: format_duration(row.ttft.p99_ms / 1e3),
        "TTFT, mean": lambda row: format_duration(row.ttft_mean_ms / 1e3),
        "of it at the engine": lambda row: format_duration(row.engine_ttft_mean_ms / 1e3),
        "processor time, engines": lambda row: f"{row.engine_cpu_ms:.0f} ms",
        "processor time, router": lambda row: f"{row.router_cpu_ms:.0f} ms",
        "computed tokens, max/mean": lambda row: format_ratio(row.balance),
        "added by the plug-in, mean": lambda row: "-" if row.added is None else f"{row.added.mean_ms:.1f} ms",
        "added by the plug-in, p99 below": lambda row: _bound(row.added),
        "errors": lambda row: f"{row.errors:,}",
        "elapsed": lambda row: format_duration(row.elapsed_s),
        "load average": lambda row: f"{row.load_average:.1f}",
    }
    for name, cell in lines.items():
        found.add_row(name, *map(cell, result.rows))
    return found


def _bound(added: Added | None) -> str:
    if added is None:
        return "-"
    return "above all bounds" if added.p99_below_ms is None else f"{added.p99_below_ms:g} ms"
