"""The result of `bench cache-hit` in both modes: hit rates of the pool and of other arrangements of the same memory,
and the load of the nodes."""

from __future__ import annotations

import msgspec

from tokenlake_bench.report import format_bytes, format_share
from tokenlake_bench.routing.outcome import DiskUse


class CacheHitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench cache-hit`.

    The hit rates are hit tokens / prompt tokens. `remote_share` is the part of the pool's hit tokens that came from
    another node; the rest are own reads. `duplication` is the mean number of copies per stored segment. The load is
    defined in `balance`; it is None where no node sent anything. `bytes_moved` went between nodes; `wrong_bytes` counts
    bytes that differ from the stored ones. `flash_max_over_mean`: the load of reads alone, without hand-overs, in the
    two windows that begin with the flash crowd; empty without one. `disk`: None without disks.
    """

    token_hit_rate: float
    ideal_token_hit_rate: float
    private_token_hit_rate: float
    private_routed_token_hit_rate: float
    remote_share: float
    duplication: float
    load_cv: float | None
    load_max_over_mean: float | None
    flash_max_over_mean: tuple[float, ...]
    bytes_moved: int
    wrong_bytes: int
    requests: int
    nodes: int
    seed: int
    disk: DiskUse | None


def hit_rates(result: CacheHitResult) -> dict[str, float]:
    """The compared arrangements of caches by the names in tables and plots, in their order there."""
    return {
        "private caches, round robin": result.private_token_hit_rate,
        "private caches, prefix-aware routing": result.private_routed_token_hit_rate,
        "pool": result.token_hit_rate,
        "infinite cache": result.ideal_token_hit_rate,
    }


def hit_rows(result: CacheHitResult) -> list[tuple[str, str]]:
    """The rows of the hit rates."""
    return [(f"token hit rate, {name}", format_share(rate)) for name, rate in hit_rates(result).items()]


def disk_rows(disk: DiskUse | None, tokens: int | None, nodes: int) -> list[tuple[str, str]]:
    """The rows of the disk tier. `tokens`: those that the disks of all `nodes` nodes hold."""
    if disk is None:
        return []
    return [
        ("capacity of the disks", f"{tokens or 0:,} tokens"),
        ("hits from the node's own disk", f"{disk.tokens:,} tokens"),
        ("written to disk per day, per node", format_bytes(int(disk.written_bytes_per_day / nodes))),
        ("the same in sizes of the disk", f"{disk.writes_per_day:.1f}"),
        ("written, of what memory evicted", format_share(disk.written_share)),
    ]
