"""`tokenlake top`: rates per node and tenant, hot prefixes and slow calls, on one screen that is refreshed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click
from rich.live import Live

from tokenlake.errors import TokenLakeError
from tokenlake_operator.nodes import Node, reach_all
from tokenlake_operator.plain import plain
from tokenlake_operator.reaching import Target, one_line, operates
from tokenlake_operator.status import ASKED, SAVED, TOKENS, memory_used
from tokenlake_operator.words import amount, per_second, share, span
from tokenlake_proto.v1 import admin_pb2 as pb
from tokenlake_server.tables import PackedTables, print_rows

SHOWN = 8
"""Maximum number of prefixes, and of calls, on one screen."""
KEY_DIGITS = 16
READ, WRITTEN = "tokenlake_read_bytes_total", "tokenlake_written_bytes_total"
RATES = {
    "matches_per_s": "tokenlake_match_requests_total",
    "asked_tokens_per_s": ASKED,
    "saved_prefill_ms_per_s": SAVED,
    "read_bytes_per_s": READ,
    "written_bytes_per_s": WRITTEN,
    "received_bytes_per_s": "tokenlake_received_bytes_total",
    "sent_bytes_per_s": "tokenlake_sent_bytes_total",
    "evicted_per_s": "tokenlake_evicted_segments_total",
    "refused_per_s": "tokenlake_refused_segments_total",
}
"""By the name of a rate in JSON, the name of the counter: the rate is the growth of the counter per second."""


class Screen(NamedTuple):
    """The facts of one screen."""

    nodes: list[dict[str, Any]]
    tenants: list[dict[str, Any]]
    prefixes: list[dict[str, Any]]
    calls: list[dict[str, Any]]
    requests: int
    alone: int
    """`requests`: the newest requests of all nodes. `alone`: those that begin with a segment that no other request of
    their node has."""
    lost: dict[str, str]
    """By the name of a node that did not answer, the reason."""


@click.command()
@click.option("--once", is_flag=True, help="Print one screen and end.")
@click.option(
    "--interval", default=2.0, show_default=True, type=click.FloatRange(0.2, 60), help="Seconds between two screens."
)
@operates
def top(target: Target, once: bool, interval: float, as_json: bool) -> None:
    """Watch the pool: rates of each node and tenant that can be asked, hot prefixes, and the slowest calls.

    Prefixes and calls are those of the newest 1,024 requests of each node. A rate is the mean of one interval. --json
    prints one object per interval.
    """
    with reach_all(target) as (nodes, silent):
        screens = _screens(nodes, silent, interval)
        if as_json or once or not sys.stdout.isatty():
            for screen in screens:
                _print(screen, as_json)
                if once:
                    return
        with Live(auto_refresh=False, screen=True) as live:
            try:
                for screen in screens:
                    live.update(PackedTables(_tables(screen)), refresh=True)
            except KeyboardInterrupt:
                return


def _screens(nodes: Sequence[Node], silent: Mapping[str, str], interval: float) -> Iterator[Screen]:
    before = {node.name: node.status for node in nodes}
    while True:
        time.sleep(interval)
        now: dict[str, pb.GetStatusResponse] = {}
        activity: dict[str, pb.GetActivityResponse] = {}
        lost = dict(silent)
        for node in nodes:
            try:
                now[node.name] = node.control.status()
                activity[node.name] = node.control.activity(SHOWN)
            except TokenLakeError as error:
                now.pop(node.name, None)
                lost[node.name] = one_line(error)
        if nodes[0].name in lost and len(now) == 0:
            # Without any node there is nothing to watch.
            nodes[0].control.status()
        newest = activity.values()
        requests, alone = sum(each.requests for each in newest), sum(each.alone for each in newest)
        rates = _node_rates(before, now), _tenant_rates(before, now)
        yield Screen(*rates, *_newest(activity), requests, alone, lost)
        before |= now


def _seconds(before: pb.GetStatusResponse, now: pb.GetStatusResponse) -> float:
    """Seconds between two states of one start of a daemon; 0 where the daemon was started again between them."""
    return now.uptime_s - before.uptime_s if now.incarnation == before.incarnation else 0.0


def _node_rates(
    before: Mapping[str, pb.GetStatusResponse], now: Mapping[str, pb.GetStatusResponse]
) -> list[dict[str, Any]]:
    rows = []
    for name, state in now.items():
        earlier = before[name]
        seconds = _seconds(earlier, state)
        asked = state.counters[ASKED] - earlier.counters[ASKED]
        rows.append(
            {
                "node": name,
                "memory_bytes": state.memory_bytes,
                "used_bytes": memory_used(state),
                "engines": state.engines,
                "processes": state.processes,
                **{
                    f"{name.replace(' ', '_')}_share": (state.counters[counter] - earlier.counters[counter]) / asked
                    if asked and seconds
                    else None
                    for name, counter in TOKENS.items()
                },
                **{
                    rate: (state.counters[counter] - earlier.counters[counter]) / seconds if seconds else 0.0
                    for rate, counter in RATES.items()
                },
            }
        )
    return rows


def _tenant_rates(
    before: Mapping[str, pb.GetStatusResponse], now: Mapping[str, pb.GetStatusResponse]
) -> list[dict[str, Any]]:
    """Rates and memory of each tenant, over all nodes."""
    found: dict[str, dict[str, float]] = {}
    for name, state in now.items():
        seconds = _seconds(before[name], state)
        earlier = {each.tenant: each.counters for each in before[name].tenants}
        for pool in state.pools:
            row = found.setdefault(pool.tenant, {"used_bytes": 0.0, "segments": 0.0, READ: 0.0, WRITTEN: 0.0})
            row["used_bytes"] += (pool.slots - pool.free_slots) * pool.slot_bytes
            row["segments"] += sum(pool.segments.values())
        for each in state.tenants:
            row = found.setdefault(each.tenant, {"used_bytes": 0.0, "segments": 0.0, READ: 0.0, WRITTEN: 0.0})
            known: Mapping[str, int] = earlier.get(each.tenant, {})
            for counter in (READ, WRITTEN):
                if seconds and counter in each.counters:
                    row[counter] += (each.counters[counter] - known.get(counter, 0)) / seconds
    return [
        {
            "tenant": tenant,
            "used_bytes": int(row["used_bytes"]),
            "segments": int(row["segments"]),
            "read_bytes_per_s": row[READ],
            "written_bytes_per_s": row[WRITTEN],
        }
        for tenant, row in sorted(found.items(), key=lambda item: (-item[1][READ] - item[1][WRITTEN], item[0]))
    ]


def _newest(activity: Mapping[str, pb.GetActivityResponse]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The hot prefixes, the requests of all nodes together; and the slowest calls."""
    prefixes: dict[tuple[str, bytes], dict[str, Any]] = {}
    calls = []
    for name, each in activity.items():
        for prefix in each.prefixes:
            known = prefixes.setdefault((prefix.tenant, prefix.key), {**plain(prefix), "nodes": []})
            if known["nodes"]:
                for field in ("requests", "asked_tokens", "supplied_tokens", "engine_had_tokens"):
                    known[field] += getattr(prefix, field)
            known["nodes"].append(name)
        calls += [{"node": name, **plain(call)} for call in each.calls]
    hot = sorted(prefixes.values(), key=lambda prefix: -prefix["requests"])
    calls.sort(key=lambda call: -call["seconds"])
    return hot[:SHOWN], calls[:SHOWN]


Rows = list[tuple[str, ...]]


def _tables(screen: Screen) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    """(title, columns, rows) of each table."""
    columns = ("node", "used", "of", "tokens/s", *TOKENS, "saved")
    yield (
        f"{time.strftime('%H:%M:%S')}, nodes",
        (
            *columns,
            "read",
            "written",
            "received",
            "sent",
            "evicted/s",
            "refused/s",
            "matches/s",
            "engines",
            "processes",
        ),
        [
            (
                each["node"],
                amount(each["used_bytes"]),
                amount(each["memory_bytes"]),
                f"{each['asked_tokens_per_s']:,.0f}",
                *(
                    "-" if each[name] is None else share(each[name], 1)
                    for name in ("supplied_share", "engine_had_share", "missed_share")
                ),
                f"{each['saved_prefill_ms_per_s'] / 1e3:.1f} s/s",
                *(per_second(each[f"{name}_bytes_per_s"]) for name in ("read", "written", "received", "sent")),
                f"{each['evicted_per_s']:.1f}",
                f"{each['refused_per_s']:.1f}",
                f"{each['matches_per_s']:.1f}",
                str(each["engines"]),
                str(each["processes"]),
            )
            for each in screen.nodes
        ],
    )
    yield (
        "tenants",
        ("tenant", "used", "segments", "read", "written"),
        [
            (
                each["tenant"],
                amount(each["used_bytes"]),
                f"{each['segments']:,}",
                per_second(each["read_bytes_per_s"]),
                per_second(each["written_bytes_per_s"]),
            )
            for each in screen.tenants
        ],
    )
    yield (
        f"hot prefixes of the newest {screen.requests:,} requests; {screen.alone:,} begin like no other",
        ("first segment", "tenant", "requests", "tokens", "supplied", "engine had", "newest request", "nodes"),
        [
            (
                each["key"][:KEY_DIGITS],
                each["tenant"],
                str(each["requests"]),
                f"{each['asked_tokens']:,}",
                share(each["supplied_tokens"], each["asked_tokens"]),
                share(each["engine_had_tokens"], each["asked_tokens"]),
                each["newest"],
                ", ".join(each["nodes"]),
            )
            for each in screen.prefixes
        ],
    )
    yield (
        "slowest calls of the newest requests",
        ("time", "call", "node", "tenant", "request", "ago"),
        [
            (
                span(each["seconds"]),
                each["call"],
                each["node"],
                each["tenant"],
                each["request"],
                span(each["age_s"]),
            )
            for each in screen.calls
        ],
    )
    if screen.lost:
        yield "not asked", ("node", "reason"), list(screen.lost.items())


def _print(screen: Screen, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(screen._asdict()))
        sys.stdout.flush()
        return
    for title, columns, rows in _tables(screen):
        print_rows(columns, rows, title)
