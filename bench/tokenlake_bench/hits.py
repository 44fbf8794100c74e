"""The result of `bench cache-hit` in both modes: hit rates of the pool and of other arrangements of the same memory,
and the load of the nodes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenlake_bench.report import format_ratio, format_share

BUSIEST = "work of the perfect router's busiest node"


class LongPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts that are longer than the whole memory of one node, apart from the others. An instance finds such a
    prompt whole only in the memory of several nodes, or in one cache of a size that no node has. `prompts`: their
    number; `token_share`: their part of all prompt tokens; `hit_rate`, `others_hit_rate`: hit tokens / prompt tokens,
    of these and of the other prompts."""

    prompts: int
    token_share: float
    hit_rate: float
    others_hit_rate: float


def long_prompts(served: Iterable[tuple[int, int]], node_tokens: int) -> LongPrompts | None:
    """The prompts of more than `node_tokens` tokens among `served`, which has (prompt tokens, hit tokens) per request;
    None where there are none."""
    count = long = long_hits = others = others_hits = 0
    for tokens, hits in served:
        if tokens > node_tokens:
            count, long, long_hits = count + 1, long + tokens, long_hits + hits
        else:
            others, others_hits = others + tokens, others_hits + hits
    if not count:
        return None
    return LongPrompts(
        prompts=count,
        token_share=long / (long + others),
        hit_rate=long_hits / long,
        others_hit_rate=others_hits / max(1, others),
    )


class CacheHitResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench cache-hit`.

    The hit rates are hit tokens / prompt tokens. `remote_share` is the part of the pool's hit tokens that came from
    another node; the rest are own reads. `private_routed_busiest`: with a router that knows all caches and no queues,
    the tokens that the node with the most work computes / the mean. The load is defined in `balance`; it is None where
    no node sent anything. `bytes_moved` went between nodes; `wrong_bytes` differ from the stored ones.
    """

    token_hit_rate: float
    ideal_token_hit_rate: float
    private_token_hit_rate: float
    private_routed_token_hit_rate: float
    private_routed_busiest: float
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
        "private caches, perfect router, no queues": result.private_routed_token_hit_rate,
        "pool": result.token_hit_rate,
        "infinite cache": result.ideal_token_hit_rate,
    }
    busiest = f"{format_ratio(result.private_routed_busiest)} x the mean"
    return [*((f"hit rate, {name}", format_share(rate)) for name, rate in rates.items()), (BUSIEST, busiest)]
