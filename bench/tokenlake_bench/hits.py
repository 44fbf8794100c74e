"""The result of `bench cache-hit` in both modes: hit rates of the pool and of other arrangements of the same memory,
and the load of the nodes."""

from __future__ import annotations

import msgspec

from tokenlake_bench.report import format_share


class CacheHitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench cache-hit`.

    The hit rates are hit tokens / prompt tokens. `remote_share` is the part of the pool's hit tokens that came from
    another node; the rest are own reads. The load is defined in `balance`; it is None where no node sent anything.
    `bytes_moved` went between nodes; `wrong_bytes` counts bytes that differ from the stored ones.
    """

    token_hit_rate: float
    ideal_token_hit_rate: float
    private_token_hit_rate: float
    private_routed_token_hit_rate: float
    remote_share: float
    load_cv: float | None
    load_max_over_mean: float | None
    bytes_moved: int
    wrong_bytes: int
    requests: int
    nodes: int
    seed: int


def hit_rows(result: CacheHitResult) -> list[tuple[str, str]]:
    """The rows of the hit rates of the compared arrangements of caches."""
    rates = {
        "private caches, round robin": result.private_token_hit_rate,
        "private caches, prefix-aware routing": result.private_routed_token_hit_rate,
        "pool": result.token_hit_rate,
        "infinite cache": result.ideal_token_hit_rate,
    }
    return [(f"token hit rate, {name}", format_share(rate)) for name, rate in rates.items()]
