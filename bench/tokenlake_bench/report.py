"""Results of the benchmark commands: their JSON and their tables.

Rates and shares are fractions from 0 to 1 in JSON and percentages in tables.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tokenlake_bench.routing.outcome import DiskUse


class CacheHitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench cache-hit`.

    The hit rates are hit tokens / prompt tokens. `remote_share` is the part of the pool's hit tokens that came from
    another node; the rest are own reads. `duplication` is the mean number of copies per stored segment. The load is
    defined in `balance`; it is None where no node sent anything, and its floor is None in live mode, as daemons do not
    report the holders of a segment. `bytes_moved` went between nodes; `wrong_bytes` counts bytes that differ from the
    stored ones.

    `flash_max_over_mean`: the load of reads alone, without hand-overs, in the two windows that begin with the flash
    crowd. `flash_floor`: their floor, empty in live mode. Both are empty without a flash crowd. `disk`: None without
    disks.
    """

    token_hit_rate: float
    ideal_token_hit_rate: float
    private_token_hit_rate: float
    private_routed_token_hit_rate: float
    remote_share: float
    duplication: float
    load_cv: float | None
    load_cv_floor: float | None
    load_max_over_mean: float | None
    flash_max_over_mean: tuple[float, ...]
    flash_floor: tuple[float, ...]
    bytes_moved: int
    wrong_bytes: int
    requests: int
    nodes: int
    seed: int
    disk: DiskUse | None


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds of the calls of one kind, such as matches: quantiles over the run."""

    p50_ms: float
    p99_ms: float


class CacheHitDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the table of `bench cache-hit` that its JSON lacks. `sent_bytes`: bytes that each node sent to other
    nodes, by name of the node. `disk_tokens`: those that the disks hold, None without disks."""

    workload: str
    segment_tokens: int
    capacity_tokens: int
    disk_tokens: int | None
    match: Quantiles
    fetch: Quantiles
    sent_bytes: dict[str, int]
    elapsed_s: float


class ShipResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the demo's second part, long documents with short answers: bytes between nodes when prefixes are
    fetched and when queries are shipped, each with the value of its formula. `cached_tokens`: prompt tokens found in
    the pool. Times to the first token are medians."""

    requests: int
    cached_tokens: int
    fetch_bytes: int
    fetch_formula_bytes: int
    ship_bytes: int
    ship_formula_bytes: int
    fetch_ttft_ms: float
    ship_ttft_ms: float
    tokens_equal: bool


class RestartPart(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the demo's last part, a restart of all daemons of a cluster with disks: hit tokens / prompt tokens of
    the `requests` before it and after it, beside those of an infinite cache. `restart_s`: from SIGTERM until all
    daemons serve and use their disks. `tokens_equal`: every request of the part gave the same tokens as without the
    pool."""

    requests: int
    hit_rate_before: float
    hit_rate_after: float
    ideal_before: float
    ideal_after: float
    restart_s: float
    tokens_equal: bool


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake demo`.

    `tokens_equal`: every compared request gave the same tokens with the pool as without. `control_changed_tokens`:
    requests whose tokens changed when bytes of their cached prefix were flipped on purpose. `longest_call_ms` and
    `errors` cover all calls of the engines, those during the loss of a node included. TTFT are medians.
    """

    token_hit_rate: float
    private_token_hit_rate: float
    private_routed_token_hit_rate: float
    ideal_token_hit_rate: float
    ttft_pool_ms: float
    ttft_cold_ms: float
    tokens_equal: bool
    control_changed_tokens: int
    longest_call_ms: float
    errors: int
    ship: ShipResult
    restart: RestartPart


class UntilKill(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the demo's requests before the daemon is killed, comparable with the computed hit rates of caches that
    lose no node."""

    requests: int
    token_hit_rate: float
    private_routed_token_hit_rate: float
    ideal_token_hit_rate: float


class DemoDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the demo's table that the JSON lacks.

    `compared` and `equal` count requests whose tokens were compared with a run without the pool, `controls` requests
    that were run with flipped bytes. `served_again_s` is the time from the kill until the node served a read or took a
    store again, None if it did not.
    """

    workload: str
    requests: int
    compared: int
    equal: int
    controls: int
    remote_share: float
    duplication: float
    bytes_moved: int
    evictions: int
    sent_bytes: dict[str, int]
    until_kill: UntilKill
    killed_node: str
    served_again_s: float | None
    elapsed_s: float
    random_model: bool


def write_json(result: object, path: Path) -> None:
    """Write the result, a struct or a container of structs, as JSON indented by two."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def format_bytes(count: float) -> str:
    """Text of a number of bytes in binary units with three significant digits: 1536 -> '1.50 KiB'."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 999.5 or unit == "TiB":
            break
    return f"{_three_digits(count)} {unit}"


def format_duration(seconds: float) -> str:
    """A duration with a unit that suits it: '250 us', '1.50 ms', '2.00 s', '3 min 5 s'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def format_share(share: float) -> str:
    """Text of a fraction as a percentage with one decimal."""
    return f"{share * 100:.1f} %"


def format_ratio(ratio: float | None) -> str:
    """Text of a number with three decimals; a dash for None."""
    return "-" if ratio is None else f"{ratio:.3f}"


def cache_hit_table(result: CacheHitResult, details: CacheHitDetails) -> RenderableType:
    """The result of `bench cache-hit` as a table for a terminal."""
    title = f"{details.workload}: {result.requests:,} requests, {result.nodes} nodes, seed {result.seed}"
    table = _grid(title)
    _rates(table, result)
    table.add_section()
    table.add_row("capacity of the pool", f"{details.capacity_tokens:,} tokens")
    table.add_row("segment", f"{details.segment_tokens:,} tokens")
    table.add_row("hits from another node", format_share(result.remote_share))
    table.add_row("copies per segment", f"{result.duplication:.3f}")
    table.add_row("bytes between nodes", format_bytes(result.bytes_moved))
    if result.disk is not None:
        add_disk_rows(table, result.disk, details.disk_tokens, result.nodes)
    table.add_section()
    _sent(table, details.sent_bytes)
    table.add_row("load CV, 10 s windows", format_ratio(result.load_cv))
    table.add_row("floor of the load CV", "not known: the daemons do not report the holders of a copy")
    table.add_row("load max / mean", format_ratio(result.load_max_over_mean))
    for number, ratio in enumerate(result.flash_max_over_mean, 1):
        table.add_row(f"load max / mean, window {number} of the flash crowd", format_ratio(ratio))
    table.add_section()
    table.add_row("match p50 / p99", _quantiles(details.match))
    table.add_row("fetch p50 / p99", _quantiles(details.fetch))
    table.add_row("elapsed", format_duration(details.elapsed_s))
    table.add_row("wrong bytes", _verdict(f"{result.wrong_bytes:,}", good=result.wrong_bytes == 0))
    return table


def demo_table(result: DemoResult, details: DemoDetails) -> RenderableType:
    """The result of the demo as a table for a terminal, followed by one line per check."""
    table = _grid(f"{details.workload}: {details.requests:,} requests")
    table.add_row("token hit rate, no cache", format_share(0.0))
    _rates(table, result)
    table.add_section()
    table.add_row("hits from another node", format_share(details.remote_share))
    table.add_row("copies per segment", f"{details.duplication:.3f}")
    table.add_row("bytes between nodes", format_bytes(details.bytes_moved))
    table.add_row("segments evicted", f"{details.evictions:,}")
    table.add_section()
    _sent(table, details.sent_bytes)
    table.add_section()
    table.add_row("TTFT with the pool, median", format_duration(result.ttft_pool_ms / 1e3))
    table.add_row("TTFT cold, median", format_duration(result.ttft_cold_ms / 1e3))
    table.add_row("elapsed", format_duration(details.elapsed_s))
    return Group(table, *_demo_lines(result, details))


def _demo_lines(result: DemoResult, details: DemoDetails) -> list[Text]:
    changed = result.control_changed_tokens
    longest = format_duration(result.longest_call_ms / 1e3)
    again = "did not serve again"
    if details.served_again_s is not None:
        again = f"served again after {format_duration(details.served_again_s)}"
    killed = f"node {details.killed_node} killed at 50 %: longest call {longest}, errors {result.errors:,}, {again}"
    before = details.until_kill
    lines = [
        Text(
            f"token hit rate of the {before.requests:,} requests before the kill: "
            f"pool {format_share(before.token_hit_rate)}, "
            f"prefix-aware routing {format_share(before.private_routed_token_hit_rate)}, "
            f"infinite cache {format_share(before.ideal_token_hit_rate)}"
        ),
        _verdict(f"tokens equal {details.equal:,} of {details.compared:,}", good=result.tokens_equal),
        _verdict(
            f"control with flipped bytes: {changed:,} of {details.controls:,} differ"
            + (", as required" if changed else "; at least one must"),
            good=changed > 0,
        ),
        _verdict(killed, good=result.errors == 0 and details.served_again_s is not None),
    ]
    if details.random_model:
        lines.append(Text("The model is tiny and random: the hit rates carry over, the milliseconds do not."))
    return lines


def _grid(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table


def _rates(table: Table, result: CacheHitResult | DemoResult) -> None:
    for name, rate in hit_rates(result).items():
        style = "bold" if name == "pool" else ""
        table.add_row(f"token hit rate, {name}", format_share(rate), style=style)


def hit_rates(result: CacheHitResult | DemoResult) -> dict[str, float]:
    """The compared arrangements of caches by the names in tables and plots, in their order there."""
    return {
        "private caches, round robin": result.private_token_hit_rate,
        "private caches, prefix-aware routing": result.private_routed_token_hit_rate,
        "pool": result.token_hit_rate,
        "infinite cache": result.ideal_token_hit_rate,
    }


def add_disk_rows(table: Table, disk: DiskUse, tokens: int | None, nodes: int) -> None:
    """Add the rows of the disk tier to a table of a run. `tokens`: those that the disks of all `nodes` nodes hold."""
    table.add_row("capacity of the disks", f"{tokens or 0:,} tokens")
    table.add_row("hits from the node's own disk", f"{disk.tokens:,} tokens")
    table.add_row("written to disk per day, per node", format_bytes(int(disk.written_bytes_per_day / nodes)))
    table.add_row("the same in sizes of the disk", f"{disk.writes_per_day:.1f}")
    table.add_row("written, of what memory evicted", format_share(disk.written_share))


def _sent(table: Table, sent_bytes: dict[str, int]) -> None:
    for name, count in sent_bytes.items():
        table.add_row(f"sent by {name}", format_bytes(count))


def _quantiles(quantiles: Quantiles) -> str:
    return f"{format_duration(quantiles.p50_ms / 1e3)} / {format_duration(quantiles.p99_ms / 1e3)}"


def _verdict(text: str, *, good: bool) -> Text:
    return Text(text, style="green" if good else "bold red")


def _three_digits(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"
